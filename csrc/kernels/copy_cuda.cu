#include "copy_plan.h"

namespace deepsp {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
// Loads that are under way before the first store.
constexpr int kInFlight = 4;

// `bytes` bytes by the `lanes` threads of a group; V is 1, 2, 4, 8 or 16 bytes wide, and what is
// left behind whole V's is copied byte by byte.
template <class V>
__device__ void copy_bytes(const char* src, char* dst, int64_t bytes, int lane, int lanes) {
  const int64_t n = bytes / static_cast<int64_t>(sizeof(V));
  const V* from = reinterpret_cast<const V*>(src);
  V* to = reinterpret_cast<V*>(dst);
  int64_t i = lane;
  for (; i + (kInFlight - 1) * lanes < n; i += kInFlight * lanes) {
    V held[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      held[k] = from[i + k * lanes];
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      to[i + k * lanes] = held[k];
    }
  }
  for (; i < n; i += lanes) {
    to[i] = from[i];
  }
  for (i = n * static_cast<int64_t>(sizeof(V)) + lane; i < bytes; i += lanes) {
    dst[i] = src[i];
  }
}

// Whole V's, at most one for each lane of a piece: several pieces are under way at a time.
template <class V>
__device__ void copy_short(
    const StridedCopy& c, int64_t begin, int64_t end, int64_t vectors, int lane, int lanes) {
  const int groups = kWarp / lanes;
  const int64_t column = lane % lanes;
  if (column >= vectors) {
    return;
  }
  for (int64_t at = begin + lane / lanes; at < end; at += kInFlight * groups) {
    V held[kInFlight];
    V* to[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t row = at + k * groups;
      if (row < end) {
        const CopyPiece piece = piece_of(c, 1, row);
        held[k] = reinterpret_cast<const V*>(piece.src)[column];
        to[k] = reinterpret_cast<V*>(piece.dst) + column;
      }
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (at + k * groups < end) {
        *to[k] = held[k];
      }
    }
  }
}

// A piece whose source and target are as far from a 16-byte border, or from one of fewer bytes.
__device__ void copy_unaligned(const CopyPiece& piece, int lane, int lanes) {
  const uint64_t to = reinterpret_cast<uint64_t>(piece.dst);
  const uint64_t apart = (reinterpret_cast<uint64_t>(piece.src) ^ to) | 16;
  const auto width = static_cast<int64_t>(apart & (~apart + 1));
  const auto before = static_cast<int64_t>((~to + 1) & static_cast<uint64_t>(width - 1));
  const int64_t head = before < piece.bytes ? before : piece.bytes;
  if (lane < head) {
    piece.dst[lane] = piece.src[lane];
  }
  for (int64_t i = lane + lanes; i < head; i += lanes) {
    piece.dst[i] = piece.src[i];
  }
  const char* src = piece.src + head;
  char* dst = piece.dst + head;
  const int64_t bytes = piece.bytes - head;
  switch (width) {
    case 16:
      return copy_bytes<uint4>(src, dst, bytes, lane, lanes);
    case 8:
      return copy_bytes<uint2>(src, dst, bytes, lane, lanes);
    case 4:
      return copy_bytes<uint32_t>(src, dst, bytes, lane, lanes);
    case 2:
      return copy_bytes<uint16_t>(src, dst, bytes, lane, lanes);
    default:
      return copy_bytes<uint8_t>(src, dst, bytes, lane, lanes);
  }
}

// Pieces [begin, end) by one warp, which short ones divide into groups of lanes.
template <class V>
__device__ void copy_pieces(
    const StridedCopy& c, int pieces_of_row, int64_t begin, int64_t end, bool aligned, int lane) {
  const int64_t vectors = c.row_bytes / static_cast<int64_t>(sizeof(V));
  int lanes = kWarp;
  while (lanes > 1 && lanes / 2 >= vectors) {
    lanes /= 2;
  }
  if (aligned && vectors <= lanes && c.row_bytes % static_cast<int64_t>(sizeof(V)) == 0) {
    return copy_short<V>(c, begin, end, vectors, lane, lanes);
  }
  const int groups = kWarp / lanes;
  for (int64_t at = begin + lane / lanes; at < end; at += groups) {
    const CopyPiece piece = piece_of(c, pieces_of_row, at);
    if (aligned) {
      copy_bytes<V>(piece.src, piece.dst, piece.bytes, lane % lanes, lanes);
    } else {
      copy_unaligned(piece, lane % lanes, lanes);
    }
  }
}

__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ CopyBatch batch) {
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (warp >= batch.first_warp[batch.count]) {
    return;
  }
  const int n = item_at(batch.first_warp, batch.count, warp);
  const StridedCopy& c = batch.copies[n];
  const int pieces = batch.pieces_of_row[n];
  const int64_t begin = (warp - batch.first_warp[n]) * batch.pieces_per_warp[n];
  const int64_t all = c.n[0] * c.n[1] * c.n[2] * c.n[3] * pieces;
  const int64_t last = begin + batch.pieces_per_warp[n];
  const int64_t end = all < last ? all : last;
  switch (batch.access[n]) {
    case 16:
      return copy_pieces<uint4>(c, pieces, begin, end, true, lane);
    case 8:
      return copy_pieces<uint2>(c, pieces, begin, end, true, lane);
    case 4:
      return copy_pieces<uint32_t>(c, pieces, begin, end, true, lane);
    case 2:
      return copy_pieces<uint16_t>(c, pieces, begin, end, true, lane);
    case 1:
      return copy_pieces<uint8_t>(c, pieces, begin, end, true, lane);
    default:
      return copy_pieces<uint4>(c, pieces, begin, end, false, lane);
  }
}

}  // namespace

cudaError_t copy_rows_cuda(const std::vector<StridedCopy>& copies, cudaStream_t stream) {
  for (size_t next = 0; next < copies.size();) {
    const CopyBatch batch = next_batch(copies, next);
    if (batch.count == 0) {
      break;
    }
    const int64_t blocks = (batch.first_warp[batch.count] * kWarp + kThreads - 1) / kThreads;
    const cudaError_t error = launch(copy_kernel, blocks, kThreads, stream, batch);
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace deepsp
