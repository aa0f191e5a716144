// The kernels, the same for CPU, CUDA and meta tensors, for which they stop at the results' shapes.
// They copy at most once: a gather copies received blocks to their rows, a scatter packs rows for
// sending, and neither copies rows that are already contiguous there.

#include "../op.h"
#include "../common/checks.h"
#include "../transport/agreement.h"
#include "engine.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
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
  // A call of copy_ takes as long as a cast of some thousand elements.
  constexpr int64_t kSmall = 16 << 10;
  std::vector<StridedCopy> copies;
  std::vector<StridedSum> casts;  // sums of one shard
  for (const auto& [i, to] : pieces) {
    const at::Tensor& shard = shards[i];
    const int64_t count = shard.numel();
    if (count > kSmall || !shard.is_contiguous()) {
      at::from_blob(to, shard.sizes(), shard.options().dtype(dtypes[i])).copy_(shard);
    } else if (shard.scalar_type() == dtypes[i]) {
      copies.push_back(copy_of_bytes(data_of(shard), to, count * item_of(shard)));
    } else {
      const Float from = float_type(shard.scalar_type());
      casts.push_back(
          {from,
           float_type(dtypes[i]),
           wide(from),
           to,
           {1, 1, 1, count},
           {0, 0, 0, 1},
           {{data_of(shard), {0, 0, 0, 1}}}});
    }
  }
  run(copies, at::kCPU);
  run(casts, at::kCPU);
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

c10::IValue gather_cast_coalesced_start(const Given& given) {
  const at::TensorList shards = given["shards"];
  const Dtypes dtypes = given["dtypes"];
  const SymShards layout = check_shards(shards, given["sizes"], dtypes, given["rank"]);
  check_sum_dtypes(given["reduce_dtype"], given["backend_sums"]);
  const BufferShape shape = list_buffer(layout, dtypes, shards[0]);
  if (shards[0].is_meta()) {
    return shape.meta();
  }
  return reshard_lists("gather_cast", "shards", shards, layout, dtypes, given)
      .launch_gather(
          [&](const std::vector<Destination>& pieces) { cast(shards, dtypes, pieces); }, shape);
}

// What a wait is given: its buffer, and which shards that holds.
struct ListWait {
  const at::Tensor buffer;
  const Dtypes wire;  // the dtypes in which they were sent
  const SymShards layout;

  ListWait(const Given& given, const char* wire_name)
      : buffer(given["buffer"]),
        wire(given[wire_name]),
        layout(check_wait(
            buffer, given["sizes"], given["row_shapes"], given["row_dims"], wire, given["rank"])) {}
};

c10::IValue gather_cast_coalesced_wait(const Given& given) {
  const auto [buffer, dtypes, layout] = ListWait(given, "dtypes");
  const std::vector<SymInts> shapes = shapes_of(layout, given["row_shapes"], given["row_dims"]);
  if (buffer.is_meta()) {
    return meta_full(buffer, layout, shapes, dtypes);
  }
  return reshard_of("gather_cast", layout, 1, kListSizes, buffer, given)
      .finish_gather(buffer, concrete(shapes), dtypes);
}

c10::IValue reduce_scatter_cast_coalesced_start(const Given& given) {
  const at::TensorList inputs = given["inputs"];
  const SymShards layout = check_full(inputs, given["sizes"], given["rank"]);
  const std::vector<at::ScalarType> dtypes = dtypes_of(inputs);
  const OptionalDtype backend_sums = given["backend_sums"];
  check_sum_dtypes(std::nullopt, backend_sums);
  const BufferShape shape = list_buffer(layout, dtypes, inputs[0]);
  if (inputs[0].is_meta()) {
    return backend_sums ? at::empty_strided_symint(shape.sizes, SymInts{0}, shape.options)
                        : shape.meta();
  }
  Tensors full;
  for (const at::Tensor& x : inputs) {
    full.push_back((backend_sums ? x.to(*backend_sums) : x).contiguous());
  }
  const SymShards sent = backend_sums ? in_dtype(layout, dtypes, *backend_sums) : layout;
  const Reshard reshard =
      reshard_lists("reduce_scatter_cast", "inputs", inputs, sent, dtypes, given);
  return backend_sums ? reshard.launch_backend_sums(full, shape)
                      : reshard.launch_scatter(full, shape);
}

