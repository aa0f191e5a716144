#include "../functionalize.h"
#include "ops.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace deepsp {
namespace {

at::Tensor all_reduce_meta(
    const at::Tensor& input,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    std::string_view /*group_name*/,
    ReduceDtype reduce_dtype) {
  check_sum({input}, grad, rank, size, reduce_dtype);
  return at::empty_symint(input.sym_sizes(), input.options());
}

at::Tensor all_reduce_start_meta(
    at::TensorList inputs,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    std::string_view /*group_name*/,
    ReduceDtype reduce_dtype) {
  const c10::SymInt elements = check_sum(inputs, grad, rank, size, reduce_dtype);
  return at::empty_symint(
      sum_buffer_shape(elements, size, inputs[0].scalar_type(), reduce_dtype), inputs[0].options());
}

std::vector<at::Tensor> all_reduce_wait_meta(
    const at::Tensor& buffer,
    c10::SymIntArrayRef shapes,
    at::IntArrayRef dims,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    std::string_view /*group_name*/,
    ReduceDtype reduce_dtype) {
  const SumShapes sums = check_sum_wait(buffer, shapes, dims, grad, rank, size, reduce_dtype);
  if (sums_on_arrival(buffer.scalar_type(), reduce_dtype)) {
    return views_of(at::empty_symint({sums.elements}, buffer.options()), sums.of);
  }
  return views_of(buffer, sums.of);
}

std::vector<at::Tensor> all_reduce_wait_functionalize(
    const at::Tensor& buffer,
    c10::SymIntArrayRef shapes,
    at::IntArrayRef dims,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  return cut_alias(buffer, [&](const at::Tensor& inner) {
    return all_reduce_wait(inner, shapes, dims, grad, rank, size, group_name, reduce_dtype);
  });
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
  m.impl("all_reduce_start", all_reduce_start_meta);
  m.impl("all_reduce_wait", all_reduce_wait_meta);
  m.impl("sum_gradients_", sum_gradients_meta);
}

TORCH_LIBRARY_IMPL(deepsp, Functionalize, m) {
  m.impl("all_reduce_wait", all_reduce_wait_functionalize);
}

}  // namespace deepsp
