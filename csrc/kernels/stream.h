#pragma once
// Writing past the cache.

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace deepsp {

// Copies, and sums, of this size and more bypass the cache, which saves reading every line first:
// another core reads a copy, or this one much later; a sum may be read at once. Measured:
// benchmarks/results/transport.md.
constexpr int64_t kStreamBytes = int64_t(64) << 10;
constexpr int64_t kStreamSumBytes = int64_t(1) << 20;

#if defined(__SSE2__)
inline void stream_bytes(char* dst, const char* src, int64_t bytes) {
  int64_t at = -reinterpret_cast<intptr_t>(dst) & 15;
  at = at < bytes ? at : bytes;
  std::memcpy(dst, src, at);
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

// Must be called before others are told that the data is there.
inline void finish_streaming() {
  _mm_sfence();
}
#else
inline void stream_bytes(char* dst, const char* src, int64_t bytes) {
  std::memcpy(dst, src, bytes);
}

inline void finish_streaming() {
}
#endif

}  // namespace deepsp