c10::IValue reduce_scatter_cast_coalesced_wait(const Given& given) {
  const auto [buffer, wire_dtypes, layout] = ListWait(given, "wire_dtypes");
  const Dtypes dtypes = given["dtypes"];
  const OptionalDtype reduce_dtype = given["reduce_dtype"];
  const OptionalDtype backend_sums = given["backend_sums"];
  check_results(dtypes, reduce_dtype, backend_sums, layout.size());
  const std::vector<SymInts> shapes =
      shapes_of(layout, given["row_shapes"], given["row_dims"], layout.rank);
  if (buffer.is_meta()) {
    Tensors results;
    for (size_t i = 0; i < shapes.size(); ++i) {
      results.push_back(at::empty_symint(shapes[i], buffer.options().dtype(dtypes[i])));
    }
    return results;
  }
  const SymShards sent = backend_sums ? in_dtype(layout, wire_dtypes, *backend_sums) : layout;
  const Reshard reshard = reshard_of("reduce_scatter_cast", sent, 1, kListSizes, buffer, given);
  return backend_sums
             ? reshard.finish_backend_sums(buffer, concrete(shapes), *backend_sums, dtypes)
             : reshard.finish_scatter(buffer, concrete(shapes), wire_dtypes, dtypes, reduce_dtype);
}

// ------------------------------------------------------------------- one tensor, along a dimension

// That of a wait.
Reshard reshard_along(
    const char* op, const SymShards& layout, const at::Tensor& buffer, const Given& given) {
  return reshard_of(op, layout, item_of(buffer), "sizes", buffer, given);
}

// That of a start.
Reshard start_along(
    const char* op, const SymShards& layout, const at::Tensor& input, const Given& given) {
  return reshard_of(op, layout, item_of(input), "sizes", input, given, [&] {
    const int64_t dim = wrap_dim(given["dim"], input.dim());
    return std::vector<std::string>{to_text(
        "input ", input.scalar_type(), " of full shape ",
        ints(entire_shape(input.sym_sizes(), dim, layout[0].sizes)), ", dim ", dim, " and sizes ",
        ints(layout[0].sizes))};
  });
}

BufferShape along_buffer(const SymShards& layout, const at::Tensor& like) {
  return {{layout.parts(), layout.slot()}, like.options()};
}

c10::IValue all_gather_start(const Given& given) {
  is_partial(given["grad"]);
  const at::Tensor input = given["input"];
  const SymShards layout = check_part(input, given["dim"], given["sizes"], given["rank"]);
  const BufferShape shape = along_buffer(layout, input);
  if (input.is_meta()) {
    return shape.meta();
  }
  return start_along("all_gather", layout, input, given).launch_gather(input.contiguous(), shape);
}

// The arguments of a wait: its buffer, and the tensor whose parts the buffer holds.
struct AlongWait {
  const at::Tensor buffer;
  const c10::SymIntArrayRef shape;  // the full tensor's
  const SymShards layout;

  explicit AlongWait(const Given& given)
      : buffer(given["buffer"]),
        shape(given["shape"]),
        layout(check_buffer(buffer, given["dim"], given["sizes"], shape, given["rank"])) {}

  // The shape of this rank's part.
  SymInts part(const Given& given) const {
    return resized(shape, given["dim"], layout[0].sizes[layout.rank]);
  }
};

c10::IValue all_gather_wait(const Given& given) {
  is_partial(given["grad"]);
  const auto [buffer, shape, layout] = AlongWait(given);
  if (!buffer.is_meta()) {
    return reshard_along("all_gather", layout, buffer, given)
        .finish_gather(buffer, {ints(shape)}, buffer.scalar_type());
  }
  // As with point to point. Collectives copy uneven parts out of padded blocks, and may return
  // views of long rows, too.
  const c10::SymInt slot = layout.slot(), elements = layout[0].full();
  // Meta views know no symbolic shapes; functionalization cuts the alias anyway.
  if (layout[0].outer == 1 && !slot.is_symbolic() && !elements.is_symbolic()) {
    return Tensors{buffer.view_symint({slot * layout.parts()})
                       .narrow_symint(0, 0, elements)
                       .view_symint(shape)};
  }
  return Tensors{at::empty_symint(shape, buffer.options())};
}

