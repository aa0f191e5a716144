// The ops that are made of others: a start and a wait make one op, and those of one tensor are
// those of several. They check everything before the start sends.

#include "checks.h"
#include "ops.h"

namespace deepsp {
namespace {

Tensors gather_cast_coalesced(
    at::TensorList shards,
    c10::SymIntArrayRef sizes,
    Dtypes dtypes,
    int64_t rank,
    std::string_view group_name,
    OptionalDtype reduce_dtype) {
  check_shards(shards, sizes, dtypes, rank);
  const RowShapes rows(shards);
  return gather_cast_coalesced_wait(
      gather_cast_coalesced_start(shards, sizes, dtypes, rank, group_name, reduce_dtype), sizes,
      rows.shapes, rows.dims, dtypes, rank, group_name);
}

at::Tensor gather_cast_start(
    const at::Tensor& shard,
    c10::SymIntArrayRef sizes,
    at::ScalarType dtype,
    int64_t rank,
    std::string_view group_name,
    OptionalDtype reduce_dtype) {
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
    OptionalDtype reduce_dtype) {
  const at::Tensor buffer = gather_cast_start(shard, sizes, dtype, rank, group_name, reduce_dtype);
  return gather_cast_wait(buffer, sizes, RowShapes(shard).shapes, dtype, rank, group_name);
}

Tensors scattered_sums(
    at::TensorList inputs,
    c10::SymIntArrayRef sizes,
    Dtypes dtypes,
    int64_t rank,
    std::string_view group_name,
    OptionalDtype reduce_dtype,
    bool single) {
  check_full(inputs, sizes, rank, single);
  check_results(dtypes, reduce_dtype, inputs.size(), single);
  const RowShapes rows(inputs);
  return reduce_scatter_cast_coalesced_wait(
      reduce_scatter_cast_coalesced_start(inputs, sizes, rank, group_name), sizes, rows.shapes,
      rows.dims, dtypes_of(inputs), dtypes, reduce_dtype, rank, group_name);
}

at::Tensor reduce_scatter_cast(
    const at::Tensor& input,
    c10::SymIntArrayRef sizes,
    at::ScalarType dtype,
    int64_t rank,
    std::string_view group_name,
    OptionalDtype reduce_dtype) {
  return scattered_sums(input, sizes, dtype, rank, group_name, reduce_dtype, /*single=*/true)[0];
}

Tensors reduce_scatter_cast_coalesced_composite(
    at::TensorList inputs,
    c10::SymIntArrayRef sizes,
    Dtypes dtypes,
    int64_t rank,
    std::string_view group_name,
    OptionalDtype reduce_dtype) {
  return scattered_sums(inputs, sizes, dtypes, rank, group_name, reduce_dtype, /*single=*/false);
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

at::Tensor all_gather_composite(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    std::string_view grad,
    int64_t rank,
    std::string_view group_name,
    OptionalDtype reduce_dtype) {
  check_part(input, dim, sizes, rank);
  return all_gather_wait(
      all_gather_start(input, dim, sizes, grad, rank, group_name, reduce_dtype), dim, sizes,
      entire_shape(input.sym_sizes(), dim, sizes), grad, rank, group_name)[0];
}

at::Tensor reduce_scatter_composite(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name,
    OptionalDtype reduce_dtype) {
  check_reduce_dtype(reduce_dtype);
  return reduce_scatter_wait(
      reduce_scatter_start(input, dim, sizes, rank, group_name), dim, sizes, input.sym_sizes(),
      rank, group_name, reduce_dtype);
}

at::Tensor scatter(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    std::string_view grad,
    int64_t rank,
    std::string_view group_name) {
  if (is_partial(grad)) {
    const SymShards layout = check_entire(input, dim, sizes, rank);
    return input.narrow_symint(dim, layout[0].begin(rank), sizes[rank])
        .clone(at::MemoryFormat::Contiguous);
  }
  return scatter_wait(
      scatter_start(input, dim, sizes, rank, group_name), dim, sizes, input.sym_sizes(), rank,
      group_name)[0];
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  m.impl("gather_cast", gather_cast);
  m.impl("gather_cast_start", gather_cast_start);
  m.impl("gather_cast_wait", gather_cast_wait);
  m.impl("gather_cast_coalesced", gather_cast_coalesced);
  m.impl("reduce_scatter_cast", reduce_scatter_cast);
  m.impl("reduce_scatter_cast_coalesced", reduce_scatter_cast_coalesced_composite);
  m.impl("gather_cast_float8", gather_cast_float8);
  m.impl("all_gather", all_gather_composite);
  m.impl("reduce_scatter", reduce_scatter_composite);
  m.impl("scatter", scatter);
}

}  // namespace deepsp
