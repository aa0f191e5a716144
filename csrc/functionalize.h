#pragma once
// How functionalization sees a wait that returns views of its buffer: the alias is cut. A wait
// consumes its buffer, so nobody sees the difference.

#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <vector>

namespace deepsp {

// `wait(buffer)` gives the views.
template <class Wait>
std::vector<at::Tensor> cut_alias(const at::Tensor& buffer, const Wait& wait) {
  namespace functional = at::functionalization::impl;
  at::Tensor inner = buffer;
  if (functional::isFunctionalTensor(buffer)) {
    functional::sync(buffer);
    inner = functional::from_functional_tensor(buffer);
  }
  std::vector<at::Tensor> views;
  {
    at::AutoDispatchSkipFunctionalize guard;
    views = wait(inner);
  }
  return functional::to_functional_tensor(at::TensorList(views));
}

}  // namespace deepsp
