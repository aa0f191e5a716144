// The protocol by which GPUs write into each other's memory, on threads: each is a stream of a
// rank, their memories are plain, and the CUDA kernels run on the CPU. Built with TSan it shows
// that no rank reads a block before it is written, or writes one that is still read.

#include "../../csrc/kernels/copy.h"
#include "../../csrc/transport/stages.h"
#include "common.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

using namespace deepsp;

namespace {

constexpr int kRanks = 4;
constexpr int64_t kRows = 6;
constexpr int64_t kMostRow = 40;  // bytes

void require_done(cudaError_t error) {
  require(error == cudaSuccess, "launched");
}

// Alike for all ranks: bytes of a row of the blocks for `owner`. None travel now and then.
int64_t row_of(uint64_t n, int owner) {
  std::mt19937_64 random(n * kRanks + owner);
  return n % 9 == 0 || random() % 5 == 0 ? 0 : static_cast<int64_t>(random() % kMostRow);
}

char pattern(uint64_t n, int source, int owner, int64_t row) {
  return static_cast<char>(n * 31 + source * 7 + owner * 3 + row + 1);
}

struct CpuLanes final : Lanes {
  std::mt19937_64 random;
  CpuStream write, take;

  explicit CpuLanes(int rank) : random(rank) {}
  cudaStream_t writing() override { return slowly(write); }
  cudaStream_t taking() override { return slowly(take); }
  void writing_waits() override { write.wait_for(take); }
  void taking_waits() override { take.wait_for(write); }

 private:
  // Now this stream is late, now that one.
  cudaStream_t slowly(CpuStream& stream) {
    stream.add([seed = random()] {
      std::mt19937_64 drawn(seed);
      nap(drawn);
    });
    return stream;
  }
};

struct Rank {
  int me;
  Stages stages;
  CpuLanes lanes;

  // Rows of all ranks side by side: [kRows, kRanks, row].
  void exchange(uint64_t n) {
    std::vector<std::vector<char>> sources(kRanks);
    std::vector<std::vector<StridedCopy>> copies(kRanks);
    std::vector<int64_t> bytes;
    for (int owner = 0; owner < kRanks; ++owner) {
      const int64_t row = row_of(n, owner);
      bytes.push_back(kRanks * kRows * row);
      std::vector<char>& source = sources[owner];
      source.resize(kRows * (row + 3) + 1);
      for (int64_t r = 0; r < kRows; ++r) {
        std::memset(source.data() + r * (row + 3), pattern(n, me, owner, r), row);
      }
      copies[owner].push_back(
          {source.data(),
           stages.begin(owner) + me * row,
           {1, 1, 1, kRows},
           {0, 0, 0, row + 3},
           {0, 0, 0, kRanks * row},
           row});
    }
    const int64_t row = row_of(n, me);
    std::vector<char> buffer(kRanks * kRows * row + 1, 'x');
    require_done(stages.exchange(copies, bytes, buffer.data(), lanes));
    lanes.take.synchronize();
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

  Memory(int ranks, int64_t half) {
    for (int p = 0; p < ranks; ++p) {
      stages.push_back(std::make_unique<char[]>(2 * half));
      words.push_back(std::make_unique<uint64_t[]>(Stages::word_bytes(ranks) / sizeof(uint64_t)));
      of_stages.push_back(stages.back().get());
      of_words.push_back(words.back().get());
    }
  }
};

// Halves that hold every buffer, and such that a buffer takes many slices, which cut its rows.
void ranks_exchange(int64_t half, uint64_t exchanges) {
  Memory memory(kRanks, half);
  std::vector<std::thread> threads;
  for (int p = 0; p < kRanks; ++p) {
    threads.emplace_back([&memory, half, exchanges, p] {
      Rank rank{p, Stages(p, memory.of_stages, memory.of_words, half, UINT64_MAX), CpuLanes(p)};
      for (uint64_t n = 0; n < exchanges; ++n) {
        rank.exchange(n);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

// What a rank that is ahead writes, comes with the exchange that it belongs to; of several slices,
// while it is taken from others.
void a_rank_is_ahead() {
  constexpr int64_t kHalf = 4;
  const std::vector<int64_t> bytes{0, 3 * kHalf - 1};
  Memory memory(2, kHalf);
  Stages first(0, memory.of_stages, memory.of_words, kHalf, UINT64_MAX);
  Stages second(1, memory.of_stages, memory.of_words, kHalf, UINT64_MAX);
  std::string sent[3];
  CpuLanes ahead(0), behind(1);
  for (int n = 0; n < 3; ++n) {
    sent[n] = std::string("the number ") + static_cast<char>('a' + n);
    sent[n].resize(bytes[1]);
    require_done(first.exchange(
        {{}, {copy_of_bytes(sent[n].data(), first.begin(1), bytes[1])}}, bytes, nullptr, ahead));
  }
  for (int n = 0; n < 3; ++n) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::string seen(bytes[1], ' ');
    require_done(second.exchange({{}, {}}, bytes, seen.data(), behind));
    behind.take.synchronize();
    require(seen == sent[n], "what belongs to this exchange");
  }
  ahead.take.synchronize();
}

}  // namespace

int main() {
  a_rank_is_ahead();
  ranks_exchange(kRanks * kRows * kMostRow, 150);
  ranks_exchange(256, 80);
  ranks_exchange(48, 40);
  std::puts("stages: fine");
}
