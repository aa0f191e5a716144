// The ops that are made of others: whole ones of a start and a wait, those of one tensor
// of those of several.

#include "checks.h"
#include "ops.h"

#include <torch/library.h>

namespace deepsp {
namespace {

using ReduceDtype = std::optional<at::ScalarType>;

std::vector<at::Tensor> gather_cast_coalesced(
    at::TensorList shards,
    c10::SymIntArrayRef sizes,
    Dtypes dtypes,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  check_shards(shards, sizes, dtypes, rank);
  const at::Tensor buffer =
      gather_cast_coalesced_start(shards, sizes, dtypes, rank, group_name, reduce_dtype);
  const RowShapes rows(shards);
  return gather_cast_coalesced_wait(
      buffer, sizes, rows.shapes, rows.dims, dtypes, rank, group_name);
}

at::Tensor gather_cast_start(
    const at::Tensor& shard,
    c10::SymIntArrayRef sizes,
    at::ScalarType dtype,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  check_shards(shard, sizes, dtype, rank, /*single=*/true);
  return gather_cast_coalesced_start(shard, sizes, dtype, rank, group_name, reduce_dtype);
}

at::Tensor gather_cast_wait(
    const at::Tensor& buffer,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef row_shape,
    at::ScalarType dtype,
    int64_t rank,
    std::string_view group_name) {
  return gather_cast_coalesced_wait(
      buffer, sizes, row_shape, static_cast<int64_t>(row_shape.size()), dtype, rank, group_name)[0];
}

at::Tensor gather_cast(
    const at::Tensor& shard,
    c10::SymIntArrayRef sizes,
    at::ScalarType dtype,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  const at::Tensor buffer = gather_cast_start(shard, sizes, dtype, rank, group_name, reduce_dtype);
  return gather_cast_wait(buffer, sizes, RowShapes(shard).shapes, dtype, rank, group_name);
}

at::Tensor reduce_scatter_cast(
    const at::Tensor& input,
    c10::SymIntArrayRef sizes,
    at::ScalarType dtype,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  check_whole(input, sizes, rank, /*single=*/true);
  check_results(dtype, reduce_dtype, 1);
  const RowShapes rows(input);
  return reduce_scatter_cast_coalesced_wait(
      reduce_scatter_cast_coalesced_start(input, sizes, rank, group_name), sizes, rows.shapes,
      rows.dims, dtypes_of(input), dtype, reduce_dtype, rank, group_name)[0];
}

std::tuple<at::Tensor, at::Tensor> gather_cast_float8(
    const at::Tensor& shard,
    c10::SymIntArrayRef sizes,
    at::ScalarType dtype,
    int64_t rank,
    std::string_view group_name) {
  const auto [data, inv_scales] =
      gather_cast_float8_coalesced(shard, sizes, dtype, rank, group_name);
  return {data[0], inv_scales.select(0, 0)};
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  m.impl("gather_cast", gather_cast);
  m.impl("gather_cast_start", gather_cast_start);
  m.impl("gather_cast_wait", gather_cast_wait);
  m.impl("gather_cast_coalesced", gather_cast_coalesced);
  m.impl("reduce_scatter_cast", reduce_scatter_cast);
  m.impl("gather_cast_float8", gather_cast_float8);
}

}  // namespace deepsp
