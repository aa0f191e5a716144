#include "copy.h"

#include <algorithm>
#include <cstring>

#include "stream.h"

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

void add_within(
    const StridedCopy& copy,
    const char* begin,
    int64_t bytes,
    char* to,
    std::vector<StridedCopy>& parts) {
  int outer = kCopyDims;  // the dimension of the largest steps; kCopyDims: a single row
  int64_t extent = copy.row_bytes;
  for (int d = 0; d < kCopyDims; ++d) {
    extent += (copy.n[d] - 1) * copy.dst_stride[d];
    if (copy.n[d] > 1 && (outer == kCopyDims || copy.dst_stride[d] > copy.dst_stride[outer])) {
      outer = d;
    }
  }
  const int64_t at = copy.dst - begin;
  const int64_t first = std::max<int64_t>(-at, 0), last = std::min(bytes - at, extent);
  if (copy.bytes() == 0 || first >= last) {
    return;
  }
  StridedCopy part = copy;
  if (last - first == extent || outer == kCopyDims) {
    part.src += first;
    part.dst = to + at + first;
    part.row_bytes = outer == kCopyDims ? last - first : copy.row_bytes;
    parts.push_back(part);
    return;
  }
  // The index that a border crosses, and those on both sides of it.
  const int64_t step = copy.dst_stride[outer], border = first > 0 ? first : last;
  const int64_t crossed = std::min(border / step, copy.n[outer] - 1);
  const int64_t cuts[] = {0, crossed, crossed + 1, copy.n[outer]};
  for (int i = 0; i < 3; ++i) {
    part.src = copy.src + cuts[i] * copy.src_stride[outer];
    part.dst = copy.dst + cuts[i] * step;
    part.n[outer] = cuts[i + 1] - cuts[i];
    add_within(part, begin, bytes, to, parts);
  }
}

namespace {

// Shorter rows don't fill whole lines often enough.
constexpr int64_t kStreamRowBytes = 128;

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
        stream_bytes(dst, src, c.row_bytes);
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
