// The kernels, the same for CPU, CUDA and meta tensors, where they stop at the results' shapes.
// They copy once at most: a gather copies what arrived to its rows, a scatter packs rows for
// sending, and neither copies what travels as it lies.

#include "../common/checks.h"
#include "../transport/agreement.h"
#include "engine.h"
#include "ops.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>

namespace deepsp {
namespace {

// ------------------------------------------------------------------- lists, along dimension 0

void cast(at::TensorList shards, Dtypes dtypes, const std::vector<Destination>& pieces) {
#ifdef DEEPSP_CUDA
  if (shards[0].is_cuda()) {
    std::vector<Cast> casts;
    Tensors alive;  // what isn't contiguous is copied once more
    for (const auto& [i, to] : pieces) {
      alive.push_back(shards[i].contiguous());
      casts.push_back(
          {data_of(alive.back()), to, shards[i].numel(), float_type(shards[i].scalar_type()),
           float_type(dtypes[i])});
    }
    return run(casts, shards[0].device());
  }
#endif
  for (const auto& [i, to] : pieces) {
    at::from_blob(to, shards[i].sizes(), shards[i].options().dtype(dtypes[i])).copy_(shards[i]);
  }
}

// Where parts lie, unless sizes are symbolic.
std::optional<BufferLayout> places_if_known(const SymShards& layout) {
  for (const Shard<c10::SymInt>& shard : layout.tensors) {
    for (const c10::SymInt& rows : shard.sizes) {
      if (rows.is_symbolic() || shard.inner.is_symbolic()) {
        return std::nullopt;
      }
    }
  }
  return BufferLayout(concrete(layout, /*item=*/1), /*point_to_point=*/true);
}

// As point to point has it; where blocks are padded, uneven ones are copied out.
Tensors meta_full(
    const at::Tensor& buffer,
    const SymShards& layout,
    const std::vector<SymInts>& shapes,
    Dtypes dtypes) {
  const std::optional<BufferLayout> places = places_if_known(layout);
  Tensors results;
  for (size_t i = 0; i < layout.size(); ++i) {
    const c10::SymInt bytes = layout[i].full();
    if (layout.size() == 1) {
      results.push_back(
          buffer.narrow_symint(0, 0, bytes / buffer.element_size()).view_symint(shapes[i]));
    } else if (places && places->in_place(i)) {
      results.push_back(buffer.view(at::kByte)
                            .narrow_symint(0, places->gathered(i, 0), bytes)
                            .view(dtypes[i])
                            .view_symint(shapes[i]));
    } else {
      results.push_back(at::empty_symint(shapes[i], buffer.options().dtype(dtypes[i])));
    }
  }
  return results;
}

at::Tensor gather_cast_coalesced_start_kernel(
    at::TensorList shards,
    c10::SymIntArrayRef sizes,
    Dtypes dtypes,
    int64_t rank,
    std::string_view group_name,
    OptionalDtype reduce_dtype) {
  const SymShards layout = check_shards(shards, sizes, dtypes, rank);
  check_reduce_dtype(reduce_dtype);
  const BufferShape shape = list_buffer(layout, dtypes, shards[0]);
  if (shards[0].is_meta()) {
    return shape.meta();
  }
  return reshard_lists("gather_cast", "shards", shards, layout, dtypes, group_name)
      .launch_gather(
          [&](const std::vector<Destination>& pieces) { cast(shards, dtypes, pieces); }, shape);
}

Tensors gather_cast_coalesced_wait_kernel(
    const at::Tensor& buffer,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef row_shapes,
    at::IntArrayRef row_dims,
    Dtypes dtypes,
    int64_t rank,
    std::string_view group_name) {
  const SymShards layout = check_wait(buffer, sizes, row_shapes, row_dims, dtypes, rank);
  const std::vector<SymInts> shapes = shapes_of(layout, row_shapes, row_dims);
  if (buffer.is_meta()) {
    return meta_full(buffer, layout, shapes, dtypes);
  }
  return reshard_lists("gather_cast", buffer, layout, group_name)
      .land_gather(buffer, concrete(shapes), dtypes);
}

at::Tensor reduce_scatter_cast_coalesced_start_kernel(
    at::TensorList inputs, c10::SymIntArrayRef sizes, int64_t rank, std::string_view group_name) {
  const SymShards layout = check_full(inputs, sizes, rank);
  const std::vector<at::ScalarType> dtypes = dtypes_of(inputs);
  const BufferShape shape = list_buffer(layout, dtypes, inputs[0]);
  if (inputs[0].is_meta()) {
    return shape.meta();
  }
  Tensors full;
  for (const at::Tensor& x : inputs) {
    full.push_back(x.contiguous());
  }
  return reshard_lists("reduce_scatter_cast", "inputs", inputs, layout, dtypes, group_name)
      .launch_scatter(full, shape);
}

Tensors reduce_scatter_cast_coalesced_wait_kernel(
    const at::Tensor& buffer,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef row_shapes,
    at::IntArrayRef row_dims,
    Dtypes wire_dtypes,
    Dtypes dtypes,
    OptionalDtype reduce_dtype,
    int64_t rank,
    std::string_view group_name) {
  const SymShards layout = check_wait(buffer, sizes, row_shapes, row_dims, wire_dtypes, rank);
  check_results(dtypes, reduce_dtype, layout.size());
  const std::vector<SymInts> shapes = shapes_of(layout, row_shapes, row_dims, rank);
  if (buffer.is_meta()) {
    Tensors results;
    for (size_t i = 0; i < shapes.size(); ++i) {
      results.push_back(at::empty_symint(shapes[i], buffer.options().dtype(dtypes[i])));
    }
    return results;
  }
  return reshard_lists("reduce_scatter_cast", buffer, layout, group_name)
      .land_scatter(buffer, concrete(shapes), wire_dtypes, dtypes, reduce_dtype);
}

// ------------------------------------------------------------------- one tensor, along a dimension

Reshard reshard_along(
    const char* op, const SymShards& layout, const at::Tensor& like, std::string_view group_name) {
  return Reshard(
      concrete(layout, item_of(like)),
      resolve_group(op, group_name, layout.rank, layout.parts(), like.device(), "sizes"),
      like.device());
}

// The same for a start, which is compared.
Reshard reshard_along(
    const char* op,
    const SymShards& layout,
    const at::Tensor& input,
    int64_t dim,
    std::string_view group_name) {
  const Group group = agreed_group(
      op, group_name, layout.rank, layout.parts(), input.device(), "sizes",
      [&]() -> std::vector<std::string> {
        dim = wrap_dim(dim, input.dim());
        return {said(
            "input ", input.scalar_type(), " of full shape ",
            ints(entire_shape(input.sym_sizes(), dim, layout[0].sizes)), ", dim ", dim,
            " and sizes ", ints(layout[0].sizes))};
      });
  return Reshard(concrete(layout, item_of(input)), group, input.device());
}

BufferShape along_buffer(const SymShards& layout, const at::Tensor& like) {
  return {{layout.parts(), layout.slot()}, like.options()};
}

at::Tensor all_gather_start_kernel(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    std::string_view grad,
    int64_t rank,
    std::string_view group_name,
    OptionalDtype /*reduce_dtype*/) {
  is_partial(grad);
  const SymShards layout = check_part(input, dim, sizes, rank);
  const BufferShape shape = along_buffer(layout, input);
  if (input.is_meta()) {
    return shape.meta();
  }
  return reshard_along("all_gather", layout, input, dim, group_name)
      .launch_gather(input.contiguous(), shape);
}

Tensors all_gather_wait_kernel(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    std::string_view grad,
    int64_t rank,
    std::string_view group_name) {
  is_partial(grad);
  const SymShards layout = check_buffer(buffer, dim, sizes, shape, rank);
  if (!buffer.is_meta()) {
    return reshard_along("all_gather", layout, buffer, group_name)
        .land_gather(buffer, {ints(shape)}, buffer.scalar_type());
  }
  // As point to point has it; where blocks are padded, uneven ones are copied out, and long rows
  // may be views, too.
  const c10::SymInt slot = layout.slot(), elements = layout[0].full();
  // Meta views know no symbolic shapes; functionalization cuts the alias anyway.
  if (layout[0].outer == 1 && !slot.is_symbolic() && !elements.is_symbolic()) {
    return {buffer.view_symint({slot * layout.parts()})
                .narrow_symint(0, 0, elements)
                .view_symint(shape)};
  }
  return {at::empty_symint(shape, buffer.options())};
}

at::Tensor reduce_scatter_start_kernel(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name) {
  check_float(input.scalar_type(), "input");
  const SymShards layout = check_entire(input, dim, sizes, rank);
  const BufferShape shape = along_buffer(layout, input);
  if (input.is_meta()) {
    return shape.meta();
  }
  return reshard_along("reduce_scatter", layout, input, dim, group_name)
      .launch_scatter({input.contiguous()}, shape);
}

at::Tensor reduce_scatter_wait_kernel(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    int64_t rank,
    std::string_view group_name,
    OptionalDtype reduce_dtype) {
  const at::ScalarType dtype = buffer.scalar_type();
  check_float(dtype, "buffer");
  check_reduce_dtype(reduce_dtype);
  const SymShards layout = check_buffer(buffer, dim, sizes, shape, rank);
  const SymInts part = resized(shape, dim, sizes[rank]);
  if (buffer.is_meta()) {
    return at::empty_symint(part, buffer.options());
  }
  return reshard_along("reduce_scatter", layout, buffer, group_name)
      .land_scatter(buffer, {ints(part)}, dtype, dtype, reduce_dtype)[0];
}

// Nothing travels, but its gradient does: the slots of a buffer all show this rank's block.
at::Tensor scatter_start_kernel(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name) {
  const SymShards layout = check_entire(input, dim, sizes, rank);
  const at::Tensor slot = buffer_for({layout.slot()}, input.options());
  if (!slot.is_meta()) {
    resolve_group("scatter", group_name, rank, layout.parts(), input.device(), "sizes");
    const at::Tensor part = input.narrow_symint(dim, layout[0].begin(rank), sizes[rank]);
    slot.narrow(0, 0, part.numel()).view(part.sizes()).copy_(part);
  }
  return slot.view_symint({1, layout.slot()}).expand_symint({layout.parts(), layout.slot()});
}

Tensors scatter_wait_kernel(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    int64_t rank,
    std::string_view group_name) {
  const SymShards layout = check_buffer(buffer, dim, sizes, shape, rank);
  if (!buffer.is_meta()) {
    resolve_group("scatter", group_name, rank, layout.parts(), buffer.device(), "sizes");
    land(buffer);
  }
  return {buffer.select(0, rank)
              .narrow_symint(0, 0, layout.block(rank))
              .view_symint(resized(shape, dim, sizes[rank]))};
}

}  // namespace

DEEPSP_KERNELS(m) {
  m.impl("gather_cast_coalesced_start", gather_cast_coalesced_start_kernel);
  m.impl("gather_cast_coalesced_wait", gather_cast_coalesced_wait_kernel);
  m.impl("reduce_scatter_cast_coalesced_start", reduce_scatter_cast_coalesced_start_kernel);
  m.impl("reduce_scatter_cast_coalesced_wait", reduce_scatter_cast_coalesced_wait_kernel);
  m.impl("all_gather_start", all_gather_start_kernel);
  m.impl("all_gather_wait", all_gather_wait_kernel);
  m.impl("reduce_scatter_start", reduce_scatter_start_kernel);
  m.impl("reduce_scatter_wait", reduce_scatter_wait_kernel);
  m.impl("scatter_start", scatter_start_kernel);
  m.impl("scatter_wait", scatter_wait_kernel);
}

DEEPSP_REFUSED_KINDS(m) {
  m.impl("gather_cast_coalesced_start", gather_cast_coalesced_start_kernel);
  m.impl("reduce_scatter_cast_coalesced_start", reduce_scatter_cast_coalesced_start_kernel);
}

TORCH_LIBRARY_IMPL(deepsp, Functionalize, m) {
  for (const char* wait : {"gather_cast_coalesced_wait", "all_gather_wait", "scatter_wait"}) {
    cuts_alias(m, wait);
  }
}

}  // namespace deepsp
