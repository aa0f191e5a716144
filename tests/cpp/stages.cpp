// The protocol by which GPUs write into each other's memory, on threads: each is a rank with its
// stream, their memories are plain, and the CUDA kernels run on the CPU. Built with TSan it shows
// that no rank reads a block before it is written, or writes one that is still read.

#include "../../csrc/kernels/copy.h"
#include "../../csrc/transport/stages.h"
#include "common.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

using namespace deepsp;

namespace {

constexpr int kRanks = 4;
constexpr uint64_t kExchanges = 250;
constexpr int64_t kRows = 6;
constexpr int64_t kMostRow = 40;  // bytes
constexpr int64_t kHalf = kRanks * kRows * kMostRow;

void require_done(cudaError_t error) {
  require(error == cudaSuccess, "launched");
}

// Alike for all ranks: bytes of a row of the blocks for `owner`. None travel now and then.
int64_t row_of(uint64_t n, int owner) {
  std::mt19937_64 random(n * kRanks + owner);
  return random() % 5 == 0 ? 0 : static_cast<int64_t>(random() % kMostRow);
}

char pattern(uint64_t n, int source, int owner, int64_t row) {
  return static_cast<char>(n * 31 + source * 7 + owner * 3 + row + 1);
}

struct Rank {
  int me;
  Stages stages;
  std::mt19937_64 random;

  // Rows of all ranks side by side: [kRows, kRanks, row].
  void exchange(uint64_t n) {
    nap(random);
    std::vector<std::vector<char>> sources(kRanks);
    std::vector<StridedCopy> copies;
    for (int owner = 0; owner < kRanks; ++owner) {
      const int64_t row = row_of(n, owner);
      std::vector<char>& source = sources[owner];
      source.resize(kRows * (row + 3) + 1);
      for (int64_t r = 0; r < kRows; ++r) {
        std::memset(source.data() + r * (row + 3), pattern(n, me, owner, r), row);
      }
      copies.push_back(
          {source.data(),
           stages.half(owner) + me * row,
           {1, 1, 1, kRows},
           {0, 0, 0, row + 3},
           {0, 0, 0, kRanks * row},
           row});
    }
    require_done(copy_rows_cuda(copies, nullptr));
    nap(random);
    require_done(stages.arrive(nullptr));
    nap(random);
    const int64_t row = row_of(n, me);
    std::vector<char> buffer(kRanks * kRows * row + 1, 'x');
    require_done(stages.take(buffer.data(), kRanks * kRows * row, nullptr));
    for (int64_t r = 0; r < kRows; ++r) {
      for (int source = 0; source < kRanks; ++source) {
        const char* const at = buffer.data() + (r * kRanks + source) * row;
        require(
            std::all_of(at, at + row, [&](char c) { return c == pattern(n, source, me, r); }),
            "what was written");
      }
    }
    require(buffer.back() == 'x', "no more than arrived");
  }
};

struct Memory {
  std::vector<std::unique_ptr<char[]>> stages;
  std::vector<std::unique_ptr<uint64_t[]>> words;
  std::vector<void*> of_stages;
  std::vector<void*> of_words;

  explicit Memory(int ranks) {
    for (int p = 0; p < ranks; ++p) {
      stages.push_back(std::make_unique<char[]>(2 * kHalf));
      words.push_back(std::make_unique<uint64_t[]>(Stages::word_bytes(ranks) / sizeof(uint64_t)));
      of_stages.push_back(stages.back().get());
      of_words.push_back(words.back().get());
    }
  }
};

void ranks_exchange() {
  Memory memory(kRanks);
  std::vector<std::thread> threads;
  for (int p = 0; p < kRanks; ++p) {
    threads.emplace_back([&memory, p] {
      Rank rank{
          p, Stages(p, memory.of_stages, memory.of_words, kHalf, UINT64_MAX), std::mt19937_64(p)};
      for (uint64_t n = 0; n < kExchanges; ++n) {
        rank.exchange(n);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

// What a rank that is ahead writes, comes with the exchange that it belongs to.
void a_rank_is_ahead() {
  Memory memory(2);
  Stages first(0, memory.of_stages, memory.of_words, kHalf, UINT64_MAX);
  Stages second(1, memory.of_stages, memory.of_words, kHalf, UINT64_MAX);
  require(first.half(1) == memory.of_stages[1], "the first half");
  char nothing = 0;
  std::thread ahead([&] {
    for (int n = 0; n < 3; ++n) {
      *first.half(1) = static_cast<char>('a' + n);
      require_done(first.arrive(nullptr));
      require_done(first.take(&nothing, 0, nullptr));
    }
  });
  for (int n = 0; n < 3; ++n) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    require_done(second.arrive(nullptr));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    char seen = 0;
    require_done(second.take(&seen, 1, nullptr));
    require(seen == 'a' + n, "what belongs to this exchange");
  }
  ahead.join();
}

}  // namespace

int main() {
  a_rank_is_ahead();
  ranks_exchange();
  std::puts("stages: fine");
}
