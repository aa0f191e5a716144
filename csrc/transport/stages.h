#pragma once
// How ranks whose GPUs reach each other's memory write into it: the protocol, in kernels on one
// stream of each rank. It uses no torch.
//
// Every rank has a stage, memory of two halves that all ranks can write. An exchange goes in slices
// of a half's size: slice by slice of all ranks' buffers, as many as the largest one has. Slices
// are numbered on through all exchanges, alike on all ranks, and slice n uses half n % 2:
//
//   write    every rank writes its part of p's slice into p's half, at its place there
//   arrive   tells all ranks that its part is written, and that the slice before is taken; waits
//            until all have told it
//   take     copies the rank's own half to its buffer, while the next slice is written
//
// A half is written again two slices later. Its writer has then seen all ranks arrive with the
// slice between, which they do only after this one's take: no other signal is needed. arrived[s] of
// rank r is a word in r's memory that rank s sets to n + 1.

#ifdef DEEPSP_CUDA
#include "../kernels/copy.h"

#include <cstdint>
#include <vector>

namespace deepsp {

// The two streams of a rank.
class Lanes {
 public:
  virtual ~Lanes() = default;
  virtual cudaStream_t writing() = 0;
  virtual cudaStream_t taking() = 0;
  // Each waits for what the other one was given so far.
  virtual void writing_waits() = 0;
  virtual void taking_waits() = 0;
};

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

  // Where copies to rank p's buffer are made to begin.
  char* begin(int64_t p) const { return static_cast<char*>(stages_[p]); }
  // One exchange. By rank p: the copies of this rank's block for p, as if p's whole buffer lay at
  // begin(p), and the size of that buffer, alike on all ranks. `buffer` is this rank's.
  cudaError_t exchange(
      const std::vector<std::vector<StridedCopy>>& copies,
      const std::vector<int64_t>& bytes,
      char* buffer,
      Lanes& lanes);

 private:
  // The half of rank p that this slice uses.
  char* half(int64_t p) const { return begin(p) + static_cast<int64_t>(slice_ % 2) * half_bytes_; }
  cudaError_t arrive(cudaStream_t stream) const;

  int64_t rank_;
  std::vector<void*> stages_;
  std::vector<void*> arrived_;
  int64_t half_bytes_;
  uint64_t most_ns_;
  uint64_t slice_ = 0;
};

}  // namespace deepsp
#endif
