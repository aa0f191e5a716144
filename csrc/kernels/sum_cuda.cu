#include "sum.h"

#include <algorithm>

#include "float_cuda.h"

namespace deepsp {
namespace {

constexpr int kThreads = 256;

struct Params {
  void* dst;
  Float to;
  Float within;
  int64_t n[kSumDims];
  int64_t dst_stride[kSumDims];
  int count;
  SumSource sources[kMaxSumSources];
};

static_assert(sizeof(Params) <= 32764, "kernel parameters hold no more");

template <class A>
__device__ void store(Float dtype, void* dst, int64_t at, A x) {
  switch (dtype) {
    case Float::f64:
      static_cast<double*>(dst)[at] = round_to<double>(x);
      break;
    case Float::f32:
      static_cast<float*>(dst)[at] = round_to<float>(x);
      break;
    case Float::bf16:
      static_cast<__nv_bfloat16*>(dst)[at] = round_to<__nv_bfloat16>(x);
      break;
    case Float::f16:
      static_cast<__half*>(dst)[at] = round_to<__half>(x);
      break;
  }
}

template <class A>
__device__ A kept_in(Float within, A x) {
  if (within == Float::bf16) {
    return static_cast<A>(load(round_to<__nv_bfloat16>(x)));
  }
  if (within == Float::f16) {
    return static_cast<A>(load(round_to<__half>(x)));
  }
  return x;
}

template <class T, class A>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ Params p) {
  const int64_t total = p.n[0] * p.n[1] * p.n[2] * p.n[3];
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t e = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; e < total;
       e += step) {
    int64_t index[kSumDims];
    int64_t rest = e;
#pragma unroll
    for (int d = kSumDims - 1; d >= 0; --d) {
      index[d] = rest % p.n[d];
      rest /= p.n[d];
    }
    A sum = -0.0;  // unlike 0, it leaves -0 as it is
    for (int s = 0; s < p.count; ++s) {
      int64_t at = 0;
#pragma unroll
      for (int d = 0; d < kSumDims; ++d) {
        at += index[d] * p.sources[s].stride[d];
      }
      sum = kept_in(
          p.within, sum + static_cast<A>(load(static_cast<const T*>(p.sources[s].data)[at])));
    }
    int64_t to = 0;
#pragma unroll
    for (int d = 0; d < kSumDims; ++d) {
      to += index[d] * p.dst_stride[d];
    }
    store(p.to, p.dst, to, sum);
  }
}

template <class T>
void launch(const Params& params, int64_t elements, cudaStream_t stream) {
  const int64_t blocks = std::min<int64_t>((elements + kThreads - 1) / kThreads, 1 << 16);
  if (params.within == Float::f64) {
    sum_kernel<T, double><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
  } else {
    sum_kernel<T, float><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
  }
}

}  // namespace

cudaError_t sum_rows_cuda(const StridedSum& sum, cudaStream_t stream) {
  if (sum.elements() == 0) {
    return cudaSuccess;
  }
  if (sum.sources.size() > kMaxSumSources) {
    return cudaErrorInvalidValue;
  }
  Params params = {};
  params.dst = sum.dst;
  params.to = sum.to;
  params.within = sum.within;
  std::copy_n(sum.n, kSumDims, params.n);
  std::copy_n(sum.dst_stride, kSumDims, params.dst_stride);
  params.count = static_cast<int>(sum.sources.size());
  std::copy(sum.sources.begin(), sum.sources.end(), params.sources);
  switch (sum.dtype) {
    case Float::f64:
      launch<double>(params, sum.elements(), stream);
      break;
    case Float::f32:
      launch<float>(params, sum.elements(), stream);
      break;
    case Float::bf16:
      launch<__nv_bfloat16>(params, sum.elements(), stream);
      break;
    case Float::f16:
      launch<__half>(params, sum.elements(), stream);
      break;
  }
  return cudaGetLastError();
}

}  // namespace deepsp
