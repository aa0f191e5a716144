#pragma once
// Compiles kernels as C++, with the headers of CUDA but neither nvcc nor a GPU: a launch is a loop
// over its threads. That is all that kernels need which use no shared memory, barriers or shuffles.
// Included before each .cu.

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>

#ifndef __grid_constant__
#define __grid_constant__
#endif
#undef __launch_bounds__
#define __launch_bounds__(...)

inline thread_local uint3 threadIdx, blockIdx;
inline thread_local dim3 gridDim, blockDim;

namespace deepsp {

// Launches of this thread since it was last set to 0.
inline thread_local int launches = 0;

template <class Params>
cudaError_t launch_on_cpu(
    void (*kernel)(Params), int64_t blocks, int threads, const Params& given) {
  ++launches;
  gridDim = dim3(static_cast<unsigned>(blocks));
  blockDim = dim3(static_cast<unsigned>(threads));
  for (int64_t block = 0; block < blocks; ++block) {
    blockIdx = {static_cast<unsigned>(block), 0, 0};
    for (int thread = 0; thread < threads; ++thread) {
      threadIdx = {static_cast<unsigned>(thread), 0, 0};
      kernel(given);
    }
  }
  return cudaSuccess;
}

}  // namespace deepsp
