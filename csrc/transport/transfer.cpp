#include "transfer.h"

#include "agreement.h"
#include "c10d.h"
#include "errors.h"

#include <ATen/record_function.h>

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
    const Group* group,
    const std::function<int64_t(int64_t)>& elements,
    at::IntArrayRef sizes,
    const at::TensorOptions& options,
    uint64_t kind)
    : group_(group) {
  if (group != nullptr && options.device().is_cpu()) {
    mapped_ = mapped_of(*group);
  } else if (group != nullptr) {
    staged_ = staged_of(*group, options.device());
  }
  TORCH_CHECK(
      !inputs_are_reused() || reaches_all(), "expected the ranks of group '", group->name,
      "' to write into each other's memory, as they did when this code was compiled; call "
      "torch._dynamo.reset() after the group has changed");
  if (mapped_ != nullptr || staged_ != nullptr) {
    for (int64_t p = 0; p < group->size; ++p) {
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
  with_context(*group, -1, [&] {
    exchange_.emplace(mapped_, hash_of(*group, bytes_, dtype, kind), bytes_);
  });
  buffer_ = exchange_->take_buffer(sizes, dtype);
}

void Transfer::write(const std::function<void(int64_t, char*)>& write, Flight& flight) {
  if (mapped_ == nullptr) {
    return;
  }
  RECORD_FUNCTION("deepsp::exchange", {});
  flight.what = describe(*group_);
  flight.mapped = mapped_;
  flight.exchange = exchange_->number();
  try {
    exchange_->write(write);
  } catch (...) {
    exchange_.reset();  // tells the peers, before the flight waits for them
    throw;
  }
}

void Transfer::send(
    const std::function<Bytes(int64_t)>& receive,
    const std::function<Bytes(int64_t)>& send,
    Flight& flight) const {
  if (!reaches_all()) {
    exchange_point_to_point(*group_, [&](int64_t p) { return !reaches(p); }, receive, send, flight);
  }
}

std::unique_ptr<Flight> Transfer::stage(at::TensorList reads, const AddCopies& add_copies) const {
  auto flight = staged_->exchange(*group_, bytes_, buffer_, reads, add_copies);
  flight->what = describe(*group_);
  if (waits_at_once()) {
    flight->wait_all();
  }
  return flight;
}

}  // namespace deepsp
