#pragma once
// Words in the memory of GPUs that ranks set for each other and wait for.

#ifdef DEEPSP_CUDA
#include <cuda_runtime_api.h>

#include <cstdint>

namespace deepsp {

constexpr int kMostSignals = 128;

struct Signals {
  int count;
  uint64_t* words[kMostSignals];  // where they are mapped here
  uint64_t value;
};

// Sets each word to `value`. Whoever sees it sees what the stream has done so far, too.
cudaError_t set_signals_cuda(const Signals& signals, cudaStream_t stream);
// Waits until each word is `value` or more. After `most_ns` nanoseconds it says which isn't, and
// ends with an error of the device.
cudaError_t wait_signals_cuda(const Signals& signals, uint64_t most_ns, cudaStream_t stream);

}  // namespace deepsp
#endif
