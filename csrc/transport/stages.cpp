#ifdef DEEPSP_CUDA
#include "stages.h"

#include "../kernels/signal.h"

#include <algorithm>
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

cudaError_t Stages::arrive(cudaStream_t stream) const {
  Signals theirs{static_cast<int>(arrived_.size()), {}, slice_ + 1};
  Signals mine = theirs;
  for (int p = 0; p < mine.count; ++p) {
    theirs.words[p] = static_cast<uint64_t*>(arrived_[p]) + rank_;
    mine.words[p] = static_cast<uint64_t*>(arrived_[rank_]) + p;
  }
  const cudaError_t error = set_signals_cuda(theirs, stream);
  return error != cudaSuccess ? error : wait_signals_cuda(mine, most_ns_, stream);
}

cudaError_t Stages::exchange(
    const std::vector<std::vector<StridedCopy>>& copies,
    const std::vector<int64_t>& bytes,
    char* buffer,
    Lanes& lanes) {
  const int64_t most = *std::max_element(bytes.begin(), bytes.end());
  for (int64_t first = 0; first == 0 || first < most; first += half_bytes_) {
    std::vector<StridedCopy> slice;
    for (size_t p = 0; p < copies.size(); ++p) {
      for (const StridedCopy& copy : copies[p]) {
        add_within(copy, begin(p) + first, half_bytes_, half(p), slice);
      }
    }
    cudaError_t error = copy_rows_cuda(slice, lanes.writing());
    lanes.writing_waits();
    if (error == cudaSuccess) {
      error = arrive(lanes.writing());
    }
    lanes.taking_waits();
    const int64_t left = std::min(bytes[rank_] - first, half_bytes_);
    if (error == cudaSuccess && left > 0) {
      error = copy_rows_cuda({copy_of_bytes(half(rank_), buffer + first, left)}, lanes.taking());
    }
    if (error != cudaSuccess) {
      return error;
    }
    ++slice_;
  }
  return cudaSuccess;
}

}  // namespace deepsp
#endif
