// The buffer pool under sanitizers (`make sanitize`): several threads take blocks, write them, hand
// them to each other and give them back, while its limit changes. And the flights of buffers that
// aren't the pool's.

// Its source: torch's headers take longest, and are read once.
#include "../../csrc/transport/attach.cpp"
#include "../../csrc/transport/pool.cpp"
#include "common.h"

#include <ATen/ops/empty.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>

namespace {
std::atomic<int> ended{0};
}

// The pool only destroys flights: they wait for c10d's works.
deepsp::Flight::~Flight() {
  ++ended;
}

// A work that is done and owns the memory that it filled: here, the tensors that it sent do.
std::unique_ptr<deepsp::Flight> deepsp::Flight::release_if_done() {
  if (!done_on_device || holds.empty()) {
    return nullptr;
  }
  auto done = std::make_unique<Flight>();
  done->holds = std::move(holds);
  --ended;  // it ends, too
  return done;
}

bool deepsp::capturing(c10::Device) {
  return false;
}

bool deepsp::waits_at_once() {
  return false;
}

void deepsp::Flight::wait_all() {
}

using namespace deepsp;

namespace {

constexpr int kThreads = 4;
constexpr int kRounds = 300;
constexpr int64_t kLimit = 4 << 20;

// Tensors on their way from one thread to another.
std::mutex mutex;
std::vector<at::Tensor> handed(8);
std::atomic<int> flown{0};

void work(int thread) {
  std::mt19937 generator(thread);
  for (int round = 0; round < kRounds; ++round) {
    const int64_t count = 1 + static_cast<int64_t>(generator() % 200000);
    at::Tensor tensor = pool_empty({count}, at::kFloat);
    std::memset(tensor.mutable_data_ptr(), thread + 1, count * 4);
    if (round % 3 == 0) {
      attach(tensor, std::make_unique<Flight>());
      ++flown;
      if (round % 2 == 0) {
        require(take_flight(tensor) != nullptr, "it has a flight");
        require(take_flight(tensor) == nullptr, "a flight is taken once");
      }
    }
    const char* bytes = static_cast<const char*>(tensor.const_data_ptr());
    require(bytes[0] == thread + 1 && bytes[count * 4 - 1] == thread + 1, "a block of one's own");
    {
      std::lock_guard<std::mutex> lock(mutex);
      std::swap(tensor, handed[generator() % handed.size()]);
    }
    tensor.reset();
    if (round % 50 == thread) {
      pool_clear();
    }
    if (round % 70 == thread) {
      pool_set_limit(round % 2 ? kLimit : kLimit / 4);
    }
    require(pool_idle_bytes() <= kLimit, "the limit holds");
  }
}

// What a GPU's buffers rely on; any memory will do.
void flights_of_other_memory() {
  const auto flight = [](bool landed) {
    auto made = std::make_unique<Flight>();
    made->waited = landed;
    return made;
  };
  FlightTable table;
  ended = 0;
  at::Tensor dropped = at::empty({4}, at::kFloat), waited = at::empty({4}, at::kFloat);
  const at::Tensor view = waited.view({2, 2});
  table.set(dropped.storage(), flight(false));
  table.set(waited.storage(), flight(false));
  dropped.reset();
  require(ended == 0 && table.size() == 2, "nothing is looked at before the next launch");
  const at::Tensor other = at::empty({4}, at::kFloat);
  table.set(other.storage(), flight(false));
  require(
      ended == 1 && table.size() == 2, "the flight of a freed buffer goes with the next launch");
  require(table.take(view.storage()) != nullptr, "a view finds its storage's flight");
  require(table.take(waited.storage()) == nullptr, "a flight is taken once");

  // A work that isn't done keeps what it fills; one that is lets go of it.
  at::Tensor filled = at::empty({4}, at::kFloat);
  auto flying = flight(false);
  flying->holds.push_back(filled);
  Flight* const of_filled = flying.get();
  table.set(filled.storage(), std::move(flying));
  filled.reset();
  const at::Tensor third = at::empty({4}, at::kFloat), fourth = at::empty({4}, at::kFloat);
  table.set(third.storage(), flight(false));
  require(table.size() == 3, "it is kept");
  of_filled->done_on_device = true;
  table.set(fourth.storage(), flight(true));
  require(table.size() == 4, "a mark is no launch");
  table.take(fourth.storage());
  table.set(fourth.storage(), flight(false));
  require(table.size() == 3, "it is let go");
  table.take(third.storage());
  table.take(fourth.storage());

  auto local = flight(false);
  local->local = true;
  table.set(third.storage(), std::move(local));
  table.set(third.storage(), flight(false));
  require(!table.take(third.storage())->local, "a launch takes the place of a local one");
  require(table.take(third.storage()) == nullptr, "which is gone");

  table.set(waited.storage(), flight(true));
  std::vector<at::Tensor> kept;
  for (int n = 0; n < 1000; ++n) {
    const at::Tensor gone = at::empty({4}, at::kFloat);
    kept.push_back(n % 10 == 0 ? at::empty({4}, at::kFloat) : at::Tensor());
    for (const at::Tensor& of : {gone, kept.back()}) {
      if (of.defined()) {
        table.set(of.storage(), flight(true));
      }
    }
    require(table.size() < 400, "marks go with their storages");
  }
  for (at::Tensor& of : kept) {
    require(!of.defined() || table.take(of.storage())->waited, "marks stay with their storages");
  }
  require(table.take(waited.storage())->waited, "so does the first");

  // With several threads. Their tensors live: torch's own code isn't built for TSan.
  kept.assign(kThreads * 50, at::Tensor());
  for (at::Tensor& of : kept) {
    of = at::empty({4}, at::kFloat);
  }
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 20; ++round) {
        for (int n = 0; n < 50; ++n) {
          const c10::Storage& mine = kept[t * 50 + n].storage();
          table.set(mine, flight(n % 2 == 0));
          require(n % 5 == 0 || table.take(mine)->waited == (n % 2 == 0), "one's own flight");
        }
        for (int n = 0; n < 50; n += 5) {
          require(table.take(kept[t * 50 + n].storage()) != nullptr, "it is still there");
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace

int main() {
  constexpr int64_t kGiB = 1 << 30;
  require(pool_limit() == 2 * kGiB, "the limit of a process alone");
  pool_share(8);
  pool_share(4);
  require(pool_limit() == kGiB / 4, "of each of the most ranks that a group has here");
  pool_set_limit(kLimit);
  pool_share(16);
  require(pool_limit() == kLimit, "one that was set stays");
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back(work, t);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  handed.clear();
  require(ended == flown, "every flight has ended");
  require(pool_idle_bytes() <= pool_limit(), "the limit holds at the end");
  pool_clear();
  require(pool_idle_bytes() == 0, "clear gives everything back");
  flights_of_other_memory();
  std::puts("pool: fine");
}
