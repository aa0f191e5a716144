#include "engine.h"

#include "../common/checks.h"

#include <ATen/TensorUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

namespace deepsp {
namespace {

// Smaller ones aren't worth a block of the pool: malloc has them at hand.
constexpr int64_t kPoolBytes = int64_t(256) << 10;

std::unique_ptr<Flight> wait_dense(const at::Tensor& buffer) {
  TORCH_CHECK_VALUE(
      buffer.is_contiguous(),
      "expected the contiguous buffer that the start returned, got strides ", buffer.strides());
  return wait_and_take(buffer);
}

}  // namespace

at::Tensor empty_result(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const int64_t bytes =
      c10::multiply_integers(sizes) * static_cast<int64_t>(options.dtype().itemsize());
  return bytes >= kPoolBytes ? empty_buffer(sizes, options) : at::empty(sizes, options);
}

Reshard::Reshard(Shards shards, Group group, c10::Device device)
    : at_(std::move(shards), group.point_to_point || (group.alone && device.is_cpu())),
      group_(std::move(group)) {
}

Transfer Reshard::transfer(const BufferShape& shape) const {
  const std::vector<int64_t> sizes = ints(shape.sizes);
  const int64_t elements = c10::multiply_integers(sizes);
  return Transfer(group_, [=](int64_t) { return elements; }, sizes, shape.options, shape.kind);
}

StridedCopy Reshard::copy_of(
    size_t i, int64_t p, const char* from, int64_t from_row, char* to, int64_t to_row) const {
  return coalesce(
      {from,
       to,
       {1, 1, 1, shards_[i].outer},
       {0, 0, 0, from_row},
       {0, 0, 0, to_row},
       shards_[i].row(p)});
}

char* Reshard::part_of(const at::Tensor& full, size_t i, int64_t p) const {
  return data_of(full) + at_.begin(i, p) * shards_[i].inner;
}

// ------------------------------------------------------------------- gather

StridedCopy Reshard::copy_gathered(const at::Tensor& part, char* buffer) const {
  const int64_t row = shards_[0].row(rank_);
  const int64_t to_row = at_.is_received_whole(0) ? shards_[0].row() : row;
  return copy_of(0, rank_, data_of(part), row, buffer + at_.gathered(0, rank_), to_row);
}

at::Tensor Reshard::slot_in(const at::Tensor& buffer) const {
  const int64_t slot = shards_.slot();
  return bytes_of(buffer).narrow(0, rank_ * slot, slot);
}

void Reshard::place_gathered(const at::Tensor& part, const at::Tensor& buffer) const {
  run({copy_gathered(part, data_of(buffer))}, buffer.device());
}

at::Tensor Reshard::launch_gather(const at::Tensor& part, const BufferShape& shape) const {
  Transfer transfer = this->transfer(shape);
  const at::Tensor& buffer = transfer.buffer();
  if (transfer.moves_own() && shards_.slot() == 0) {
    return buffer;  // nothing is sent
  }
  const bool whole = at_.is_received_whole(0);
  Moves moves;
  moves.reads = {part};
  const int64_t messages = at_.in_place(0) ? at_.rows(0) : 1;
  for (int64_t m = 0; m < messages; ++m) {
    const int64_t mine = shards_[0].part(rank_) / messages;
    moves.blocks.push_back(
        {[this, m, messages](int64_t p) {
           return Span{m * shards_[0].row() + at_.gathered(0, p), shards_[0].part(p) / messages};
         },
         [&part, m, mine](int64_t) { return Bytes{data_of(part) + m * mine, mine}; }});
  }
  moves.place = [&](int64_t, char* theirs, auto& copies) {
    if (moves.slot.defined()) {  // with its padding
      const int64_t slot = shards_.slot();
      copies.push_back(copy_of_bytes(data_of(moves.slot), theirs + rank_ * slot, slot));
    } else {
      copies.push_back(copy_gathered(part, theirs));
    }
  };
  if (transfer.moves_own()) {
    if (!whole) {
      place_gathered(part, buffer);
    }
    moves.slot = whole ? part : slot_in(buffer);
  }
  auto flight = transfer.start(moves);
  if (!transfer.moves_own()) {
    // While the others are in flight; or on arrival, where all is copied once more.
    if (transfer.alone() || whole || waits_at_once()) {
      place_gathered(part, buffer);
    } else {
      flight->own.push_back(part);
    }
  }
  transfer.attach(std::move(flight));
  return buffer;
}

at::Tensor Reshard::launch_gather(const MakeParts& make, const BufferShape& shape) const {
  RECORD_FUNCTION("deepsp::cast", {});
  Transfer transfer = this->transfer(shape);
  const at::Tensor& buffer = transfer.buffer();
  if (transfer.moves_own() && shards_.slot() == 0) {
    return buffer;  // nothing is sent
  }
  char* const base = data_of(buffer);
  // Pieces are made when their receives are posted, and sent from where they were made: those that
  // share a message, then each that is sent alone.
  std::vector<std::vector<Destination>> pieces;
  Moves moves;
  const auto make_once = [&](size_t n) {
    if (!pieces[n].empty()) {
      make(std::exchange(pieces[n], {}));
    }
  };
  const auto add = [&](std::vector<Destination> made, const auto& receive) {
    const size_t n = pieces.size();
    pieces.push_back(std::move(made));
    moves.blocks.push_back({receive, [&, n, receive](int64_t) {
                              make_once(n);
                              const Span mine = receive(rank_);
                              return Bytes{base + mine.begin, mine.size};
                            }});
  };
  std::vector<Destination> packed;
  for (size_t i = 0; i < shards_.size(); ++i) {
    if (!at_.point_to_point || !at_.in_place(i)) {
      packed.push_back({i, base + at_.gathered(i, rank_)});
    }
  }
  if (!packed.empty()) {
    add(std::move(packed), [&](int64_t p) {
      return Span{at_.gathered_block(p), at_.point_to_point ? at_.packed_bytes(p) : shards_.slot()};
    });
  }
  for (size_t i = 0; i < shards_.size(); ++i) {
    if (at_.point_to_point && at_.in_place(i)) {
      add({{i, base + at_.gathered(i, rank_)}},
          [&, i](int64_t p) { return Span{at_.gathered(i, p), shards_[i].part(p)}; });
    }
  }
  // All buffers are alike, so what was made here goes to the same place there.
  moves.place = [&](int64_t, char* theirs, auto& copies) {
    for (const Blocks& blocks : moves.blocks) {
      if (const Bytes mine = blocks.send(rank_); mine.size > 0) {
        copies.push_back(copy_of_bytes(mine.data, theirs + (mine.data - base), mine.size));
      }
    }
  };
  const auto make_all = [&] {
    for (size_t n = 0; n < pieces.size(); ++n) {
      make_once(n);
    }
  };
  if (transfer.moves_own()) {
    make_all();
    moves.slot = slot_in(buffer);
  }
  auto flight = transfer.start(moves);
  make_all();
  transfer.attach(std::move(flight));
  return buffer;
}

Tensors Reshard::finish_gather(
    const at::Tensor& buffer, const Shapes& shapes, Dtypes dtypes, bool fresh) const {
  const auto flight = wait_dense(buffer);
  Tensors results;
  std::vector<StridedCopy> copies;
  for (size_t i = 0; i < shards_.size(); ++i) {
    const Shard<int64_t>& shard = shards_[i];
    const bool whole = at_.is_received_whole(i);
    if (whole && !fresh) {
      const bool alike = buffer.scalar_type() == dtypes[i];
      const auto item = static_cast<int64_t>(c10::elementSize(dtypes[i]));
      const at::Tensor all = alike ? buffer : bytes_of(buffer).view(dtypes[i]);
      results.push_back(all.as_strided(
          shapes[i], at::detail::defaultStrides(shapes[i]),
          all.storage_offset() + at_.gathered(i, 0) / item));
      continue;
    }
    results.push_back(empty_result(shapes[i], buffer.options().dtype(dtypes[i])));
    for (int64_t p = 0; p < shards_.parts(); ++p) {
      const bool own = p == rank_ && flight && !flight->own.empty();
      const char* from = own ? data_of(flight->own[i]) : data_of(buffer) + at_.gathered(i, p);
      copies.push_back(copy_of(
          i, p, from, whole ? shard.row() : shard.row(p), part_of(results[i], i, p), shard.row()));
    }
  }
  if (!copies.empty()) {
    RECORD_FUNCTION("deepsp::land", {});
    run(copies, buffer.device());
  }
  return results;
}

// ------------------------------------------------------------------- scatter

void Reshard::place_scattered(const Tensors& inputs, const at::Tensor& buffer) const {
  std::vector<StridedCopy> copies;
  for (size_t i = 0; i < inputs.size(); ++i) {
    copies.push_back(copy_of(
        i, rank_, part_of(inputs[i], i, rank_), shards_[i].row(),
        data_of(buffer) + at_.scattered(i, rank_), shards_[i].row(rank_)));
  }
  run(copies, buffer.device());
}

void Reshard::add_block(
    const Tensors& inputs, int64_t p, char* to, std::vector<StridedCopy>& copies) const {
  for (size_t i = 0; i < shards_.size(); ++i) {
    if (!at_.in_place(i)) {
      copies.push_back(
          copy_of(i, p, part_of(inputs[i], i, p), shards_[i].row(), to, shards_[i].row(p)));
      to += shards_.piece(i, p);
    }
  }
}

at::Tensor Reshard::launch_scatter(const Tensors& inputs, const BufferShape& shape) const {
  if (shards_.slot() == 0) {
    return buffer_for(shape.sizes, shape.options);
  }
  Transfer transfer = this->transfer(shape);
  const at::Tensor& buffer = transfer.buffer();
  Moves moves;
  moves.reads = inputs;
  if (at_.any_packed()) {
    moves.blocks.push_back(
        {[&](int64_t p) { return Span{at_.scattered_block(p), at_.packed_bytes(rank_)}; },
         [&](int64_t p) { return Bytes{nullptr, at_.packed_bytes(p)}; },
         [&](c10::ArrayRef<PackedBlock> places) {
           RECORD_FUNCTION("deepsp::pack", {});
           std::vector<StridedCopy> copies;
           for (const auto& [p, block] : places) {
             add_block(inputs, p, block, copies);
           }
           run(copies, buffer.device());
         }});
  }
  for (size_t i = 0; i < shards_.size(); ++i) {
    const int64_t row = shards_[i].row(), mine = shards_[i].row(rank_);
    for (int64_t m = 0; m < (at_.in_place(i) ? at_.rows(i) : 0); ++m) {
      moves.blocks.push_back(
          {[this, i, m, mine](int64_t p) { return Span{at_.scattered(i, p) + m * mine, mine}; },
           [this, &inputs, i, m, row](int64_t p) {
             return Bytes{part_of(inputs[i], i, p) + m * row, shards_[i].row(p)};
           }});
    }
  }
  moves.place = [&](int64_t p, char* theirs, auto& copies) {
    Shards of_p = shards_;
    of_p.rank = p;
    const BufferLayout at(std::move(of_p), at_.point_to_point);
    for (size_t i = 0; i < inputs.size(); ++i) {
      copies.push_back(copy_of(
          i, p, part_of(inputs[i], i, p), shards_[i].row(), theirs + at.scattered(i, rank_),
          shards_[i].row(p)));
    }
  };
  auto flight = transfer.start(moves);
  if (!transfer.moves_own()) {
    // They are sent from where they are, and this rank's own parts are read there.
    const bool reads_own = at_.point_to_point && !waits_at_once();
    reads_own ? void(flight->own = inputs) : place_scattered(inputs, buffer);
  }
  transfer.attach(std::move(flight));
  return buffer;
}

Tensors Reshard::finish_scatter(
    const at::Tensor& buffer,
    const Shapes& shapes,
    Dtypes wire,
    Dtypes dtypes,
    OptionalDtype reduce_dtype) const {
  Tensors results;
  for (size_t i = 0; i < shards_.size(); ++i) {
    results.push_back(empty_result(shapes[i], buffer.options().dtype(dtypes[i])));
  }
  finish_scatter(buffer, results, wire, reduce_dtype);
  return results;
}

void Reshard::finish_scatter(
    const at::Tensor& buffer,
    const Tensors& results,
    Dtypes wire,
    OptionalDtype reduce_dtype) const {
  const auto flight = wait_dense(buffer);
  const bool own_apart = flight && !flight->own.empty();
  RECORD_FUNCTION("deepsp::sum", {});
  std::vector<StridedSum> sums;
  for (size_t i = 0; i < shards_.size(); ++i) {
    const auto item = static_cast<int64_t>(c10::elementSize(wire[i]));
    const int64_t row = shards_[i].row(rank_) / item;
    std::vector<Addend> addends;
    for (int64_t p = 0; p < shards_.parts(); ++p) {
      const bool own = p == rank_ && own_apart;
      addends.push_back(
          {own ? part_of(flight->own[i], i, rank_) : data_of(buffer) + at_.scattered(i, p),
           own ? shards_[i].row() / item : row});
    }
    add_sum(results[i], shards_[i].outer, row, wire[i], reduce_dtype, addends, sums);
  }
  run(sums, buffer.device());
}

}  // namespace deepsp
