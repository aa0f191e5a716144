#include "cast.h"

#include <algorithm>

#include "float_cuda.h"

namespace deepsp {
namespace {

constexpr int kThreads = 256;
// Kernel parameters hold 32 KiB since CUDA 12.1 (sm_70).
constexpr int kMaxCasts = 512;
// Elements that one thread takes at once: 16 bytes of a 16-bit dtype.
constexpr int kVector = 8;
// Elements that one block takes.
constexpr int64_t kPerBlock = int64_t(kThreads) * kVector * 4;

struct Batch {
  int count;
  uint32_t first_block[kMaxCasts + 1];  // of each cast; the last: their number
  const void* src[kMaxCasts];
  void* dst[kMaxCasts];
  int64_t elements[kMaxCasts];
  uint8_t kind[kMaxCasts];  // from * 4 + to, and kAligned
};

constexpr int kAligned = 16;

static_assert(sizeof(Batch) <= 32764, "kernel parameters hold no more");

// 16 bytes at a time, whatever the dtype: a struct of bfloat16 would be stored by fours.
template <class T>
union Pack {
  static constexpr int kWords = static_cast<int>(kVector * sizeof(T) / 16);
  uint4 words[kWords];
  T items[kVector];
  __device__ Pack() {}
};

template <class From, class To>
__device__ void cast_block(
    const void* src, void* dst, int64_t begin, int64_t end, bool aligned, int thread) {
  const From* from = static_cast<const From*>(src);
  To* to = static_cast<To*>(dst);
  int64_t i = begin;
  if (aligned) {
    const int64_t vectors = (end - begin) / kVector;
#pragma unroll 4
    for (int64_t v = thread; v < vectors; v += kThreads) {
      Pack<From> in;
      Pack<To> out;
      const uint4* read = reinterpret_cast<const uint4*>(from + begin + v * kVector);
      uint4* write = reinterpret_cast<uint4*>(to + begin + v * kVector);
#pragma unroll
      for (int w = 0; w < Pack<From>::kWords; ++w) {
        in.words[w] = read[w];
      }
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        out.items[e] = round_to<To>(load(in.items[e]));
      }
#pragma unroll
      for (int w = 0; w < Pack<To>::kWords; ++w) {
        write[w] = out.words[w];
      }
    }
    i = begin + vectors * kVector;
  }
  for (i += thread; i < end; i += kThreads) {
    to[i] = round_to<To>(load(from[i]));
  }
}

template <class From>
__device__ void cast_from(
    int to, const void* src, void* dst, int64_t begin, int64_t end, bool aligned, int thread) {
  switch (static_cast<Float>(to)) {
    case Float::f64:
      return cast_block<From, double>(src, dst, begin, end, aligned, thread);
    case Float::f32:
      return cast_block<From, float>(src, dst, begin, end, aligned, thread);
    case Float::bf16:
      return cast_block<From, __nv_bfloat16>(src, dst, begin, end, aligned, thread);
    case Float::f16:
      return cast_block<From, __half>(src, dst, begin, end, aligned, thread);
  }
}

__global__ void __launch_bounds__(kThreads) cast_kernel(const __grid_constant__ Batch batch) {
  // The last cast that begins at this block or before.
  int low = 0;
  int high = batch.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (batch.first_block[middle] <= blockIdx.x) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int64_t begin = (blockIdx.x - batch.first_block[low]) * kPerBlock;
  const int64_t end = min(batch.elements[low], begin + kPerBlock);
  const bool aligned = batch.kind[low] & kAligned;
  const int to = batch.kind[low] & 3;
  const void* src = batch.src[low];
  void* dst = batch.dst[low];
  switch (static_cast<Float>((batch.kind[low] >> 2) & 3)) {
    case Float::f64:
      return cast_from<double>(to, src, dst, begin, end, aligned, threadIdx.x);
    case Float::f32:
      return cast_from<float>(to, src, dst, begin, end, aligned, threadIdx.x);
    case Float::bf16:
      return cast_from<__nv_bfloat16>(to, src, dst, begin, end, aligned, threadIdx.x);
    case Float::f16:
      return cast_from<__half>(to, src, dst, begin, end, aligned, threadIdx.x);
  }
}

}  // namespace

cudaError_t cast_cuda(const std::vector<Cast>& casts, cudaStream_t stream) {
  size_t next = 0;
  while (next < casts.size()) {
    Batch batch = {};
    for (; next < casts.size() && batch.count < kMaxCasts; ++next) {
      const Cast& cast = casts[next];
      if (cast.count == 0) {
        continue;
      }
      const int n = batch.count++;
      batch.src[n] = cast.src;
      batch.dst[n] = cast.dst;
      batch.elements[n] = cast.count;
      const bool aligned =
          ((reinterpret_cast<uint64_t>(cast.src) | reinterpret_cast<uint64_t>(cast.dst)) & 15) == 0;
      batch.kind[n] = static_cast<uint8_t>(
          static_cast<int>(cast.from) * 4 + static_cast<int>(cast.to) + (aligned ? kAligned : 0));
      batch.first_block[n + 1] =
          batch.first_block[n] + static_cast<uint32_t>((cast.count + kPerBlock - 1) / kPerBlock);
    }
    if (batch.count == 0) {
      break;
    }
    cast_kernel<<<batch.first_block[batch.count], kThreads, 0, stream>>>(batch);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace deepsp