c10::IValue reduce_scatter_start(const Given& given) {
  const at::Tensor input = given["input"];
  check_float(input.scalar_type(), "input");
  const SymShards layout = check_entire(input, given["dim"], given["sizes"], given["rank"]);
  const BufferShape shape = along_buffer(layout, input);
  if (input.is_meta()) {
    return shape.meta();
  }
  return start_along("reduce_scatter", layout, input, given)
      .launch_scatter({input.contiguous()}, shape);
}

c10::IValue reduce_scatter_wait(const Given& given) {
  const at::ScalarType dtype = at::Tensor(given["buffer"]).scalar_type();
  const OptionalDtype reduce_dtype = given["reduce_dtype"];
  check_float(dtype, "buffer");
  check_reduce_dtype(reduce_dtype);
  const AlongWait wait(given);
  const SymInts part = wait.part(given);
  if (wait.buffer.is_meta()) {
    return at::empty_symint(part, wait.buffer.options());
  }
  return reshard_along("reduce_scatter", wait.layout, wait.buffer, given)
      .finish_scatter(wait.buffer, {ints(part)}, dtype, dtype, reduce_dtype)[0];
}

// Nothing is sent, but its gradient will be. All slots of the buffer are views of this rank's
// block.
c10::IValue scatter_start(const Given& given) {
  const at::Tensor input = given["input"];
  const int64_t dim = given["dim"];
  const SymShards layout = check_entire(input, dim, given["sizes"], given["rank"]);
  const at::Tensor slot = buffer_for({layout.slot()}, input.options());
  if (!slot.is_meta()) {
    resolve_group(
        "scatter", given["group_name"], layout.rank, layout.parts(), input.device(), "sizes");
    const at::Tensor part =
        input.narrow_symint(dim, layout[0].begin(layout.rank), layout[0].sizes[layout.rank]);
    slot.narrow(0, 0, part.numel()).view(part.sizes()).copy_(part);
  }
  return slot.view_symint({1, layout.slot()}).expand_symint({layout.parts(), layout.slot()});
}

c10::IValue scatter_wait(const Given& given) {
  const AlongWait wait(given);
  const auto& [buffer, shape, layout] = wait;
  if (!buffer.is_meta()) {
    resolve_group(
        "scatter", given["group_name"], layout.rank, layout.parts(), buffer.device(), "sizes");
    wait_and_take(buffer);
  }
  return Tensors{buffer.select(0, layout.rank)
                     .narrow_symint(0, 0, layout.block(layout.rank))
                     .view_symint(wait.part(given))};
}

}  // namespace

DEEPSP_KERNELS(m) {
  implement<gather_cast_coalesced_start>(m, "_gather_cast_coalesced_start");
  implement<gather_cast_coalesced_wait>(m, "_gather_cast_coalesced_wait");
  implement<reduce_scatter_cast_coalesced_start>(m, "_reduce_scatter_cast_coalesced_start");
  implement<reduce_scatter_cast_coalesced_wait>(m, "_reduce_scatter_cast_coalesced_wait");
  implement<all_gather_start>(m, "all_gather_start");
  implement<all_gather_wait>(m, "all_gather_wait");
  implement<reduce_scatter_start>(m, "reduce_scatter_start");
  implement<reduce_scatter_wait>(m, "reduce_scatter_wait");
  implement<scatter_start>(m, "scatter_start");
  implement<scatter_wait>(m, "scatter_wait");
}

DEEPSP_REFUSED_KINDS(m) {
  implement<gather_cast_coalesced_start>(m, "_gather_cast_coalesced_start");
  implement<reduce_scatter_cast_coalesced_start>(m, "_reduce_scatter_cast_coalesced_start");
}

TORCH_LIBRARY_IMPL(deepsp, Functionalize, m) {
  for (const char* wait : {"_gather_cast_coalesced_wait", "all_gather_wait", "scatter_wait"}) {
    cuts_alias(m, wait);
  }
}

}  // namespace deepsp
