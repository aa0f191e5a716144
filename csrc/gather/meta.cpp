// Shapes of what is gathered and scattered, without data or a process group; and how
// functionalization sees the wait that returns views.

#include "../functionalize.h"
#include "checks.h"
#include "ops.h"
#include "plan.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace deepsp {
namespace {

at::Tensor buffer_of(
    const SymShardLayout& layout, Dtypes dtypes, const at::TensorOptions& options) {
  return at::empty_symint({buffer_elements(layout, dtypes)}, options.dtype(buffer_dtype(dtypes)));
}

// Where pieces lie, unless sizes are symbolic.
std::optional<Plan> plan_if_known(const SymShardLayout& layout) {
  for (size_t i = 0; i < layout.tensors(); ++i) {
    for (const c10::SymInt& rows : layout.sizes[i]) {
      if (rows.is_symbolic() || layout.row_bytes[i].is_symbolic()) {
        return std::nullopt;
      }
    }
  }
  return Plan(concrete(layout), /*point_to_point=*/true);
}

at::Tensor gather_start_meta(
    at::TensorList shards,
    c10::SymIntArrayRef sizes,
    Dtypes dtypes,
    int64_t rank,
    std::string_view /*group_name*/,
    std::optional<at::ScalarType> reduce_dtype) {
  const SymShardLayout layout = check_shards(shards, sizes, dtypes, rank);
  if (reduce_dtype) {
    check_float(*reduce_dtype, "reduce_dtype");
  }
  return buffer_of(layout, dtypes, shards[0].options());
}

std::vector<at::Tensor> gather_wait_meta(
    const at::Tensor& buffer,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef row_shapes,
    at::IntArrayRef row_dims,
    Dtypes dtypes,
    int64_t rank,
    std::string_view /*group_name*/) {
  const SymShardLayout layout = check_wait(buffer, sizes, row_shapes, row_dims, dtypes, rank);
  // As point to point has it; where blocks are padded, uneven ones are copied out.
  const std::optional<Plan> plan = plan_if_known(layout);
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < layout.tensors(); ++i) {
    const c10::SymInt rows = layout.row(i, layout.parts());
    const auto shape = shape_of(rows, row_shapes, row_dims, i);
    if (layout.tensors() == 1) {
      const c10::SymInt elements = rows * layout.row_bytes[i] / buffer.element_size();
      results.push_back(buffer.narrow_symint(0, 0, elements).view_symint(shape));
    } else if (plan && plan->in_place[i]) {
      const at::Tensor bytes =
          buffer.view(at::kByte).narrow_symint(0, plan->gathered(i, 0), rows * layout.row_bytes[i]);
      results.push_back(bytes.view(dtypes[i]).view_symint(shape));
    } else {
      results.push_back(at::empty_symint(shape, buffer.options().dtype(dtypes[i])));
    }
  }
  return results;
}

std::vector<at::Tensor> gather_wait_functionalize(
    const at::Tensor& buffer,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef row_shapes,
    at::IntArrayRef row_dims,
    Dtypes dtypes,
    int64_t rank,
    std::string_view group_name) {
  return cut_alias(buffer, [&](const at::Tensor& inner) {
    return gather_cast_coalesced_wait(inner, sizes, row_shapes, row_dims, dtypes, rank, group_name);
  });
}

at::Tensor scatter_start_meta(
    at::TensorList inputs,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view /*group_name*/) {
  const SymShardLayout layout = check_whole(inputs, sizes, rank);
  return buffer_of(layout, dtypes_of(inputs), inputs[0].options());
}

std::vector<at::Tensor> scatter_wait_meta(
    const at::Tensor& buffer,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef row_shapes,
    at::IntArrayRef row_dims,
    Dtypes wire_dtypes,
    Dtypes dtypes,
    std::optional<at::ScalarType> reduce_dtype,
    int64_t rank,
    std::string_view /*group_name*/) {
  const SymShardLayout layout = check_wait(buffer, sizes, row_shapes, row_dims, wire_dtypes, rank);
  check_results(dtypes, reduce_dtype, layout.tensors());
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < layout.tensors(); ++i) {
    results.push_back(
        at::empty_symint(
            shape_of(layout.sizes[i][rank], row_shapes, row_dims, i),
            buffer.options().dtype(dtypes[i])));
  }
  return results;
}

std::tuple<std::vector<at::Tensor>, at::Tensor> float8_meta(
    at::TensorList shards,
    c10::SymIntArrayRef sizes,
    at::ScalarType dtype,
    int64_t rank,
    std::string_view /*group_name*/) {
  const SymShardLayout layout = check_float8(shards, sizes, dtype, rank);
  const RowShapes rows(shards);
  std::vector<at::Tensor> data;
  for (size_t i = 0; i < layout.tensors(); ++i) {
    data.push_back(
        at::empty_symint(
            shape_of(layout.row(i, layout.parts()), rows.shapes, rows.dims, i),
            shards[i].options().dtype(dtype)));
  }
  return {
      data, at::empty({static_cast<int64_t>(data.size())}, shards[0].options().dtype(at::kFloat))};
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, Meta, m) {
  m.impl("gather_cast_coalesced_start", gather_start_meta);
  m.impl("gather_cast_coalesced_wait", gather_wait_meta);
  m.impl("reduce_scatter_cast_coalesced_start", scatter_start_meta);
  m.impl("reduce_scatter_cast_coalesced_wait", scatter_wait_meta);
  m.impl("gather_cast_float8_coalesced", float8_meta);
}

TORCH_LIBRARY_IMPL(deepsp, Functionalize, m) {
  m.impl("gather_cast_coalesced_wait", gather_wait_functionalize);
}

}  // namespace deepsp
