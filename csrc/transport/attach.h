#pragma once
// Attaches a flight to the buffer that it fills, and waits for a buffer by its flight.

#include "flight.h"
#include "group.h"

#include <c10/core/Storage.h>

#include <memory>
#include <mutex>
#include <unordered_map>

namespace deepsp {

// GPU only: records the current stream as the one that made the buffer. If another stream waits for
// the buffer, it waits for that stream, too.
void remember_stream(const at::Tensor& buffer);

// Attaches a flight, which the caller has waited for if waits_at_once() holds.
void attach(const at::Tensor& buffer, std::unique_ptr<Flight> flight);
// The flight of a collective of any backend that fills the buffer.
std::unique_ptr<Flight> flight_of(
    const Group& group, const at::Tensor& buffer, const Work& work, const at::Tensor& sent);
// Attaches that; if waits_at_once() holds, waits for it instead.
void attach(const Group& group, const at::Tensor& buffer, const Work& work, const at::Tensor& sent);
// Detaches the buffer's flight; null if nothing fills it. ValueError after mark_waited.
std::unique_ptr<Flight> take_flight(const at::Tensor& buffer);
// Detaches the flight, waits for it, and marks the buffer.
std::unique_ptr<Flight> wait_and_take(const at::Tensor& buffer);
// From now on take_flight(buffer) raises: a buffer is waited for once.
void mark_waited(const at::Tensor& buffer, const Flight& flight);
bool was_waited(const at::Tensor& buffer);
// Whether one collective receives all blocks of the buffer, before and after the wait.
bool is_received_at_once(const at::Tensor& buffer);
// How blocks lie in it, before and after the wait; packed if it never had a flight.
BlockOrder order_of(const at::Tensor& buffer);

// The flights of buffers that aren't the pool's (a GPU's), by their storage. The table owns no
// storage, so the flights of freed buffers go with the next launch; so do the works and the sent
// tensors of flights whose collective is complete.
class FlightTable {
 public:
  // Replaces a local flight.
  void set(const c10::Storage& storage, std::unique_ptr<Flight> flight);
  // Removes and returns it; null if there is none.
  std::unique_ptr<Flight> take(const c10::Storage& storage);
  // The number of entries, those of freed storages included.
  size_t size();

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::unique_ptr<Flight> flight;
  };
  using Entries = std::unordered_map<const void*, Entry>;

  void release_done();
  // Removes and returns the entries of freed storages.
  static Entries remove_expired(Entries& entries);

  std::mutex mutex_;
  Entries flights_;
  // Marks of waits, and local flights: many, which stay as long as their storages; searched for
  // freed ones only when their number has doubled.
  Entries marks_;
  size_t search_at_ = 64;
};

}  // namespace deepsp
