// Gather-cast, collectives along a dimension, and sums over the group.

#include "../reshard/sums.h"
#include "decomposition.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/stack.h>

namespace deepsp::inductor {
namespace {

// The blocks that are sent: flat, each in a slot that it may not fill, so that one collective of
// even parts moves them. They hold elements, or bytes where tensors of several dtypes share them.
struct Blocks {
  SymShards layout;
  std::vector<at::ScalarType> dtypes = {};  // on the wire, of a list
  bool alike = true;
  int64_t unit = 1;  // what the layout counts in place of one element

  explicit Blocks(SymShards layout) : layout(std::move(layout)) {}
  Blocks(SymShards list, Dtypes dtypes)
      : layout(std::move(list)),
        dtypes(dtypes.vec()),
        alike(std::count(dtypes.begin(), dtypes.end(), dtypes[0]) == layout.size()),
        unit(alike ? c10::elementSize(dtypes[0]) : 1) {}

  int64_t parts() const { return layout.parts(); }
  c10::SymInt slot() const { return layout.slot() / unit; }
  at::Tensor as_bytes(const at::Tensor& x) const { return alike ? x : x.view(at::kByte); }
  at::Tensor as_buffer(const at::Tensor& x) const {
    return alike ? x : x.view(buffer_dtype(dtypes));
  }

  // Not cat with zeros: where there is nothing but padding, no trace of the tensor would be left,
  // and two such exchanges would be taken for one and the same, on this rank alone.
  at::Tensor padded(const at::Tensor& flat, const c10::SymInt& padding) const {
    return is_zero(padding) ? flat : at::constant_pad_nd_symint(flat, {0, padding / unit});
  }

  // The slot of rank p, of its parts of all tensors.
  at::Tensor pack(const Tensors& tensors, int64_t p) const {
    Tensors pieces;
    for (size_t i = 0; i < tensors.size(); ++i) {
      pieces.push_back(
          padded(as_bytes(tensors[i].reshape(-1)), layout.piece(i, p) - layout[i].part(p)));
    }
    const at::Tensor block = joined(pieces);
    return even() ? block : padded(block, layout.slot() - layout.block(p));
  }

  // The slots of all ranks, of full tensors: [P, slot].
  at::Tensor pack_full(at::TensorList full, int64_t dim) const {
    if (stacks()) {
      return full[0].reshape({parts(), -1});
    }
    std::vector<Tensors> of(parts());
    for (size_t i = 0; i < full.size(); ++i) {
      const Tensors split = full[i].split_with_sizes_symint(layout[i].sizes, dim);
      for (int64_t p = 0; p < parts(); ++p) {
        of[p].push_back(split[p]);
      }
    }
    Tensors slots;
    for (int64_t p = 0; p < parts(); ++p) {
      slots.push_back(pack(of[p], p));
    }
    return at::stack(slots);
  }

  // Whether the parts of a single tensor are alike on all ranks; whether the slots, as they lie,
  // are the full tensor.
  bool even() const {
    const SymInts& sizes = layout[0].sizes;
    return layout.size() == 1 && std::all_of(sizes.begin(), sizes.end(), [&](const auto& size) {
             return size == sizes[0];
           });
  }
  bool stacks() const { return even() && (parts() == 1 || layout[0].outer == 1); }

  at::Tensor slots(const at::Tensor& buffer) const {
    return as_bytes(waited(buffer, parts())).view_symint({parts(), slot()});
  }

  // Rank p's part of tensor i, of the given shape.
  at::Tensor unpack(const at::Tensor& slot, size_t i, int64_t p, c10::SymIntArrayRef shape) const {
    const at::Tensor flat =
        slot.narrow_symint(0, layout.offset(i, p) / unit, layout[i].part(p) / unit);
    return (alike ? flat : flat.view(dtypes[i])).view_symint(shape);
  }

  // Tensor i, joined from the ranks' parts: every slot holds one.
  at::Tensor gathered(
      const at::Tensor& slots, size_t i, int64_t dim, c10::SymIntArrayRef shape) const {
    if (stacks()) {
      return slots.view_symint(shape);
    }
    Tensors of;
    for (int64_t p = 0; p < parts(); ++p) {
      of.push_back(unpack(slots.select(0, p), i, p, resized(shape, dim, layout[i].sizes[p])));
    }
    return at::cat(of, dim);
  }

