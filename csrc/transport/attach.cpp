#include "attach.h"

#include "errors.h"
#include "pool.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <vector>

namespace deepsp {

// ------------------------------------------------------------------- table

FlightTable::Entries FlightTable::remove_expired(Entries& entries) {
  Entries gone;
  for (auto it = entries.begin(); it != entries.end();) {
    const auto next = std::next(it);
    if (it->second.storage.expired()) {
      gone.insert(entries.extract(it));
    }
    it = next;
  }
  return gone;
}

void FlightTable::release_done() {
  std::vector<std::unique_ptr<Flight>> done;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [_, entry] : flights_) {
      if (auto flight = entry.flight->release_if_done()) {
        done.push_back(std::move(flight));
      }
    }
  }
  // A backend keeps the tensors of a work until its wait.
  for (const auto& flight : done) {
    flight->wait_all();
  }
}

void FlightTable::set(const c10::Storage& storage, std::unique_ptr<Flight> flight) {
  const bool is_pending = !flight->waited && !flight->local;
  if (is_pending && !capturing(storage.device())) {
    release_done();
  }
  Entries freed, marks;  // destroyed outside the lock
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_pending) {
    freed = remove_expired(flights_);
  }
  if (marks_.size() >= search_at_) {
    marks = remove_expired(marks_);
    search_at_ = std::max<size_t>(64, 2 * marks_.size());
  }
  const void* const key = storage.unsafeGetStorageImpl();
  if (const auto found = marks_.find(key); found != marks_.end()) {
    TORCH_INTERNAL_ASSERT(found->second.flight->local);
    marks.insert(marks_.extract(found));
  }
  // The weak pointer keeps the storage's address from being reused, so the key is unique.
  const bool is_new = (is_pending ? flights_ : marks_)
                          .emplace(key, Entry{storage.getWeakStorageImpl(), std::move(flight)})
                          .second;
  TORCH_INTERNAL_ASSERT(is_new);
}

std::unique_ptr<Flight> FlightTable::take(const c10::Storage& storage) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Entries* entries : {&flights_, &marks_}) {
    if (auto found = entries->extract(storage.unsafeGetStorageImpl())) {
      return std::move(found.mapped().flight);
    }
  }
  return nullptr;
}

size_t FlightTable::size() {
  std::lock_guard<std::mutex> lock(mutex_);
  return flights_.size() + marks_.size();
}

// ------------------------------------------------------------------- buffers

namespace {

// Never destroyed: tensors may outlive static destructors.
FlightTable& table() {
  static FlightTable* const instance = new FlightTable;
  return *instance;
}

std::unique_ptr<Flight> remove_flight(const at::Tensor& buffer) {
  Block* const block = block_of(buffer);
  return block ? std::move(block->flight) : table().take(buffer.storage());
}

template <class T>
T peek(const at::Tensor& buffer, T Flight::* member) {
  auto flight = remove_flight(buffer);
  if (!flight) {
    return T{};
  }
  const T found = (*flight).*member;
  attach(buffer, std::move(flight));
  return found;
}

c10::Stream current_stream(const at::Tensor& of) {
  return c10::impl::VirtualGuardImpl(of.device().type()).getStream(of.device());
}

// Torch reuses a freed tensor's memory on the stream that allocated it. If another stream waits, it
// uses that memory, too.
void record_current_stream(const at::Tensor& buffer, const Flight& flight) {
  const c10::Stream current = current_stream(buffer);
  if (current == *flight.stream) {
    return;
  }
  if (!flight.collective) {  // whose wait would order the streams
    c10::Event so_far(buffer.device().type());
    so_far.record(*flight.stream);
    so_far.block(current);
  }
  const c10::impl::VirtualGuardImpl device(buffer.device().type());
  device.recordDataPtrOnStream(buffer.storage().data_ptr(), current);
  for (const at::Tensor& sent : flight.holds) {
    device.recordDataPtrOnStream(sent.storage().data_ptr(), current);
  }
}

}  // namespace

void remember_stream(const at::Tensor& buffer) {
  if (!buffer.is_cpu()) {
    auto flight = std::make_unique<Flight>();
    flight->stream = current_stream(buffer);
    flight->local = true;
    attach(buffer, std::move(flight));
  }
}

void attach(const at::Tensor& buffer, std::unique_ptr<Flight> flight) {
  Block* const block = block_of(buffer);
  if (!block) {
    return table().set(buffer.storage(), std::move(flight));
  }
  TORCH_INTERNAL_ASSERT(!block->flight);
  block->flight = std::move(flight);
}

std::unique_ptr<Flight> flight_of(
    const Group& group, const at::Tensor& buffer, const Work& work, const at::Tensor& sent) {
  auto flight = std::make_unique<Flight>();
  flight->what = describe(group);
  flight->collective = work;
  flight->together = true;
  if (!buffer.is_cpu()) {
    flight->stream = current_stream(buffer);
    flight->done_on_device = group.done_on_device && !capturing(buffer.device());
  }
  if (!sent.is_alias_of(buffer)) {
    flight->holds.push_back(sent);
  }
  return flight;
}

void attach(
    const Group& group, const at::Tensor& buffer, const Work& work, const at::Tensor& sent) {
  auto flight = flight_of(group, buffer, work, sent);
  if (waits_at_once()) {
    return flight->wait_all();
  }
  attach(buffer, std::move(flight));
}

std::unique_ptr<Flight> take_flight(const at::Tensor& buffer) {
  TORCH_CHECK_VALUE(
      !was_waited(buffer),
      "expected a buffer that hasn't been waited for, got one that was waited for already; call "
      "the wait once for each start");
  auto flight = remove_flight(buffer);
  if (flight && flight->stream.has_value()) {
    record_current_stream(buffer, *flight);
  }
  if (flight && flight->local) {
    attach(buffer, std::move(flight));
    return nullptr;
  }
  return flight;
}

std::unique_ptr<Flight> wait_and_take(const at::Tensor& buffer) {
  auto flight = take_flight(buffer);
  if (flight) {
    flight->wait_all();
    mark_waited(buffer, *flight);
  }
  return flight;
}

void mark_waited(const at::Tensor& buffer, const Flight& flight) {
  auto mark = std::make_unique<Flight>();
  mark->waited = true;
  mark->together = flight.together;
  mark->order = flight.order;
  attach(buffer, std::move(mark));
}

bool was_waited(const at::Tensor& buffer) {
  return peek(buffer, &Flight::waited);
}

bool is_received_at_once(const at::Tensor& buffer) {
  return !buffer.is_cpu() || peek(buffer, &Flight::together);
}

BlockOrder order_of(const at::Tensor& buffer) {
  return peek(buffer, &Flight::order);
}

}  // namespace deepsp
