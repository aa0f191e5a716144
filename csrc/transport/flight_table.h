#pragma once
// What is on its way into buffers that aren't the pool's: those of a GPU, which torch allocates.

#include <c10/core/Storage.h>

#include <memory>
#include <mutex>
#include <unordered_map>

namespace deepsp {

struct Flight;

// Flights by the storage that they fill. The table owns nothing of a storage, and lets go of works
// that are done, which do: what nobody waits for leaves when something else is launched.
class FlightTable {
 public:
  FlightTable();
  ~FlightTable();

  // In the place of a local one, if there is.
  void set(const c10::Storage& storage, std::unique_ptr<Flight> flight);
  // Null where there is none. Leaves none behind.
  std::unique_ptr<Flight> take(const c10::Storage& storage);
  // How many it has, of storages that live or not.
  size_t size();

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::unique_ptr<Flight> flight;
  };
  using Entries = std::unordered_map<const void*, Entry>;

  void let_go_of_done();
  // Of storages that are gone.
  static Entries expired(Entries& entries);

  std::mutex mutex_;
  Entries flying_;
  // Landed, or local: many, which stay as long as their storages, and are looked at now and then.
  Entries landed_;
  size_t look_at_ = 64;
};

}  // namespace deepsp
