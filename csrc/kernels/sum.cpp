#include "sum.h"

#include <algorithm>
#include <type_traits>

#include "float16.h"
#include "stream.h"

namespace deepsp {
namespace {

template <class T>
auto load(T x) {
  if constexpr (std::is_floating_point_v<T>) {
    return x;
  } else {
    return T::load(x);
  }
}

template <class T, class A>
T rounded(A x) {
  if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(x);
  } else {
    return T::store(static_cast<float>(x));
  }
}

// Calls visit with a value of the type that holds a dtype.
template <class Visit>
void with_type(Float dtype, const Visit& visit) {
  switch (dtype) {
    case Float::f64:
      return visit(double());
    case Float::f32:
      return visit(float());
    case Float::bf16:
      return visit(BFloat16());
    case Float::f16:
      return visit(Float16());
  }
}

constexpr int64_t kBlock = 256;  // elements that are summed at once

// Rounds to the dtype that the sum is kept in.
template <class A>
void round_to(Float within, A* total, int64_t count) {
  if (within == Float::f64 || within == Float::f32) {
    return;
  }
  with_type(within, [&](auto kept) {
    for (int64_t e = 0; e < count; ++e) {
      total[e] = static_cast<A>(load(rounded<decltype(kept)>(total[e])));
    }
  });
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
    O block[kBlock];
    put<O>(block, 0, 1, total, count, /*stream=*/false);
    return stream_bytes(
        reinterpret_cast<char*>(to), reinterpret_cast<const char*>(block), count * sizeof(O));
  }
  if (step == 1) {
    for (int64_t e = 0; e < count; ++e) {
      to[e] = rounded<O>(total[e]);
    }
    return;
  }
  for (int64_t e = 0; e < count; ++e) {
    to[e * step] = rounded<O>(total[e]);
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
      with_type(s.to, [&](auto to) {
        put<decltype(to)>(s.dst, dst + first * step, step, total, count, stream);
      });
    }
  }
  if (stream) {
    finish_streaming();
  }
}

}  // namespace

void sum_rows_cpu(const StridedSum& sum, int64_t begin, int64_t end) {
  with_type(sum.dtype, [&](auto type) {
    using T = decltype(type);
    sum.within == Float::f64 ? sum_range<T, double>(sum, begin, end)
                             : sum_range<T, float>(sum, begin, end);
  });
}

}  // namespace deepsp
