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

// Elements that one thread takes at once: 16 bytes of a 16-bit dtype.
constexpr int kVector = 8;

// 16 bytes at a time, whatever the dtype: a struct of bfloat16 would be moved by fours.
template <class T>
union Pack {
  static constexpr int kWords = static_cast<int>(kVector * sizeof(T) / 16);
  uint4 words[kWords];
  T items[kVector];
  __device__ Pack() {}
};

template <class T>
__device__ Pack<T> read_pack(const T* from) {
  Pack<T> pack;
  const uint4* words = reinterpret_cast<const uint4*>(from);
#pragma unroll
  for (int w = 0; w < Pack<T>::kWords; ++w) {
    pack.words[w] = words[w];
  }
  return pack;
}

template <class T>
__device__ void write_pack(T* to, const Pack<T>& pack) {
  uint4* words = reinterpret_cast<uint4*>(to);
#pragma unroll
  for (int w = 0; w < Pack<T>::kWords; ++w) {
    words[w] = pack.words[w];
  }
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
