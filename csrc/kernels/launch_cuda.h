#pragma once
// Launching kernels, and index arithmetic that the host and the device share.

#include <cuda_runtime_api.h>

#include <cstdint>

#ifdef __CUDACC__
#define DEEPSP_HOST_DEVICE __host__ __device__
#else
#define DEEPSP_HOST_DEVICE
#endif

namespace deepsp {

constexpr int64_t kMaxBlocks = 0x7fffffff;

// The kernel for `blocks` blocks. Parameters hold 32 KiB since CUDA 12.1 (sm_70).
template <class Params>
cudaError_t launch(
    void (*kernel)(Params), int64_t blocks, int threads, cudaStream_t stream, const Params& given) {
  static_assert(sizeof(Params) <= 32764, "kernel parameters hold no more");
  if (blocks > kMaxBlocks) {
    return cudaErrorInvalidConfiguration;
  }
#ifdef __CUDACC__
  kernel<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(given);
  return cudaGetLastError();
#else
  return launch_on_cpu(kernel, blocks, threads, stream, given);  // of the tests
#endif
}

// Division of 64-bit numbers takes many instructions; most indices have 32.
DEEPSP_HOST_DEVICE inline int64_t quotient(int64_t a, int64_t b) {
  return a <= 0xffffffffll && b <= 0xffffffffll
             ? static_cast<int64_t>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b))
             : a / b;
}

// Which of `count` items a block or warp belongs to: the last that begins at it or before. Those
// without any are found by nobody.
template <class Int>
DEEPSP_HOST_DEVICE int item_at(const Int* first, int count, int64_t at) {
  int low = 0;
  int high = count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (static_cast<int64_t>(first[middle]) <= at) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace deepsp
