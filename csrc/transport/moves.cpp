#include "moves.h"

#include "agreement.h"
#include "c10d.h"
#include "errors.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <numeric>

namespace deepsp {
namespace {

// A hash by which ranks notice that they make different calls.
uint64_t hash_of(
    const Group& group, const std::vector<int64_t>& bytes, at::ScalarType dtype, uint64_t kind) {
  uint64_t hash = hash_bytes(kNoHash, group.op, std::strlen(group.op));
  hash = hash_bytes(hash, bytes.data(), bytes.size() * sizeof(int64_t));
  hash = hash_bytes(hash, &dtype, sizeof(dtype));
  return hash_bytes(hash, &kind, sizeof(kind));
}

}  // namespace

Transfer::Transfer(
    const Group& group,
    const std::function<int64_t(int64_t)>& elements,
    at::IntArrayRef sizes,
    const at::TensorOptions& options,
    uint64_t kind)
    : group_(group.alone ? nullptr : &group) {
  if (!alone() && options.device().is_cpu()) {
    mapped_ = mapped_of(group);
  } else if (!alone()) {
    staged_ = staged_of(group, options.device());
  }
  if (mapped_ != nullptr || staged_ != nullptr) {
    for (int64_t p = 0; p < group.size; ++p) {
      bytes_.push_back(elements(p) * static_cast<int64_t>(options.dtype().itemsize()));
    }
  }
  if (mapped_ == nullptr) {
    buffer_ = empty_buffer(sizes, options);
    remember_stream(buffer_);
    clear_if_waiting_at_once(buffer_);  // it may be larger than all blocks
    return;
  }
  const at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
  with_context(
      group, -1, [&] { exchange_.emplace(mapped_, hash_of(group, bytes_, dtype, kind), bytes_); });
  buffer_ = exchange_->take_buffer(sizes, dtype);
}

std::unique_ptr<Flight> Transfer::start(const Moves& moves) {
  if (alone()) {
    return std::make_unique<Flight>();
  }
  auto flight = staged_       ? stage(moves)
                : moves_own() ? launch_collective(moves)
                              : std::make_unique<Flight>();
  flight->what = describe(*group_);
  if (moves_own()) {
    return flight;
  }
  if (!places_all()) {
    if (std::any_of(moves.blocks.begin(), moves.blocks.end(), [](const Blocks& blocks) {
          return !blocks.make;
        })) {
      flight->holds = moves.reads;
    }
    for (const Blocks& blocks : moves.blocks) {
      send(blocks, *flight);
    }
  }
  if (mapped_ != nullptr) {
    write(moves, *flight);
  }
  return flight;
}

void Transfer::attach(std::unique_ptr<Flight> flight) const {
  if (waits_at_once()) {
    flight->wait_all();
  }
  if (!alone() || buffer_.is_cpu()) {
    deepsp::attach(buffer_, std::move(flight));
  }
}

void Transfer::send(const Blocks& blocks, Flight& flight) const {
  const auto among = [&](int64_t p) { return !reaches(p); };
  char* next = nullptr;
  if (blocks.make) {
    int64_t bytes = 0;
    for (int64_t p = 0; p < group_->size; ++p) {
      bytes += p != group_->rank && among(p) ? blocks.send(p).size : 0;
    }
    flight.holds.push_back(empty_buffer({bytes}, buffer_.options().dtype(at::kByte)));
    next = data_of(flight.holds.back());
  }
  exchange_point_to_point(
      *group_, among,
      [&](int64_t p) {
        const Span span = blocks.receive(p);
        return Bytes{data_of(buffer_) + span.begin, span.size};
      },
      [&](int64_t p) {
        Bytes block = blocks.send(p);
        if (blocks.make) {
          block.data = next;
          next += block.size;
          blocks.make(PackedBlock{p, block.data});
        }
        return block;
      },
      flight);
}

void Transfer::write(const Moves& moves, Flight& flight) {
  RECORD_FUNCTION("deepsp::exchange", {});
  flight.mapped = mapped_;
  flight.exchange = exchange_->number();
  std::vector<StridedCopy> copies;
  try {
    exchange_->write([&](int64_t p, char* theirs) {
      if (theirs == nullptr) {
        return;  // a buffer without bytes
      }
      if (moves.place) {
        copies.clear();
        moves.place(p, theirs, copies);
        run(copies, buffer_.device());
      } else if (moves.blocks[0].send(p).size > 0) {
        moves.blocks[0].make(PackedBlock{p, theirs + moves.begin(p)});
      }
    });
  } catch (...) {
    exchange_.reset();  // tells the peers, before the flight waits for them
    throw;
  }
}

at::Tensor Transfer::make_all(const Blocks& blocks) const {
  std::vector<int64_t> sizes;
  for (int64_t p = 0; p < group_->size; ++p) {
    sizes.push_back(blocks.send(p).size);
  }
  const std::vector<int64_t> begins = prefix_sums(sizes);
  const at::Tensor made = empty_buffer({begins.back()}, buffer_.options().dtype(at::kByte));
  std::vector<PackedBlock> places;
  for (int64_t p = 0; p < group_->size; ++p) {
    places.push_back({p, data_of(made) + begins[p]});
  }
  blocks.make(places);
  return made;
}

std::unique_ptr<Flight> Transfer::stage(const Moves& moves) const {
  if (moves.place) {
    return staged_->exchange(*group_, bytes_, buffer_, moves.reads, moves.place);
  }
  const at::Tensor made = make_all(moves.blocks[0]);
  const char* next = data_of(made);
  return staged_->exchange(
      *group_, bytes_, buffer_, {made}, [&](int64_t p, char* theirs, auto& copies) {
        const int64_t size = moves.blocks[0].send(p).size;
        copies.push_back(copy_of_bytes(next, theirs + moves.begin(p), size));
        next += size;
      });
}

std::unique_ptr<Flight> Transfer::launch_collective(const Moves& moves) const {
  const at::Tensor to = bytes_of(buffer_);
  if (moves.slot.defined()) {
    const at::Tensor bytes = bytes_of(moves.slot);
    const at::Tensor sent = bytes.is_alias_of(buffer_) ? unowned(bytes) : bytes;
    return flight_of(*group_, buffer_, launch_all_gather(*group_, unowned(to), sent), sent);
  }
  const Blocks& blocks = moves.blocks[0];
  std::vector<int64_t> gives, gets;
  for (int64_t p = 0; p < group_->size; ++p) {
    gives.push_back(blocks.send(p).size);
    gets.push_back(blocks.receive(p).size);
  }
  const at::Tensor sent = blocks.make ? make_all(blocks) : bytes_of(moves.reads[0]);
  const int64_t received = std::accumulate(gets.begin(), gets.end(), int64_t(0));
  const Work work =
      launch_all_to_all(*group_, unowned(to.narrow(0, 0, received)), sent, gets, gives);
  return flight_of(*group_, buffer_, work, sent);
}

}  // namespace deepsp
