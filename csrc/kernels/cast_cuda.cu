#include "cast.h"
#include "float_cuda.h"
#include "launch_cuda.h"

namespace deepsp {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxCasts = 512;
// Elements that one block takes.
constexpr int64_t kPerBlock = int64_t(kThreads) * kVector * 4;

struct Batch {
  int count;
  int64_t first_block[kMaxCasts + 1];  // of each cast; the last: their number
  const void* src[kMaxCasts];
  void* dst[kMaxCasts];
  int64_t elements[kMaxCasts];
  uint8_t kind[kMaxCasts];  // from * 4 + to, and kAligned
};

constexpr int kAligned = 16;

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
      const Pack<From> in = read_pack(from + begin + v * kVector);
      Pack<To> out;
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        out.items[e] = round_to<To>(load(in.items[e]));
      }
      write_pack(to + begin + v * kVector, out);
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
  const int n = item_at(batch.first_block, batch.count, blockIdx.x);
  const int64_t begin = (static_cast<int64_t>(blockIdx.x) - batch.first_block[n]) * kPerBlock;
  const int64_t end = batch.elements[n] < begin + kPerBlock ? batch.elements[n] : begin + kPerBlock;
  const bool aligned = batch.kind[n] & kAligned;
  const int to = batch.kind[n] & 3;
  const void* src = batch.src[n];
  void* dst = batch.dst[n];
  switch (static_cast<Float>((batch.kind[n] >> 2) & 3)) {
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
      batch.first_block[n + 1] = batch.first_block[n] + (cast.count + kPerBlock - 1) / kPerBlock;
    }
    if (batch.count == 0) {
      break;
    }
    const cudaError_t error =
        launch(cast_kernel, batch.first_block[batch.count], kThreads, stream, batch);
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace deepsp
