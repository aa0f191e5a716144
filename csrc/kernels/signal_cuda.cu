#include "launch_cuda.h"
#include "signal.h"

#include <cstdio>
#include <thread>

namespace deepsp {
namespace {

__device__ void set(uint64_t* word, uint64_t value) {
#ifdef __CUDA_ARCH__
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#else
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

__device__ uint64_t get(const uint64_t* word) {
#ifdef __CUDA_ARCH__
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}

__device__ uint64_t nanoseconds() {
#ifdef __CUDA_ARCH__
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
#else
  std::this_thread::yield();  // in the tests, streams share cores
  return 0;
#endif
}

__global__ void __launch_bounds__(kMostSignals)
    set_kernel(const __grid_constant__ Signals signals) {
#ifdef __CUDA_ARCH__
  __threadfence_system();
#endif
  if (static_cast<int>(threadIdx.x) < signals.count) {
    set(signals.words[threadIdx.x], signals.value);
  }
}

struct Awaited {
  Signals signals;
  uint64_t most_ns;
};

__global__ void __launch_bounds__(kMostSignals)
    wait_kernel(const __grid_constant__ Awaited awaited) {
  const Signals& signals = awaited.signals;
  if (static_cast<int>(threadIdx.x) >= signals.count) {
    return;
  }
  const uint64_t begin = nanoseconds();
  while (get(signals.words[threadIdx.x]) < signals.value) {
    if (nanoseconds() - begin > awaited.most_ns) {
      printf(
          "deepsp: exchange %llu: nothing came from rank %d of the group within its timeout\n",
          static_cast<unsigned long long>(signals.value), static_cast<int>(threadIdx.x));
#ifdef __CUDA_ARCH__
      __trap();
#endif
    }
  }
}

}  // namespace

cudaError_t set_signals_cuda(const Signals& signals, cudaStream_t stream) {
  return launch(set_kernel, 1, signals.count, stream, signals);
}

cudaError_t wait_signals_cuda(const Signals& signals, uint64_t most_ns, cudaStream_t stream) {
  return launch(wait_kernel, 1, signals.count, stream, Awaited{signals, most_ns});
}

}  // namespace deepsp
