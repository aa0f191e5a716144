#ifdef DEEPSP_CUDA
#include "stages.h"

#include "../kernels/copy.h"
#include "../kernels/signal.h"

#include <utility>

namespace deepsp {

Stages::Stages(
    int64_t rank,
    std::vector<void*> stages,
    std::vector<void*> arrived,
    int64_t half_bytes,
    uint64_t most_ns)
    : rank_(rank),
      stages_(std::move(stages)),
      arrived_(std::move(arrived)),
      half_bytes_(half_bytes),
      most_ns_(most_ns) {
}

char* Stages::half(int64_t p) const {
  return static_cast<char*>(stages_[p]) + static_cast<int64_t>(exchange_ % 2) * half_bytes_;
}

cudaError_t Stages::arrive(cudaStream_t stream) {
  Signals theirs{static_cast<int>(arrived_.size()), {}, exchange_ + 1};
  Signals mine = theirs;
  for (int p = 0; p < mine.count; ++p) {
    theirs.words[p] = static_cast<uint64_t*>(arrived_[p]) + rank_;
    mine.words[p] = static_cast<uint64_t*>(arrived_[rank_]) + p;
  }
  const cudaError_t error = set_signals_cuda(theirs, stream);
  return error != cudaSuccess ? error : wait_signals_cuda(mine, most_ns_, stream);
}

cudaError_t Stages::take(char* buffer, int64_t bytes, cudaStream_t stream) {
  const char* const from = half(rank_);
  ++exchange_;
  return copy_rows_cuda({copy_of_bytes(from, buffer, bytes)}, stream);
}

}  // namespace deepsp
#endif
