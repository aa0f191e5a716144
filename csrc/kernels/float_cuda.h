#pragma once
// Floating dtypes in device code: loaded as what sums are taken in, and rounded to nearest even.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace deepsp {

__device__ inline float load(float x) {
  return x;
}
__device__ inline double load(double x) {
  return x;
}
__device__ inline float load(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
__device__ inline float load(__half x) {
  return __half2float(x);
}

// To 16 bits by way of float32, as Tensor.to goes.
template <class To, class X>
__device__ To round_to(X x) {
  if constexpr (std::is_same_v<To, __half>) {
    return __float2half_rn(static_cast<float>(x));
  } else if constexpr (std::is_same_v<To, __nv_bfloat16>) {
    return __float2bfloat16_rn(static_cast<float>(x));
  } else {
    return static_cast<To>(x);
  }
}

}  // namespace deepsp