  // This rank's part of tensor i: the sum of the slots, one term from each rank.
  at::Tensor summed(
      const at::Tensor& slots,
      size_t i,
      c10::SymIntArrayRef shape,
      OptionalDtype reduce_dtype,
      at::ScalarType dtype) const {
    Tensors of;
    for (int64_t p = 0; p < parts(); ++p) {
      of.push_back(unpack(slots.select(0, p), i, layout.rank, shape));
    }
    const at::Tensor sum = sum_in_order(of, reduce_dtype, dtype);
    return parts() == 1 ? sum.clone() : sum;  // fresh, also where nothing was summed or cast
  }
};

Blocks summed_by_backend(const Blocks& blocks, at::ScalarType dtype) {
  const std::vector<at::ScalarType> dtypes(blocks.layout.size(), dtype);
  return {in_dtype(blocks.layout, blocks.dtypes, dtype), dtypes};
}

at::Tensor viewed(const at::Tensor& x, at::ScalarType dtype) {
  return x.scalar_type() == dtype ? x : x.view(dtype);
}

at::Tensor launch_gather(const at::Tensor& block, const Blocks& blocks, const Given& given) {
  return launch(
      "all_gather_into_tensor", blocks.parts(), block, {blocks.parts()}, given["group_name"]);
}

// Scatters slots, or what lies in them, of `count` elements each.
at::Tensor launch_scatter(
    const at::Tensor& slots, const c10::SymInt& count, const Blocks& blocks, const Given& given) {
  const SymInts counts(blocks.parts(), count);
  return launch("all_to_all_single", blocks.parts(), slots, {counts, counts}, given["group_name"]);
}

// ------------------------------------------------------------------- lists

c10::IValue gather_cast_coalesced_start(const Given& given) {
  const at::TensorList shards = given["shards"];
  const Dtypes dtypes = given["dtypes"];
  const Blocks blocks(check_shards(shards, given["sizes"], dtypes, given["rank"]), dtypes);
  Tensors cast;
  for (size_t i = 0; i < shards.size(); ++i) {
    cast.push_back(shards[i].to(dtypes[i]));
  }
  return blocks.as_buffer(launch_gather(blocks.pack(cast, given["rank"]), blocks, given));
}

Blocks blocks_of(const Given& given, const Argument& dtypes) {
  return Blocks(
      check_wait(
          given["buffer"], given["sizes"], given["row_shapes"], given["row_dims"], dtypes,
          given["rank"]),
      dtypes);
}

c10::IValue gather_cast_coalesced_wait(const Given& given) {
  const Blocks blocks = blocks_of(given, given["dtypes"]);
  const auto shapes = shapes_of(blocks.layout, given["row_shapes"], given["row_dims"]);
  const at::Tensor slots = blocks.slots(given["buffer"]);
  Tensors results;
  for (size_t i = 0; i < shapes.size(); ++i) {
    results.push_back(blocks.gathered(slots, i, 0, shapes[i]));
  }
  return results;
}

c10::IValue reduce_scatter_cast_coalesced_start(const Given& given) {
  const at::TensorList inputs = given["inputs"];
  const Blocks blocks(check_full(inputs, given["sizes"], given["rank"]), dtypes_of(inputs));
  if (const OptionalDtype dtype = given["backend_sums"]) {
    Tensors cast;
    for (const at::Tensor& x : inputs) {
      cast.push_back(x.to(*dtype));
    }
    const Blocks sent = summed_by_backend(blocks, *dtype);
    const at::Tensor slots =
        sent.padded(sent.pack_full(cast, 0), even_slot(sent.layout) - sent.layout.slot());
    const at::Tensor sums = launch(
        "reduce_scatter_tensor", blocks.parts(), slots.reshape(-1), {"sum", blocks.parts()},
        given["group_name"]);
    // A view of the shape that the buffer's gradient must have: a copy would read what is in
    // flight.
    return viewed(sums, buffer_dtype(blocks.dtypes))
        .as_strided_symint({buffer_elements(blocks.layout, blocks.dtypes)}, SymInts{0});
  }
  const at::Tensor slots = blocks.pack_full(inputs, 0).reshape(-1);
  return blocks.as_buffer(launch_scatter(slots, blocks.slot(), blocks, given));
}

c10::IValue reduce_scatter_cast_coalesced_wait(const Given& given) {
  const Blocks blocks = blocks_of(given, given["wire_dtypes"]);
  const auto shapes =
      shapes_of(blocks.layout, given["row_shapes"], given["row_dims"], blocks.layout.rank);
  const Dtypes dtypes = given["dtypes"];
  Tensors results;
  if (const OptionalDtype dtype = given["backend_sums"]) {
    const at::Tensor buffer = given["buffer"];
    const Blocks sent = summed_by_backend(blocks, *dtype);
    const c10::SymInt elements =
        even_slot(sent.layout) / static_cast<int64_t>(buffer.element_size());
    const at::Tensor sums =
        waited(viewed(buffer.as_strided_symint({elements}, SymInts{1}), *dtype), blocks.parts());
    for (size_t i = 0; i < shapes.size(); ++i) {
      const at::Tensor part = sent.unpack(sums, i, sent.layout.rank, shapes[i]);
      results.push_back(part.to(dtypes[i], /*non_blocking=*/false, /*copy=*/true));
    }
    return results;
  }
  const at::Tensor slots = blocks.slots(given["buffer"]);
  for (size_t i = 0; i < shapes.size(); ++i) {
    results.push_back(blocks.summed(slots, i, shapes[i], given["reduce_dtype"], dtypes[i]));
  }
  return results;
}

// ------------------------------------------------------------------- along a dimension

c10::IValue all_gather_start(const Given& given) {
  const at::Tensor input = given["input"];
  const Blocks blocks(check_part(input, given["dim"], given["sizes"], given["rank"]));
  return launch_gather(blocks.pack({input}, given["rank"]).view({1, -1}), blocks, given);
}

c10::IValue reduce_scatter_start(const Given& given) {
  const at::Tensor input = given["input"];
  const Blocks blocks(check_entire(input, given["dim"], given["sizes"], given["rank"]));
  return launch_scatter(blocks.pack_full(input, given["dim"]), 1, blocks, given);
}

c10::IValue scatter_start(const Given& given) {
  const at::Tensor input = given["input"];
  const Blocks blocks(check_entire(input, given["dim"], given["sizes"], given["rank"]));
  const int64_t rank = given["rank"];
  const at::Tensor part = input.split_with_sizes_symint(given["sizes"], given["dim"])[rank].clone();
  return blocks.pack({part}, rank).view({1, -1}).expand({blocks.parts(), -1});
}

Blocks blocks_of(const Given& given) {
  return Blocks(
      check_buffer(given["buffer"], given["dim"], given["sizes"], given["shape"], given["rank"]));
}

// The shape of this rank's part.
SymInts part_of(const Given& given, const Blocks& blocks) {
  return resized(given["shape"], given["dim"], blocks.layout[0].sizes[blocks.layout.rank]);
}

c10::IValue all_gather_wait(const Given& given) {
  const Blocks blocks = blocks_of(given);
  return Tensors{blocks.gathered(blocks.slots(given["buffer"]), 0, given["dim"], given["shape"])};
}

c10::IValue reduce_scatter_wait(const Given& given) {
  const Blocks blocks = blocks_of(given);
  const at::Tensor slots = blocks.slots(given["buffer"]);
  return blocks.summed(
      slots, 0, part_of(given, blocks), given["reduce_dtype"], slots.scalar_type());
}

c10::IValue scatter_wait(const Given& given) {
  const Blocks blocks = blocks_of(given);
  const int64_t rank = blocks.layout.rank;
  const at::Tensor buffer = given["buffer"];
  return Tensors{blocks.unpack(buffer.select(0, rank), 0, rank, part_of(given, blocks))};
}

// ------------------------------------------------------------------- sums

c10::IValue all_reduce_start(const Given& given) {
  Tensors flat;
  for (const at::Tensor& x : at::TensorList(given["inputs"])) {
    flat.push_back(x.reshape(-1));
  }
  const at::Tensor sent = at::cat(flat);
  const int64_t size = given["size"];
  if (sums_on_arrival(sent.scalar_type(), given["reduce_dtype"])) {
    return Op("reduce_scatter_start")(
               given, {{"input", sent}, {"dim", 0}, {"sizes", sum_parts(sent.sym_size(0), size)}})
        .value();
  }
  return size == 1 ? sent : launch("all_reduce", size, sent, {"sum"}, given["group_name"]);
}

c10::IValue all_reduce_wait(const Given& given) {
  const at::Tensor buffer = given["buffer"];
  const int64_t size = given["size"];
  const SumShapes sums = check_sum_wait(
      buffer, given["shapes"], given["dims"], given["grad"], given["rank"], size,
      given["reduce_dtype"]);
  if (!sums_on_arrival(buffer.scalar_type(), given["reduce_dtype"])) {
    return views_of(waited(buffer, size), sums.of);
  }
  return views_of(gather_sums(sums, given), sums.of);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp_inductor, CompositeImplicitAutograd, m) {
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
  implement<all_reduce_start>(m, "all_reduce_start");
  implement<all_reduce_wait>(m, "all_reduce_wait");
}

}  // namespace deepsp::inductor
