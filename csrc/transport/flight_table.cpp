#include "flight_table.h"

#include "flight.h"

#include <algorithm>
#include <vector>

namespace deepsp {

FlightTable::FlightTable() = default;
FlightTable::~FlightTable() = default;

FlightTable::Entries FlightTable::expired(Entries& entries) {
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

void FlightTable::let_go_of_done() {
  std::vector<std::unique_ptr<Flight>> done;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [_, entry] : flying_) {
      if (auto flight = let_go_if_done(*entry.flight)) {
        done.push_back(std::move(flight));
      }
    }
  }
  // A backend keeps what it sent and received until somebody waits.
  for (const auto& flight : done) {
    flight->wait_all();
  }
}

void FlightTable::set(const c10::Storage& storage, std::unique_ptr<Flight> flight) {
  const bool flies = !flight->landed && !flight->local;
  if (flies && !capturing(storage.device())) {
    let_go_of_done();
  }
  Entries flown, marks;  // end outside the lock
  std::lock_guard<std::mutex> lock(mutex_);
  if (flies) {
    flown = expired(flying_);
  }
  if (landed_.size() >= look_at_) {
    marks = expired(landed_);
    look_at_ = std::max<size_t>(64, 2 * landed_.size());
  }
  const void* const key = storage.unsafeGetStorageImpl();
  if (const auto found = landed_.find(key); found != landed_.end()) {
    TORCH_INTERNAL_ASSERT(found->second.flight->local);
    marks.insert(landed_.extract(found));
  }
  // An entry keeps its storage's address from being given to another.
  const bool is_new = (flies ? flying_ : landed_)
                          .emplace(key, Entry{storage.getWeakStorageImpl(), std::move(flight)})
                          .second;
  TORCH_INTERNAL_ASSERT(is_new);
}

std::unique_ptr<Flight> FlightTable::take(const c10::Storage& storage) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Entries* entries : {&flying_, &landed_}) {
    const auto found = entries->find(storage.unsafeGetStorageImpl());
    if (found != entries->end()) {
      auto flight = std::move(found->second.flight);
      entries->erase(found);
      return flight;
    }
  }
  return nullptr;
}

size_t FlightTable::size() {
  std::lock_guard<std::mutex> lock(mutex_);
  return flying_.size() + landed_.size();
}

}  // namespace deepsp
