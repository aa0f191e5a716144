#include "../functionalize.h"
#include "ops.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace deepsp {
namespace {

at::Tensor sum_start_meta(
    at::TensorList inputs, int64_t rank, int64_t size, std::string_view /*group_name*/) {
  return at::empty_symint({check_sum(inputs, rank, size)}, inputs[0].options());
}

std::vector<at::Tensor> sum_wait_meta(
    const at::Tensor& buffer,
    c10::SymIntArrayRef shapes,
    at::IntArrayRef dims,
    int64_t /*rank*/,
    int64_t /*size*/,
    std::string_view /*group_name*/) {
  return views_of(buffer, check_sum_wait(buffer, shapes, dims));
}

std::vector<at::Tensor> sum_wait_functionalize(
    const at::Tensor& buffer,
    c10::SymIntArrayRef shapes,
    at::IntArrayRef dims,
    int64_t rank,
    int64_t size,
    std::string_view group_name) {
  return cut_alias(buffer, [&](const at::Tensor& inner) {
    return sum_wait(inner, shapes, dims, rank, size, group_name);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, Meta, m) {
  m.impl("sum_start", sum_start_meta);
  m.impl("sum_wait", sum_wait_meta);
}

TORCH_LIBRARY_IMPL(deepsp, Functionalize, m) {
  m.impl("sum_wait", sum_wait_functionalize);
}

}  // namespace deepsp
