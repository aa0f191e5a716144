#include "copy.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace deepsp {

StridedCopy coalesce(const StridedCopy& copy) {
  StridedCopy out = copy;
  int64_t n[kCopyDims], src[kCopyDims], dst[kCopyDims];
  int dims = 0;  // innermost first
  for (int d = kCopyDims - 1; d >= 0; --d) {
    if (copy.n[d] == 1) {
      continue;
    }
    if (dims == 0 && copy.src_stride[d] == out.row_bytes && copy.dst_stride[d] == out.row_bytes) {
      out.row_bytes *= copy.n[d];
    } else if (
        dims > 0 && copy.src_stride[d] == n[dims - 1] * src[dims - 1] &&
        copy.dst_stride[d] == n[dims - 1] * dst[dims - 1]) {
      n[dims - 1] *= copy.n[d];
    } else {
      n[dims] = copy.n[d];
      src[dims] = copy.src_stride[d];
      dst[dims] = copy.dst_stride[d];
      ++dims;
    }
  }
  for (int d = 0; d < kCopyDims; ++d) {
    const int from = kCopyDims - 1 - d;
    out.n[d] = from < dims ? n[from] : 1;
    out.src_stride[d] = from < dims ? src[from] : 0;
    out.dst_stride[d] = from < dims ? dst[from] : 0;
  }
  return out;
}

namespace {

// From here on, what is written won't be in the cache when it is read, and
// stores that bypass it save reading every line first.
constexpr int64_t kStreamBytes = int64_t(1) << 20;
// Shorter rows don't fill whole lines often enough.
constexpr int64_t kStreamRowBytes = 256;

#if defined(__SSE2__)
void stream_row(char* dst, const char* src, int64_t bytes) {
  const int64_t head = -reinterpret_cast<intptr_t>(dst) & 15;
  std::memcpy(dst, src, head);
  int64_t at = head;
  for (; at + 64 <= bytes; at += 64) {
    const auto* from = reinterpret_cast<const __m128i*>(src + at);
    auto* to = reinterpret_cast<__m128i*>(dst + at);
    const __m128i a = _mm_loadu_si128(from);
    const __m128i b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2);
    const __m128i d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  std::memcpy(dst + at, src + at, bytes - at);
}

void finish_streaming() {
  _mm_sfence();
}
#else
void stream_row(char* dst, const char* src, int64_t bytes) {
  std::memcpy(dst, src, bytes);
}

void finish_streaming() {
}
#endif

constexpr int kAnyRow = 0;
constexpr int kStream = -1;

// ROW: the row's bytes where they are known at compile time, or one of the above.
template <int ROW>
void copy_range(const StridedCopy& c, int64_t begin, int64_t end) {
  int64_t i[kCopyDims];
  int64_t rest = begin;
  for (int d = kCopyDims - 1; d >= 0; --d) {
    i[d] = rest % c.n[d];
    rest /= c.n[d];
  }
  constexpr int kInner = kCopyDims - 1;
  for (int64_t row = begin; row < end;) {
    const char* src = c.src;
    char* dst = c.dst;
    for (int d = 0; d < kCopyDims; ++d) {
      src += i[d] * c.src_stride[d];
      dst += i[d] * c.dst_stride[d];
    }
    const int64_t run = std::min(c.n[kInner] - i[kInner], end - row);
    for (int64_t k = 0; k < run; ++k) {
      if constexpr (ROW == kStream) {
        stream_row(dst, src, c.row_bytes);
      } else {
        std::memcpy(dst, src, ROW == kAnyRow ? c.row_bytes : ROW);
      }
      src += c.src_stride[kInner];
      dst += c.dst_stride[kInner];
    }
    row += run;
    i[kInner] += run;
    for (int d = kInner; d > 0 && i[d] == c.n[d]; --d) {
      i[d] = 0;
      ++i[d - 1];
    }
  }
}

}  // namespace

void copy_rows_cpu(const StridedCopy& copy, int64_t begin, int64_t end) {
  switch (copy.row_bytes) {
    case 1:
      return copy_range<1>(copy, begin, end);
    case 2:
      return copy_range<2>(copy, begin, end);
    case 4:
      return copy_range<4>(copy, begin, end);
    case 8:
      return copy_range<8>(copy, begin, end);
    case 16:
      return copy_range<16>(copy, begin, end);
    default:
      break;
  }
  if (copy.row_bytes >= kStreamRowBytes && copy.bytes() >= kStreamBytes) {
    copy_range<kStream>(copy, begin, end);
    finish_streaming();
  } else {
    copy_range<kAnyRow>(copy, begin, end);
  }
}

}  // namespace deepsp
