#include "sum.h"

#include <algorithm>

#include "float16.h"

namespace deepsp {
namespace {

inline float load(float x) {
  return x;
}
inline double load(double x) {
  return x;
}
inline float load(BFloat16 x) {
  return BFloat16::load(x);
}
inline float load(Float16 x) {
  return Float16::load(x);
}
inline void store(float* to, float x) {
  *to = x;
}
inline void store(double* to, double x) {
  *to = x;
}
inline void store(BFloat16* to, float x) {
  *to = BFloat16::store(x);
}
inline void store(Float16* to, float x) {
  *to = Float16::store(x);
}

template <class T>
void sum_range(const StridedSum& s, int64_t begin, int64_t end) {
  constexpr int kInner = kSumDims - 1;
  constexpr int64_t kBlock = 256;
  decltype(load(T{})) total[kBlock];
  for (int64_t row = begin; row < end; ++row) {
    int64_t index[kInner];
    int64_t rest = row;
    for (int d = kInner - 1; d >= 0; --d) {
      index[d] = rest % s.n[d];
      rest /= s.n[d];
    }
    T* dst = static_cast<T*>(s.dst);
    for (int d = 0; d < kInner; ++d) {
      dst += index[d] * s.dst_stride[d];
    }
    for (int64_t first = 0; first < s.n[kInner]; first += kBlock) {
      const int64_t count = std::min(kBlock, s.n[kInner] - first);
      std::fill_n(total, count, 0);
      for (const SumSource& source : s.sources) {
        const int64_t step = source.stride[kInner];
        const T* src = static_cast<const T*>(source.data) + first * step;
        for (int d = 0; d < kInner; ++d) {
          src += index[d] * source.stride[d];
        }
        for (int64_t e = 0; e < count; ++e) {
          total[e] += load(src[e * step]);
        }
      }
      for (int64_t e = 0; e < count; ++e) {
        store(dst + (first + e) * s.dst_stride[kInner], total[e]);
      }
    }
  }
}

}  // namespace

void sum_rows_cpu(const StridedSum& sum, int64_t begin, int64_t end) {
  switch (sum.dtype) {
    case Float::f64:
      return sum_range<double>(sum, begin, end);
    case Float::f32:
      return sum_range<float>(sum, begin, end);
    case Float::bf16:
      return sum_range<BFloat16>(sum, begin, end);
    case Float::f16:
      return sum_range<Float16>(sum, begin, end);
  }
}

}  // namespace deepsp
