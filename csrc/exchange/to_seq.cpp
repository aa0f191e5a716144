// What a rank computed for all ranks' tokens, sent to the ranks that hold them, and merged there.

#include <ATen/record_function.h>

#include "engine.h"

namespace deepsp {
namespace {

// From here on, dq, dk and dv of one sequence (B = 1) are sent one by one, each
// straight from where attention's backward left it, instead of packed together:
// the packing copy saved is then worth more than two more messages' latency.
// Counted over the whole group, so that every rank decides alike. Measured:
// benchmarks/results/split_border.md.
constexpr int64_t kSplitBytes = int64_t(16) << 20;

// Whether x [B, S, h, D] lies in memory as [S, B, h, D].
bool lies_by_tokens(const at::Tensor& x) {
  int64_t expected = 1;
  for (const int64_t d : {3, 2, 0, 1}) {
    if (x.size(d) != 1 && x.stride(d) != expected) {
      return false;
    }
    expected *= x.size(d);
  }
  return true;
}

bool is_sent_split(const Layout& plan, int64_t item) {
  int64_t per_token = 0;
  for (size_t i = 0; i < plan.heads.tensors(); ++i) {
    per_token += plan.heads.num_heads(i) * plan.head_dims[i];
  }
  return plan.stacks() && plan.heads.tensors() > 1 && plan.batch == 1 &&
         plan.total() * per_token * item / plan.chunks() >= kSplitBytes;
}

}  // namespace

bool has_one_reader_each(const Layout& plan, size_t i) {
  const auto segments = plan.heads.segments(i);
  return std::all_of(segments.begin(), segments.end(), [](const HeadSegment& segment) {
    return segment.readers.size() == 1;
  });
}

bool is_received_whole(const Layout& plan, size_t i, BlockOrder order, bool tokens_first) {
  const bool by_token = order == BlockOrder::rows, by_sequence = order == BlockOrder::batches;
  const bool fits = plan.batch == 1 ? by_token || by_sequence
                    : tokens_first  ? by_token
                                    : by_sequence;
  return fits && plan.chunks() == 1 && has_one_reader_each(plan, i);
}

// ------------------------------------------------------------------- where blocks lie

BlockPlaces::BlockPlaces(
    const Layout& plan, int64_t source, int64_t chunk, BlockOrder order, int64_t padding)
    : plan_(plan), tokens_(plan.seq_lens[source]), order_(order) {
  if (order == BlockOrder::packed) {
    before_.push_back(0);
    for (int64_t p = 0; p < plan.ranks(); ++p) {
      const int64_t behind = p == source ? padding : 0;
      before_.push_back(before_.back() + plan.elements(source, p, chunk) + behind);
    }
    return;
  }
  for (size_t i = 0; i < plan.heads.tensors(); ++i) {
    lefts_.push_back({0});
    for (int64_t p = 0; p < plan.ranks(); ++p) {
      lefts_[i].push_back(lefts_[i].back() + plan.width(i, p, chunk));
    }
  }
}

BlockPlaces::At BlockPlaces::of(int64_t p, const Part<int64_t>& part) const {
  if (order_ == BlockOrder::packed) {
    return {before_[p] + part.offset + part.column, plan_.batch * part.columns, part.columns};
  }
  int64_t before = 0;  // columns of the tensors before
  for (size_t j = 0; j < part.tensor; ++j) {
    before += lefts_[j].back();
  }
  const int64_t rows = tokens_ * plan_.batch, left = lefts_[part.tensor][p];
  const int64_t columns = lefts_[part.tensor].back();
  switch (order_) {
    case BlockOrder::apart: {
      const int64_t width = lefts_[part.tensor][p + 1] - left;
      return {rows * (before + left), plan_.batch * width, width};
    }
    case BlockOrder::batches:
      return {rows * before + left, columns, tokens_ * columns};
    default:
      return {rows * before + left, plan_.batch * columns, columns};
  }
}

void place_by_tokens(
    at::TensorList inputs,
    const Layout& plan,
    int64_t chunk,
    int64_t p,
    char* buffer,
    BlockOrder order,
    std::vector<StridedCopy>& copies) {
  const BlockPlaces places(plan, p, chunk, order);
  for (const auto& part : plan.parts(p, plan.rank, chunk)) {
    const at::Tensor& x = inputs[part.result];
    if (x.defined()) {
      const int64_t item = item_of(x);
      copies.push_back(copy_of(
          view_of(x, part.row, 0),
          places.of(plan.rank, part).view(buffer, plan.head_dims[part.tensor], item),
          Extent(plan, part).n, item));
    }
  }
}

void pack_by_heads(
    at::TensorList inputs, const Layout& plan, int64_t chunk, c10::ArrayRef<PackedBlock> places) {
  const int64_t item = item_of(inputs[0]);
  std::vector<StridedCopy> copies;
  for (const auto& [p, block] : places) {
    for (const auto& part : plan.parts(p, plan.rank, chunk)) {
      copies.push_back(copy_of(
          view_of(inputs[part.result], part.row, 0), view_in_block(block, plan, part, item),
          Extent(plan, part).n, item));
    }
  }
  run(copies, inputs[0].device());
}

namespace {

// The blocks of all inputs, or of one alone, of whole heads. They are sent from where they lie, if
// that is one block after another.
Blocks blocks_by_heads(
    at::TensorList inputs,
    std::optional<size_t> only,
    const Layout& plan,
    int64_t chunk,
    const BlockPlaces& places) {
  const at::Tensor& x = inputs[only.value_or(0)];
  const int64_t item = item_of(x);
  Blocks blocks;
  blocks.receive = [&plan, &places, only, chunk, item](int64_t p) {
    if (!only) {
      return Span{places.block(p) * item, plan.elements(plan.rank, p, chunk) * item};
    }
    const Part<int64_t> part = plan.parts(plan.rank, p, chunk)[*only];
    const BlockPlaces::At at = places.of(p, part);
    return Span{at.offset * item, part.tokens() * at.token * item};
  };
  // Elements of the blocks for the ranks before p.
  const auto before = [&plan, only, chunk, columns = x.size(2) * x.size(3)](int64_t p) {
    return only ? plan.first(p) * plan.batch * columns : plan.elements_before(p, plan.rank, chunk);
  };
  blocks.send = [before, item, data = data_of(x)](int64_t p) {
    const int64_t begin = before(p) * item;
    return Bytes{data + begin, before(p + 1) * item - begin};
  };
  if ((only || inputs.size() == 1) && lies_by_tokens(x)) {
    return blocks;
  }
  blocks.make = [&plan, inputs, only, chunk](c10::ArrayRef<PackedBlock> made) {
    if (!only) {
      return pack_by_heads(inputs, plan, chunk, made);
    }
    const at::Tensor& alone = inputs[*only];
    const int64_t heads = alone.size(2), dim = alone.size(3), size = item_of(alone);
    std::vector<StridedCopy> copies;
    for (const auto& [p, block] : made) {
      const View to{block, {plan.batch * heads * dim, heads * dim, dim, 1}};
      copies.push_back(copy_of(
          view_of(alone, plan.first(p), 0), to, {plan.seq_lens[p], plan.batch, heads, dim}, size));
    }
    run(copies, alone.device());
  };
  return blocks;
}

}  // namespace

void launch_to_seq(
    at::TensorList inputs,
    const Layout& plan,
    int64_t chunk,
    Transfer& transfer,
    BlockOrder reached,
    bool is_expected) {
  const at::Tensor& buffer = transfer.buffer();
  const bool split = !transfer.alone() && !transfer.moves_own() && !transfer.places_all() &&
                     is_sent_split(plan, item_of(buffer));
  const BlockOrder order = transfer.places_all() ? reached
                           : split               ? BlockOrder::apart
                                                 : BlockOrder::packed;
  const BlockPlaces places(plan, plan.rank, chunk, order);
  Moves moves;
  for (size_t m = 0; m < (split ? inputs.size() : 1); ++m) {
    const auto only = split ? std::make_optional(m) : std::nullopt;
    moves.blocks.push_back(blocks_by_heads(inputs, only, plan, chunk, places));
  }
  moves.place = [&](int64_t p, char* theirs, auto& copies) {
    place_by_tokens(inputs, plan, chunk, p, theirs, order, copies);
  };
  moves.reads = inputs.vec();
  at::RecordFunction packing(at::RecordScope::FUNCTION);
  if (packing.isActive() && (transfer.alone() || transfer.places_all() || moves.blocks[0].make)) {
    packing.before("deepsp::pack");
  }
  auto flight = transfer.start(moves);
  flight->order = order;
  if (!transfer.moves_own()) {
    // This rank's own block is read from where it is, unless it isn't expected to be copied again.
    std::vector<at::Tensor> placed;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const bool is_placed =
          transfer.alone() ||
          is_received_whole(plan, i, order, is_expected && order == BlockOrder::rows);
      placed.push_back(is_placed ? inputs[i] : at::Tensor());
      if (!transfer.alone()) {
        flight->own.push_back(is_placed ? at::Tensor() : inputs[i]);
      }
    }
    std::vector<StridedCopy> copies;
    place_by_tokens(placed, plan, chunk, plan.rank, data_of(buffer), order, copies);
    run(copies, buffer.device());
  }
  transfer.attach(std::move(flight));
}

}  // namespace deepsp
