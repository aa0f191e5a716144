#include "ops.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace deepsp {
namespace {

at::Tensor all_gather_matmul_meta(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view /*group_name*/,
    ReduceDtype reduce_dtype) {
  const SymAlong rows = check_gather_matmul(input, weight, bias, dim, sizes, rank, reduce_dtype);
  return at::empty_symint(
      product_shape(input, dim, rows.begin(rows.parts()), weight.sym_size(0)), input.options());
}

at::Tensor matmul_reduce_scatter_meta(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view /*group_name*/,
    ReduceDtype reduce_dtype) {
  check_matmul_scatter(input, weight, bias, dim, sizes, rank, reduce_dtype);
  return at::empty_symint(
      product_shape(input, dim, sizes[rank], weight.sym_size(0)), input.options());
}

// Of input, weight and bias, those wanted.
std::vector<at::Tensor> gradients_meta(
    const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef wanted) {
  std::vector<at::Tensor> results;
  const auto add = [&](int64_t n, c10::SymIntArrayRef shape) {
    if (wanted[n]) {
      results.push_back(at::empty_symint(shape, input.options()));
    }
  };
  add(0, input.sym_sizes());
  add(1, weight.sym_sizes());
  add(2, {weight.sym_size(0)});
  return results;
}

std::vector<at::Tensor> all_gather_matmul_backward_meta(
    const at::Tensor& grad,
    const at::Tensor& input,
    const at::Tensor& weight,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    at::IntArrayRef wanted,
    int64_t rank,
    std::string_view /*group_name*/,
    ReduceDtype /*reduce_dtype*/) {
  check_matmul_backward(grad, input, weight, dim, sizes, wanted, rank, /*gathers=*/true);
  return gradients_meta(input, weight, wanted);
}

std::vector<at::Tensor> matmul_reduce_scatter_backward_meta(
    const at::Tensor& grad,
    const at::Tensor& input,
    const at::Tensor& weight,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    at::IntArrayRef wanted,
    int64_t rank,
    std::string_view /*group_name*/) {
  check_matmul_backward(grad, input, weight, dim, sizes, wanted, rank, /*gathers=*/false);
  return gradients_meta(input, weight, wanted);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, Meta, m) {
  m.impl("all_gather_matmul", all_gather_matmul_meta);
  m.impl("all_gather_matmul_backward", all_gather_matmul_backward_meta);
  m.impl("matmul_reduce_scatter", matmul_reduce_scatter_meta);
  m.impl("matmul_reduce_scatter_backward", matmul_reduce_scatter_backward_meta);
}

}  // namespace deepsp
