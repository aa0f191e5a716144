#include "sum.h"

#include <algorithm>

#include "float16.h"
#include "stream.h"

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

constexpr int64_t kBlock = 256;  // elements that are summed at once

// Rounds to what the sum is kept in.
inline void round_to(Float within, float* total, int64_t count) {
  if (within == Float::bf16) {
    for (int64_t e = 0; e < count; ++e) {
      total[e] = BFloat16::load(BFloat16::store(total[e]));
    }
  } else if (within == Float::f16) {
    for (int64_t e = 0; e < count; ++e) {
      total[e] = Float16::load(Float16::store(total[e]));
    }
  }
}
inline void round_to(Float, double*, int64_t) {
}

template <class T, class A>
void add(A* total, const T* src, int64_t step, int64_t count) {
  if (step == 1) {  // so that it's vectorised
    for (int64_t e = 0; e < count; ++e) {
      total[e] += static_cast<A>(load(src[e]));
    }
    return;
  }
  for (int64_t e = 0; e < count; ++e) {
    total[e] += static_cast<A>(load(src[e * step]));
  }
}

// Writes elements [at, at + count) of the sum; stream: past the cache.
template <class O, class A>
void put(void* dst, int64_t at, int64_t step, const A* total, int64_t count, bool stream) {
  O* to = static_cast<O*>(dst) + at;
  if (stream) {
    O rounded[kBlock];
    put<O>(rounded, 0, 1, total, count, /*stream=*/false);
    return stream_bytes(
        reinterpret_cast<char*>(to), reinterpret_cast<const char*>(rounded), count * sizeof(O));
  }
  if (step == 1) {
    for (int64_t e = 0; e < count; ++e) {
      store(to + e, static_cast<decltype(load(O{}))>(total[e]));
    }
    return;
  }
  for (int64_t e = 0; e < count; ++e) {
    store(to + e * step, static_cast<decltype(load(O{}))>(total[e]));
  }
}

template <class A>
void put(
    Float dtype, void* dst, int64_t at, int64_t step, const A* total, int64_t count, bool stream) {
  switch (dtype) {
    case Float::f64:
      return put<double>(dst, at, step, total, count, stream);
    case Float::f32:
      return put<float>(dst, at, step, total, count, stream);
    case Float::bf16:
      return put<BFloat16>(dst, at, step, total, count, stream);
    case Float::f16:
      return put<Float16>(dst, at, step, total, count, stream);
  }
}

// A: float or double.
template <class T, class A>
void sum_range(const StridedSum& s, int64_t begin, int64_t end) {
  constexpr int kInner = kSumDims - 1;
  const int64_t step = s.dst_stride[kInner];
  const bool stream =
      step == 1 && s.n[kInner] >= kBlock && s.elements() * size_of(s.to) >= kStreamSumBytes;
  A total[kBlock];
  for (int64_t row = begin; row < end; ++row) {
    int64_t index[kInner];
    int64_t rest = row;
    for (int d = kInner - 1; d >= 0; --d) {
      index[d] = rest % s.n[d];
      rest /= s.n[d];
    }
    int64_t dst = 0;
    for (int d = 0; d < kInner; ++d) {
      dst += index[d] * s.dst_stride[d];
    }
    for (int64_t first = 0; first < s.n[kInner]; first += kBlock) {
      const int64_t count = std::min(kBlock, s.n[kInner] - first);
      std::fill_n(total, count, A(-0.0));  // unlike 0, it leaves -0 as it is
      for (const SumSource& source : s.sources) {
        const int64_t src_step = source.stride[kInner];
        const T* src = static_cast<const T*>(source.data) + first * src_step;
        for (int d = 0; d < kInner; ++d) {
          src += index[d] * source.stride[d];
        }
        add(total, src, src_step, count);
        round_to(s.within, total, count);
      }
      put(s.to, s.dst, dst + first * step, step, total, count, stream);
    }
  }
  if (stream) {
    finish_streaming();
  }
}

template <class T>
void sum_in(const StridedSum& s, int64_t begin, int64_t end) {
  s.within == Float::f64 ? sum_range<T, double>(s, begin, end) : sum_range<T, float>(s, begin, end);
}

}  // namespace

void sum_rows_cpu(const StridedSum& sum, int64_t begin, int64_t end) {
  switch (sum.dtype) {
    case Float::f64:
      return sum_in<double>(sum, begin, end);
    case Float::f32:
      return sum_in<float>(sum, begin, end);
    case Float::bf16:
      return sum_in<BFloat16>(sum, begin, end);
    case Float::f16:
      return sum_in<Float16>(sum, begin, end);
  }
}

}  // namespace deepsp
