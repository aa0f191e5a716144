#include "engine.h"

#include "../common/checks.h"

#include <ATen/TensorUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <numeric>

namespace deepsp {
namespace {

// Smaller ones aren't worth a block of the pool: malloc has them at hand.
constexpr int64_t kPoolBytes = int64_t(256) << 10;

at::Tensor bytes_of(const at::Tensor& x) {
  return x.as_strided({x.numel()}, {1}).view(at::kByte);  // one element may have any stride
}

std::unique_ptr<Flight> land_dense(const at::Tensor& buffer) {
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
  return Transfer(
      alone() ? nullptr : &group_, [=](int64_t) { return elements; }, sizes, shape.options,
      shape.kind);
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
  return data_of(full) + shards_[i].begin(p) * shards_[i].inner;
}

// ------------------------------------------------------------------- gather

StridedCopy Reshard::copy_gathered(const at::Tensor& part, char* buffer) const {
  const int64_t row = shards_[0].row(rank_);
  const int64_t to_row = at_.arrives_whole(0) ? shards_[0].row() : row;
  return copy_of(0, rank_, data_of(part), row, buffer + at_.gathered(0, rank_), to_row);
}

void Reshard::place_gathered(const at::Tensor& part, const at::Tensor& buffer) const {
  run({copy_gathered(part, data_of(buffer))}, buffer.device());
}

void Reshard::gather_slots(const Transfer& transfer) const {
  const at::Tensor& buffer = transfer.buffer();
  const int64_t slot = shards_.slot();
  if (!alone() && slot > 0) {
    if (transfer.staged()) {
      return stage_slot(transfer, bytes_of(buffer).narrow(0, rank_ * slot, slot));
    }
    const at::Tensor all = unowned(bytes_of(buffer));
    attach(
        group_, buffer, launch_all_gather(group_, all, all.narrow(0, rank_ * slot, slot)), buffer);
  }
}

void Reshard::stage_slot(const Transfer& transfer, const at::Tensor& slot) const {
  attach(transfer.buffer(), transfer.stage({slot}, [&](int64_t, char* theirs, auto& copies) {
    const auto bytes = static_cast<int64_t>(slot.nbytes());
    copies.push_back(copy_of_bytes(data_of(slot), theirs + rank_ * shards_.slot(), bytes));
  }));
}

at::Tensor Reshard::launch_gather(const at::Tensor& part, const BufferShape& shape) const {
  Transfer transfer = this->transfer(shape);
  const at::Tensor& buffer = transfer.buffer();
  if (!group_.point_to_point || alone()) {
    if (!alone() && at_.arrives_whole(0) && shards_.slot() > 0) {
      if (transfer.staged()) {
        stage_slot(transfer, part);
        return buffer;
      }
      const at::Tensor all = unowned(bytes_of(buffer));
      attach(group_, buffer, launch_all_gather(group_, all, bytes_of(part)), part);
      return buffer;
    }
    place_gathered(part, buffer);
    gather_slots(transfer);
    return buffer;
  }
  auto flight = std::make_unique<Flight>();
  const int64_t messages = at_.in_place(0) ? at_.rows(0) : 1;
  for (int64_t m = 0; m < messages; ++m) {
    char* const to = data_of(buffer) + m * shards_[0].row();
    const int64_t mine = shards_[0].part(rank_) / messages;
    transfer.send(
        [&](int64_t p) { return Bytes{to + at_.gathered(0, p), shards_[0].part(p) / messages}; },
        [&](int64_t) { return Bytes{data_of(part) + m * mine, mine}; }, *flight);
  }
  transfer.write(
      [&](int64_t, char* theirs) {
        if (theirs != nullptr) {
          run({copy_gathered(part, theirs)}, buffer.device());
        }
      },
      *flight);
  flight->holds.push_back(part);
  // While the others travel; or on arrival, where all is copied once more.
  if (at_.arrives_whole(0) || waits_at_once() || inputs_are_reused()) {
    place_gathered(part, buffer);
  } else {
    flight->own.push_back(part);
  }
  if (waits_at_once()) {
    flight->wait_all();
  }
  attach(buffer, std::move(flight));
  return buffer;
}

at::Tensor Reshard::launch_gather(const MakeParts& make, const BufferShape& shape) const {
  RECORD_FUNCTION("deepsp::cast", {});
  Transfer transfer = this->transfer(shape);
  const at::Tensor& buffer = transfer.buffer();
  char* const base = data_of(buffer);
  std::vector<Destination> packed, in_place;
  for (size_t i = 0; i < shards_.size(); ++i) {
    const bool alone_in_message = at_.point_to_point && at_.in_place(i);
    (alone_in_message ? in_place : packed).push_back({i, base + at_.gathered(i, rank_)});
  }
  if (!at_.point_to_point) {
    make(packed);
    gather_slots(transfer);
    return buffer;
  }

  auto flight = std::make_unique<Flight>();
  // Pieces are made when their receives are posted, and sent from where they were made.
  const auto exchange = [&](const std::vector<Destination>& pieces, const auto& bytes_of) {
    bool made = false;
    const auto make_once = [&] {
      if (!made) {
        make(pieces);
        made = true;
      }
    };
    transfer.send(
        bytes_of,
        [&](int64_t) {
          make_once();
          return bytes_of(rank_);
        },
        *flight);
    make_once();
  };
  if (!packed.empty()) {
    exchange(packed, [&](int64_t p) {
      return Bytes{base + at_.gathered_block(p), at_.packed_bytes(p)};
    });
  }
  for (const Destination& piece : in_place) {
    exchange({piece}, [&](int64_t p) {
      return Bytes{base + at_.gathered(piece.tensor, p), shards_[piece.tensor].part(p)};
    });
  }
  // All buffers are alike, so what was made here goes to the same place there.
  transfer.write(
      [&](int64_t, char* theirs) {
        std::vector<StridedCopy> copies;
        const auto add = [&](char* from, int64_t bytes) {
          if (bytes > 0) {
            copies.push_back(copy_of_bytes(from, theirs + (from - base), bytes));
          }
        };
        add(base + at_.gathered_block(rank_), at_.packed_bytes(rank_));
        for (const Destination& piece : in_place) {
          add(piece.to, shards_[piece.tensor].part(rank_));
        }
        run(copies, buffer.device());
      },
      *flight);
  if (waits_at_once()) {
    flight->wait_all();
  }
  attach(buffer, std::move(flight));
  return buffer;
}

Tensors Reshard::land_gather(
    const at::Tensor& buffer, const Shapes& shapes, Dtypes dtypes, bool fresh) const {
  const auto flight = land_dense(buffer);
  Tensors results;
  std::vector<StridedCopy> copies;
  for (size_t i = 0; i < shards_.size(); ++i) {
    const Shard<int64_t>& shard = shards_[i];
    const bool whole = at_.arrives_whole(i);
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

void Reshard::scatter_blocks(const Tensors& inputs, const Transfer& transfer) const {
  const at::Tensor& buffer = transfer.buffer();
  std::vector<int64_t> counts;
  for (int64_t p = 0; p < group_.size; ++p) {
    counts.push_back(shards_.block(p));
  }
  const int64_t mine = shards_.block(rank_);
  if (transfer.staged()) {
    attach(buffer, transfer.stage(inputs, [&](int64_t p, char* theirs, auto& copies) {
      char* const to = theirs + rank_ * counts[p];
      if (at_.any_packed()) {
        add_block(inputs, p, to, copies);
      } else {
        copies.push_back(copy_of_bytes(part_of(inputs[0], 0, p), to, counts[p]));
      }
    }));
    return;
  }
  at::Tensor sent;
  if (!at_.any_packed()) {
    sent = bytes_of(inputs[0]);
  } else {
    RECORD_FUNCTION("deepsp::pack", {});
    const int64_t bytes = std::accumulate(counts.begin(), counts.end(), int64_t(0));
    sent = buffer_for({bytes}, buffer.options().dtype(at::kByte));
    char* next = data_of(sent);
    std::vector<StridedCopy> copies;
    for (int64_t p = 0; p < group_.size; ++p) {
      add_block(inputs, p, next, copies);
      next += counts[p];
    }
    run(copies, buffer.device());
  }
  const at::Tensor received = unowned(bytes_of(buffer).narrow(0, 0, group_.size * mine));
  const std::vector<int64_t> each(group_.size, mine);
  attach(group_, buffer, launch_all_to_all(group_, received, sent, each, counts), sent);
}

at::Tensor Reshard::launch_scatter(const Tensors& inputs, const BufferShape& shape) const {
  if (shards_.slot() == 0) {
    return buffer_for(shape.sizes, shape.options);
  }
  Transfer transfer = this->transfer(shape);
  const at::Tensor& buffer = transfer.buffer();
  if (!at_.point_to_point) {
    alone() ? place_scattered(inputs, buffer) : scatter_blocks(inputs, transfer);
    return buffer;
  }
  char* const base = data_of(buffer);
  auto flight = std::make_unique<Flight>();
  if (!transfer.reaches_all() && at_.any_packed()) {
    int64_t bytes = -at_.packed_bytes(rank_);
    for (int64_t p = 0; p < group_.size; ++p) {
      bytes += at_.packed_bytes(p);
    }
    const at::Tensor sent = buffer_for({bytes}, buffer.options().dtype(at::kByte));
    flight->holds.push_back(sent);
    char* next = data_of(sent);
    transfer.send(
        [&](int64_t p) { return Bytes{base + at_.scattered_block(p), at_.packed_bytes(rank_)}; },
        [&](int64_t p) {
          RECORD_FUNCTION("deepsp::pack", {});
          const Bytes block{next, at_.packed_bytes(p)};
          std::vector<StridedCopy> copies;
          add_block(inputs, p, block.data, copies);
          run(copies, buffer.device());
          next += block.size;
          return block;
        },
        *flight);
  }
  for (size_t i = 0; i < shards_.size(); ++i) {
    const Shard<int64_t>& shard = shards_[i];
    const int64_t messages = at_.in_place(i) ? at_.rows(i) : 0;
    for (int64_t m = 0; m < messages; ++m) {
      transfer.send(
          [&](int64_t p) {
            return Bytes{base + at_.scattered(i, p) + m * shard.row(rank_), shard.row(rank_)};
          },
          [&](int64_t p) {
            return Bytes{part_of(inputs[i], i, p) + m * shard.row(), shard.row(p)};
          },
          *flight);
    }
  }
  transfer.write(
      [&](int64_t p, char* theirs) {
        Shards of_p = shards_;
        of_p.rank = p;
        const BufferLayout at(std::move(of_p), /*point_to_point=*/true);
        std::vector<StridedCopy> copies;
        for (size_t i = 0; i < inputs.size(); ++i) {
          copies.push_back(copy_of(
              i, p, part_of(inputs[i], i, p), shards_[i].row(), theirs + at.scattered(i, rank_),
              shards_[i].row(p)));
        }
        run(copies, buffer.device());
      },
      *flight);
  // They are sent from where they are, and this rank's own parts are read there.
  flight->own = inputs;
  if (waits_at_once()) {
    flight->wait_all();
  }
  if (waits_at_once() || inputs_are_reused()) {
    place_scattered(inputs, buffer);
    flight->own.clear();
  }
  attach(buffer, std::move(flight));
  return buffer;
}

Tensors Reshard::land_scatter(
    const at::Tensor& buffer,
    const Shapes& shapes,
    Dtypes wire,
    Dtypes dtypes,
    OptionalDtype reduce_dtype) const {
  Tensors results;
  for (size_t i = 0; i < shards_.size(); ++i) {
    results.push_back(empty_result(shapes[i], buffer.options().dtype(dtypes[i])));
  }
  land_scatter(buffer, results, wire, reduce_dtype);
  return results;
}

void Reshard::land_scatter(
    const at::Tensor& buffer,
    const Tensors& results,
    Dtypes wire,
    OptionalDtype reduce_dtype) const {
  const auto flight = land_dense(buffer);
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
