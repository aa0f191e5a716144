#pragma once
// How ranks whose GPUs reach each other's memory write into it: the protocol, in kernels on one
// stream of each rank. It uses no torch.
//
// Every rank has a stage, memory of two halves that all ranks can write. Exchange n uses half n %
// 2:
//
//   (write)   every rank writes its block for p into p's half, at its place in p's buffer
//   arrive    tells all ranks that its blocks are written, and waits until all have told it
//   take      copies the rank's own half to its buffer
//
// A half is written again two exchanges later. Its writer has then seen all ranks arrive in the
// exchange between, which they do only after this one's take: no other signal is needed. arrived[s]
// of rank r is a word in r's memory that rank s sets to n + 1. Exchanges are numbered alike on all
// ranks.

#ifdef DEEPSP_CUDA
#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace deepsp {

class Stages {
 public:
  // By rank: where its stage is mapped here, and its words, 0 at first. The device reports an error
  // when it has waited for `most_ns` nanoseconds.
  Stages(
      int64_t rank,
      std::vector<void*> stages,
      std::vector<void*> arrived,
      int64_t half_bytes,
      uint64_t most_ns);

  // The size of a rank's words.
  static int64_t word_bytes(int64_t ranks) {
    return ranks * static_cast<int64_t>(sizeof(uint64_t));
  }

  // The half of rank p that this exchange uses.
  char* half(int64_t p) const;
  cudaError_t arrive(cudaStream_t stream);
  // It ends the exchange.
  cudaError_t take(char* buffer, int64_t bytes, cudaStream_t stream);

 private:
  int64_t rank_;
  std::vector<void*> stages_;
  std::vector<void*> arrived_;
  int64_t half_bytes_;
  uint64_t most_ns_;
  uint64_t exchange_ = 0;
};

}  // namespace deepsp
#endif
