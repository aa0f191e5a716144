// The buffer pool under sanitizers (`make sanitize`): several threads take blocks, write them, hand
// them to each other and give them back, while its limit changes.

// Its source: torch's headers take longest, and are read once.
#include "../../csrc/transport/pool.cpp"
#include "common.h"

#include <atomic>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>

namespace {
std::atomic<int> ended{0};
}

// The pool only lets go of them: what they wait for is c10d's.
deepsp::Flight::~Flight() {
  ++ended;
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
      set_flight(tensor, std::make_unique<Flight>());
      ++flown;
      if (round % 2 == 0) {
        require(take_flight(tensor) != nullptr, "take_flight");
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

}  // namespace

int main() {
  pool_set_limit(kLimit);
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
  std::puts("pool: fine");
}
