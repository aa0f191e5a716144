#include "ops.h"

namespace deepsp {
namespace {

void check_linear(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    int64_t dim) {
  TORCH_CHECK_VALUE(
      input.dim() >= 2, "input has ", input.dim(), " dimensions; at least two are right");
  TORCH_CHECK_VALUE(
      wrap_dim(dim, input.dim()) != input.dim() - 1, "dim is ", dim,
      ", the last dimension, which the weight multiplies; one in front of it is right");
  check_summed(input.scalar_type(), "input");
  TORCH_CHECK_VALUE(
      weight.dim() == 2 && weight.sym_size(1) == input.sym_size(-1), "weight has shape ",
      weight.sym_sizes(), ", but input ", input.sym_sizes(), "; [any, ", input.sym_size(-1),
      "] is right");
  const auto check_like = [&](const at::Tensor& x, const char* name) {
    TORCH_CHECK_VALUE(
        x.scalar_type() == input.scalar_type() && x.device() == input.device(), name, " is ",
        x.scalar_type(), " on ", x.device(), ", but input is ", input.scalar_type(), " on ",
        input.device(), "; they must be the same");
  };
  check_like(weight, "weight");
  if (bias.has_value()) {
    check_like(*bias, "bias");
    TORCH_CHECK_VALUE(
        bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), "bias has shape ",
        bias->sym_sizes(), "; [", weight.sym_size(0), "], the weight's rows, is right");
  }
}

void check_reduce(ReduceDtype reduce_dtype) {
  if (reduce_dtype) {
    check_summed(*reduce_dtype, "reduce_dtype");
  }
}

// Without the last dimension.
SymAlong rows_of(const SymAlong& layout, const c10::SymInt& columns) {
  SymAlong rows = layout;
  rows.inner = columns == 0 ? c10::SymInt(0) : layout.inner / columns;
  return rows;
}

}  // namespace

SymAlong check_gather_matmul(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    ReduceDtype reduce_dtype) {
  check_linear(input, weight, bias, dim);
  const SymAlong layout = check_part(input, dim, sizes, rank);
  check_reduce(reduce_dtype);
  return rows_of(layout, input.sym_size(-1));
}

SymAlong check_matmul_scatter(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    ReduceDtype reduce_dtype) {
  check_linear(input, weight, bias, dim);
  const SymAlong layout = check_entire(input, dim, sizes, rank);
  check_reduce(reduce_dtype);
  return rows_of(layout, input.sym_size(-1));
}

SymAlong check_matmul_backward(
    const at::Tensor& grad,
    const at::Tensor& input,
    const at::Tensor& weight,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    at::IntArrayRef wanted,
    int64_t rank,
    bool gathers) {
  const SymAlong rows =
      gathers ? check_gather_matmul(input, weight, std::nullopt, dim, sizes, rank, std::nullopt)
              : check_matmul_scatter(input, weight, std::nullopt, dim, sizes, rank, std::nullopt);
  const c10::SymInt length = gathers ? rows.begin(rows.parts()) : c10::SymInt(rows.sizes[rank]);
  const auto shape = product_shape(input, dim, length, weight.sym_size(0));
  TORCH_CHECK_VALUE(
      grad.sym_sizes() == c10::SymIntArrayRef(shape) && grad.scalar_type() == input.scalar_type(),
      "grad is ", grad.scalar_type(), " of shape ", grad.sym_sizes(), "; ", input.scalar_type(),
      " of shape ", c10::SymIntArrayRef(shape), ", as the output, is right");
  TORCH_CHECK_VALUE(
      wanted.size() == 3, "wanted has ", wanted.size(),
      " entries; three are right, for input, weight and bias");
  return rows;
}

std::vector<c10::SymInt> product_shape(
    const at::Tensor& input, int64_t dim, const c10::SymInt& length, const c10::SymInt& columns) {
  std::vector<c10::SymInt> shape = resized(input.sym_sizes(), dim, length);
  shape.back() = columns;
  return shape;
}

}  // namespace deepsp
