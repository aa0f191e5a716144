#pragma once
// Compiles kernels as C++, with the headers of CUDA but neither nvcc nor a GPU: a launch is a loop
// over its threads. That is all that kernels need which use no shared memory, barriers or shuffles.
// A stream is a thread; the null stream runs in the caller's. Included before each .cu.

#include <cuda_runtime.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>

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

class CpuStream {
 public:
  CpuStream() : thread_([this] { work(); }) {}
  // When it has done all.
  ~CpuStream() {
    add(nullptr);
    thread_.join();
  }
  operator cudaStream_t() { return reinterpret_cast<cudaStream_t>(this); }

  void add(std::function<void()> act) {
    std::lock_guard<std::mutex> lock(mutex_);
    acts_.push_back(std::move(act));
    more_.notify_one();
  }
  // For what the other stream was given so far.
  void wait_for(CpuStream& other) {
    const auto done = std::make_shared<std::promise<void>>();
    other.add([done] { done->set_value(); });
    add([done] { done->get_future().wait(); });
  }
  void synchronize() {
    std::promise<void> done;
    add([&] { done.set_value(); });
    done.get_future().wait();
  }

 private:
  void work() {
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      more_.wait(lock, [this] { return !acts_.empty(); });
      const std::function<void()> act = std::move(acts_.front());
      acts_.pop_front();
      lock.unlock();
      if (!act) {
        return;
      }
      act();
    }
  }

  std::mutex mutex_;
  std::condition_variable more_;
  std::deque<std::function<void()>> acts_;
  std::thread thread_;
};

template <class Params>
void run_on_cpu(void (*kernel)(Params), int64_t blocks, int threads, const Params& given) {
  gridDim = dim3(static_cast<unsigned>(blocks));
  blockDim = dim3(static_cast<unsigned>(threads));
  for (int64_t block = 0; block < blocks; ++block) {
    blockIdx = {static_cast<unsigned>(block), 0, 0};
    for (int thread = 0; thread < threads; ++thread) {
      threadIdx = {static_cast<unsigned>(thread), 0, 0};
      kernel(given);
    }
  }
}

template <class Params>
cudaError_t launch_on_cpu(
    void (*kernel)(Params), int64_t blocks, int threads, cudaStream_t stream, const Params& given) {
  ++launches;
  if (stream == nullptr) {
    run_on_cpu(kernel, blocks, threads, given);
  } else {
    reinterpret_cast<CpuStream*>(stream)->add([=] { run_on_cpu(kernel, blocks, threads, given); });
  }
  return cudaSuccess;
}

}  // namespace deepsp
