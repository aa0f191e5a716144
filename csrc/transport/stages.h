#pragma once
// How ranks whose GPUs reach each other's memory write into it: the protocol, in kernels of a
// stream of each rank's. Knows no torch.
//
// Every rank has a stage, memory that all ranks can write, of two halves. Exchange n uses half
// n % 2 of each:
//
//   (write)   every rank writes its block for p straight to where p's buffer has it, in p's half
//   arrive    tells all ranks that it has, and waits until all have told it
//   take      copies the half to the buffer
//
// A half is written again two exchanges later. Whoever does so has seen all ranks arrive in the
// exchange between, and they did that when they had taken this one: no other word is needed.
// arrived[s] of rank r is a word in r's memory that rank s sets to n + 1. Exchanges are numbered
// alike on all ranks.

#ifdef DEEPSP_CUDA
#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace deepsp {

class Stages {
 public:
  // By rank: where its stage is mapped here, and its words, which are 0 at first. After `most_ns`
  // nanoseconds of waiting, the device reports an error.
  Stages(
      int64_t rank,
      std::vector<char*> stages,
      std::vector<uint64_t*> arrived,
      int64_t half_bytes,
      uint64_t most_ns);

  // What the words of a rank take.
  static int64_t word_bytes(int64_t ranks) {
    return ranks * static_cast<int64_t>(sizeof(uint64_t));
  }

  // Where rank p's buffer of this exchange begins.
  char* half(int64_t p) const;
  cudaError_t arrive(cudaStream_t stream);
  // The exchange is over with it.
  cudaError_t take(char* buffer, int64_t bytes, cudaStream_t stream);

 private:
  int64_t rank_;
  std::vector<char*> stages_;
  std::vector<uint64_t*> arrived_;
  int64_t half_bytes_;
  uint64_t most_ns_;
  uint64_t exchange_ = 0;
};

}  // namespace deepsp
#endif
