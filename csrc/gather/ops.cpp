#include "ops.h"

#include "../dispatch.h"

namespace deepsp {

at::Tensor gather_cast_coalesced_start(
    at::TensorList shards,
    c10::SymIntArrayRef sizes,
    Dtypes dtypes,
    int64_t rank,
    std::string_view group_name,
    std::optional<at::ScalarType> reduce_dtype) {
  static const auto op =
      find_op<decltype(gather_cast_coalesced_start)>("deepsp::gather_cast_coalesced_start");
  return op.call(shards, sizes, dtypes, rank, group_name, reduce_dtype);
}

std::vector<at::Tensor> gather_cast_coalesced_wait(
    const at::Tensor& buffer,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef row_shapes,
    at::IntArrayRef row_dims,
    Dtypes dtypes,
    int64_t rank,
    std::string_view group_name) {
  static const auto op =
      find_op<decltype(gather_cast_coalesced_wait)>("deepsp::gather_cast_coalesced_wait");
  return op.call(buffer, sizes, row_shapes, row_dims, dtypes, rank, group_name);
}

at::Tensor reduce_scatter_cast_coalesced_start(
    at::TensorList inputs, c10::SymIntArrayRef sizes, int64_t rank, std::string_view group_name) {
  static const auto op = find_op<decltype(reduce_scatter_cast_coalesced_start)>(
      "deepsp::reduce_scatter_cast_coalesced_start");
  return op.call(inputs, sizes, rank, group_name);
}

std::vector<at::Tensor> reduce_scatter_cast_coalesced_wait(
    const at::Tensor& buffer,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef row_shapes,
    at::IntArrayRef row_dims,
    Dtypes wire_dtypes,
    Dtypes dtypes,
    std::optional<at::ScalarType> reduce_dtype,
    int64_t rank,
    std::string_view group_name) {
  static const auto op = find_op<decltype(reduce_scatter_cast_coalesced_wait)>(
      "deepsp::reduce_scatter_cast_coalesced_wait");
  return op.call(
      buffer, sizes, row_shapes, row_dims, wire_dtypes, dtypes, reduce_dtype, rank, group_name);
}

std::tuple<std::vector<at::Tensor>, at::Tensor> gather_cast_float8_coalesced(
    at::TensorList shards,
    c10::SymIntArrayRef sizes,
    at::ScalarType dtype,
    int64_t rank,
    std::string_view group_name) {
  static const auto op =
      find_op<decltype(gather_cast_float8_coalesced)>("deepsp::gather_cast_float8_coalesced");
  return op.call(shards, sizes, dtype, rank, group_name);
}

std::vector<at::Tensor> gather_through_float8(
    at::TensorList shards,
    c10::SymIntArrayRef sizes,
    at::ScalarType float8_dtype,
    at::ScalarType dtype,
    int64_t rank,
    std::string_view group_name,
    std::optional<at::ScalarType> reduce_dtype) {
  static const auto op = find_op<decltype(gather_through_float8)>("deepsp::gather_through_float8");
  return op.call(shards, sizes, float8_dtype, dtype, rank, group_name, reduce_dtype);
}

}  // namespace deepsp
