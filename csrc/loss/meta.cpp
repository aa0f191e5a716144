#include "ops.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace deepsp {
namespace {

std::vector<at::Tensor> linear_cross_entropy_gradients_meta(
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    const at::Tensor& labels,
    int64_t /*ignore_index*/,
    double label_smoothing,
    std::optional<int64_t> chunk_tokens,
    at::IntArrayRef wanted) {
  check_linear_cross_entropy(hidden, weight, bias, labels, label_smoothing, chunk_tokens, wanted);
  const auto wide = hidden.options().dtype(wide_dtype(hidden.scalar_type()));
  std::vector<at::Tensor> found{at::empty({}, hidden.options().dtype(at::kDouble))};
  if (wanted[0]) {
    found.push_back(at::empty_symint(hidden.sym_sizes(), hidden.options()));
  }
  if (wanted[1]) {
    found.push_back(at::empty_symint(weight.sym_sizes(), wide));
  }
  if (wanted[2]) {
    found.push_back(at::empty_symint(bias->sym_sizes(), wide));
  }
  return found;
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, Meta, m) {
  m.impl("linear_cross_entropy_gradients", linear_cross_entropy_gradients_meta);
}

}  // namespace deepsp
