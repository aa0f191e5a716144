#pragma once
// How copies are dealt out to the warps of a launch: integer arithmetic only.

#include "copy.h"
#include "launch_cuda.h"

#include <algorithm>
#include <cstddef>

namespace deepsp {

constexpr int kMaxCopies = 128;
// What one warp moves: enough that finding its place costs little, so little that 4 MiB keep a GPU
// busy. Longer rows are cut.
constexpr int64_t kBytesPerWarp = 4 << 10;
// From here on it pays to copy the bytes before and behind what is aligned on their own.
constexpr int64_t kLongRow = 64;

struct CopyBatch {
  int count;
  int64_t first_warp[kMaxCopies + 1];  // of each copy; the last: their number
  int32_t pieces_of_row[kMaxCopies];   // of kBytesPerWarp each, but for the last one
  int32_t pieces_per_warp[kMaxCopies];
  int32_t access[kMaxCopies];  // bytes that are moved at once; kUnaligned: each piece tells
  StridedCopy copies[kMaxCopies];
};

constexpr int kUnaligned = 0;

// Some bytes that lie together.
struct CopyPiece {
  const char* src;
  char* dst;
  int64_t bytes;
};

// Piece number `at` of a copy, rows in order.
DEEPSP_HOST_DEVICE inline CopyPiece piece_of(const StridedCopy& c, int pieces_of_row, int64_t at) {
  CopyPiece piece{c.src, c.dst, c.row_bytes};
  int64_t rest = at;
  if (pieces_of_row > 1) {
    const int64_t row = quotient(at, pieces_of_row);
    const int64_t begin = (at - row * pieces_of_row) * kBytesPerWarp;
    piece.src += begin;
    piece.dst += begin;
    piece.bytes = c.row_bytes - begin < kBytesPerWarp ? c.row_bytes - begin : kBytesPerWarp;
    rest = row;
  }
#ifdef __CUDACC__
#pragma unroll
#endif
  for (int d = kCopyDims - 1; d >= 0; --d) {
    if (c.n[d] > 1) {
      const int64_t next = quotient(rest, c.n[d]);
      const int64_t i = rest - next * c.n[d];
      piece.src += i * c.src_stride[d];
      piece.dst += i * c.dst_stride[d];
      rest = next;
    }
  }
  return piece;
}

// Bytes that one access may have: a power of 2 up to 16 that divides all of `bits`.
inline int lowest_bit(uint64_t bits) {
  bits |= 16;
  return static_cast<int>(bits & (~bits + 1));
}

inline int access_of(const StridedCopy& c) {
  uint64_t bits = reinterpret_cast<uint64_t>(c.src) | reinterpret_cast<uint64_t>(c.dst);
  for (int d = 0; d < kCopyDims; ++d) {
    if (c.n[d] > 1) {
      bits |= static_cast<uint64_t>(c.src_stride[d]) | static_cast<uint64_t>(c.dst_stride[d]);
    }
  }
  const int aligned = lowest_bit(bits);
  if (c.row_bytes < kLongRow) {
    return lowest_bit(bits | static_cast<uint64_t>(c.row_bytes));
  }
  return aligned == 16 ? 16 : kUnaligned;
}

// The next copies of a list, from `next` on: as many as one launch takes.
inline CopyBatch next_batch(const std::vector<StridedCopy>& copies, size_t& next) {
  CopyBatch batch = {};
  for (; next < copies.size() && batch.count < kMaxCopies; ++next) {
    const StridedCopy& c = copies[next];
    if (c.bytes() == 0) {
      continue;
    }
    const int64_t pieces = (c.row_bytes + kBytesPerWarp - 1) / kBytesPerWarp;
    const int64_t per_warp = std::max<int64_t>(1, kBytesPerWarp / c.row_bytes);
    const int64_t warps = (c.rows() * pieces + per_warp - 1) / per_warp;
    const int n = batch.count++;
    batch.copies[n] = c;
    batch.pieces_of_row[n] = static_cast<int32_t>(pieces);
    batch.pieces_per_warp[n] = static_cast<int32_t>(per_warp);
    batch.access[n] = access_of(c);
    batch.first_warp[n + 1] = batch.first_warp[n] + warps;
  }
  return batch;
}

}  // namespace deepsp
