#include "../collectives/exchange.h"
#include "../symints.h"
#include "ops.h"

#include <ATen/ops/cat.h>
#include <torch/library.h>

namespace deepsp {

c10::SymInt check_sum(at::TensorList inputs, int64_t rank, int64_t size) {
  TORCH_CHECK_VALUE(!inputs.empty(), "inputs is empty; at least one tensor is right");
  TORCH_CHECK_VALUE(
      rank >= 0 && rank < size, "rank is ", rank, ", but there are ", size, " ranks; 0 to ",
      size - 1, " is right");
  c10::SymInt elements = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    TORCH_CHECK_VALUE(
        inputs[i].layout() == at::kStrided, "inputs[", i, "] is ", inputs[i].layout(),
        "; only dense tensors can be summed");
    TORCH_CHECK_VALUE(
        inputs[i].scalar_type() == inputs[0].scalar_type() &&
            inputs[i].device() == inputs[0].device(),
        "inputs[", i, "] is ", inputs[i].scalar_type(), " on ", inputs[i].device(),
        ", but inputs[0] is ", inputs[0].scalar_type(), " on ", inputs[0].device(),
        "; they must be the same");
    elements = elements + inputs[i].sym_numel();
  }
  return elements;
}

std::vector<std::vector<c10::SymInt>> check_sum_wait(
    const at::Tensor& buffer, c10::SymIntArrayRef shapes, at::IntArrayRef dims) {
  std::vector<std::vector<c10::SymInt>> result;
  size_t at = 0;
  c10::SymInt elements = 0;
  for (const int64_t dim : dims) {
    TORCH_CHECK_VALUE(
        dim >= 0 && at + dim <= shapes.size(), "dims say ", dim, " sizes from ", at,
        ", but shapes has ", shapes.size());
    result.emplace_back(shapes.begin() + at, shapes.begin() + at + dim);
    at += dim;
    c10::SymInt numel = 1;
    for (const c10::SymInt& length : result.back()) {
      numel = numel * length;
    }
    elements = elements + numel;
  }
  TORCH_CHECK_VALUE(
      at == shapes.size() && buffer.dim() == 1 && buffer.sym_numel() == elements,
      "shapes and dims say ", elements, " elements, but the buffer has shape ", buffer.sym_sizes());
  return result;
}

std::vector<at::Tensor> views_of(
    const at::Tensor& buffer, const std::vector<std::vector<c10::SymInt>>& shapes) {
  std::vector<at::Tensor> views;
  c10::SymInt begin = 0;
  for (const auto& shape : shapes) {
    c10::SymInt numel = 1;
    for (const c10::SymInt& length : shape) {
      numel = numel * length;
    }
    views.push_back(buffer.narrow_symint(0, begin, numel).view_symint(shape));
    begin = begin + numel;
  }
  return views;
}

namespace {

at::Tensor sum_start_kernel(
    at::TensorList inputs, int64_t rank, int64_t size, std::string_view group_name) {
  const int64_t elements = check_sum(inputs, rank, size).expect_int();
  const Group group = resolve_group(group_name, rank, size, inputs[0].device());
  at::Tensor buffer = empty_buffer({elements}, inputs[0]);
  std::vector<at::Tensor> flat;
  for (const at::Tensor& input : inputs) {
    flat.push_back(input.reshape({-1}));
  }
  at::cat_out(buffer, flat);
  if (size > 1 && elements > 0) {
    launch_into(buffer, all_reduce_sum(group, buffer), buffer);
    if (watched() && buffer.is_cpu()) {
      flight_into(buffer)->wait_all();
    }
  }
  return buffer;
}

std::vector<at::Tensor> sum_wait_kernel(
    const at::Tensor& buffer,
    c10::SymIntArrayRef shapes,
    at::IntArrayRef dims,
    int64_t /*rank*/,
    int64_t /*size*/,
    std::string_view /*group_name*/) {
  const auto views = check_sum_wait(buffer, shapes, dims);
  if (const auto flight = flight_into(buffer)) {
    flight->wait_all();
    mark_landed(buffer);
  }
  return views_of(buffer, views);
}

void register_kernels(torch::Library& m) {
  m.impl("sum_start", sum_start_kernel);
  m.impl("sum_wait", sum_wait_kernel);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CPU, m) {
  register_kernels(m);
}

#ifdef DEEPSP_CUDA
TORCH_LIBRARY_IMPL(deepsp, CUDA, m) {
  register_kernels(m);
}
#endif

}  // namespace deepsp
