#include "ops.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace deepsp {
namespace {

at::Tensor all_reduce_meta(
    const at::Tensor& input,
    double /*grad_scale*/,
    int64_t /*rank*/,
    int64_t /*size*/,
    std::string_view /*group_name*/) {
  return at::empty_symint(input.sym_sizes(), input.options());
}

at::Tensor unshard_meta(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view /*group_name*/) {
  dim = check_unshard(input, dim, seq_lens, rank);
  c10::SymDimVector sizes(input.sym_sizes());
  sizes[dim] = 0;
  for (const c10::SymInt& length : seq_lens) {
    sizes[dim] = sizes[dim] + length;
  }
  return at::empty_symint(sizes, input.options());
}

void sum_gradients_meta(
    at::TensorList /*gradients*/,
    int64_t /*rank*/,
    int64_t /*size*/,
    std::string_view /*group_name*/) {
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, Meta, m) {
  m.impl("all_reduce", all_reduce_meta);
  m.impl("unshard", unshard_meta);
  m.impl("sum_gradients_", sum_gradients_meta);
}

}  // namespace deepsp
