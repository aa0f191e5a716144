#include "copy.h"

#include <algorithm>

namespace deepsp {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
// Kernel parameters hold 32 KiB since CUDA 12.1 (sm_70).
constexpr int kMaxCopies = 128;
// Bytes that one warp moves: enough that finding its place costs little.
constexpr int64_t kBytesPerWarp = 16 << 10;

struct Batch {
  int count;
  int64_t first_warp[kMaxCopies + 1];  // of each copy; the last: their number
  int64_t rows_per_warp[kMaxCopies];
  int vector_bytes[kMaxCopies];  // the widest access that all its addresses allow
  StridedCopy copies[kMaxCopies];
};

static_assert(sizeof(Batch) <= 32764, "kernel parameters hold no more");

// One row, by the `lanes` threads of a group; V is 1, 2, 4, 8 or 16 bytes wide.
template <class V>
__device__ void copy_row(const char* src, char* dst, int64_t row_bytes, int lane, int lanes) {
  const int64_t n = row_bytes / static_cast<int64_t>(sizeof(V));
  const V* from = reinterpret_cast<const V*>(src);
  V* to = reinterpret_cast<V*>(dst);
  int64_t i = lane;
  // Several loads in flight before the first store.
  for (; i + 3 * lanes < n; i += 4 * lanes) {
    const V a = from[i];
    const V b = from[i + lanes];
    const V c = from[i + 2 * lanes];
    const V d = from[i + 3 * lanes];
    to[i] = a;
    to[i + lanes] = b;
    to[i + 2 * lanes] = c;
    to[i + 3 * lanes] = d;
  }
  for (; i < n; i += lanes) {
    to[i] = from[i];
  }
}

// Rows [begin, end) by one warp, which short rows divide into groups of lanes.
template <class V>
__device__ void copy_rows(const StridedCopy& c, int64_t begin, int64_t end, int lane) {
  const int64_t vectors = c.row_bytes / static_cast<int64_t>(sizeof(V));
  int lanes = kWarp;
  while (lanes > 1 && lanes / 2 >= vectors) {
    lanes /= 2;
  }
  const int groups = kWarp / lanes;
  for (int64_t row = begin + lane / lanes; row < end; row += groups) {
    int64_t rest = row;
    const char* src = c.src;
    char* dst = c.dst;
#pragma unroll
    for (int d = kCopyDims - 1; d >= 0; --d) {
      const int64_t n = c.n[d];
      if (n > 1) {
        const int64_t next =
            rest <= 0xffffffffll && n <= 0xffffffffll
                ? static_cast<int64_t>(static_cast<uint32_t>(rest) / static_cast<uint32_t>(n))
                : rest / n;
        const int64_t i = rest - next * n;
        src += i * c.src_stride[d];
        dst += i * c.dst_stride[d];
        rest = next;
      }
    }
    copy_row<V>(src, dst, c.row_bytes, lane % lanes, lanes);
  }
}

__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ Batch batch) {
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (warp >= batch.first_warp[batch.count]) {
    return;
  }
  // The last copy that begins at this warp or before.
  int low = 0;
  int high = batch.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (batch.first_warp[middle] <= warp) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const StridedCopy& c = batch.copies[low];
  const int64_t begin = (warp - batch.first_warp[low]) * batch.rows_per_warp[low];
  const int64_t rows = c.n[0] * c.n[1] * c.n[2] * c.n[3];
  const int64_t end = min(rows, begin + batch.rows_per_warp[low]);
  switch (batch.vector_bytes[low]) {
    case 16:
      return copy_rows<uint4>(c, begin, end, lane);
    case 8:
      return copy_rows<uint2>(c, begin, end, lane);
    case 4:
      return copy_rows<uint32_t>(c, begin, end, lane);
    case 2:
      return copy_rows<uint16_t>(c, begin, end, lane);
    default:
      return copy_rows<uint8_t>(c, begin, end, lane);
  }
}

int widest_access(const StridedCopy& c) {
  uint64_t bits = reinterpret_cast<uint64_t>(c.src) | reinterpret_cast<uint64_t>(c.dst) |
                  static_cast<uint64_t>(c.row_bytes) | 16;
  for (int d = 0; d < kCopyDims; ++d) {
    if (c.n[d] > 1) {
      bits |= static_cast<uint64_t>(c.src_stride[d]) | static_cast<uint64_t>(c.dst_stride[d]);
    }
  }
  return static_cast<int>(bits & (~bits + 1));
}

// A long row is cut, so that one warp doesn't copy it alone.
StridedCopy with_shorter_rows(const StridedCopy& c) {
  StridedCopy cut = c;
  int64_t pieces = c.row_bytes / kBytesPerWarp;
  while (pieces > 1 && (c.row_bytes % pieces != 0 || (c.row_bytes / pieces) % 16 != 0)) {
    --pieces;
  }
  if (pieces <= 1 || c.n[0] != 1) {
    return c;
  }
  // coalesce() left the outermost dimension free.
  for (int d = 0; d + 1 < kCopyDims; ++d) {
    cut.n[d] = c.n[d + 1];
    cut.src_stride[d] = c.src_stride[d + 1];
    cut.dst_stride[d] = c.dst_stride[d + 1];
  }
  cut.row_bytes = c.row_bytes / pieces;
  cut.n[kCopyDims - 1] = pieces;
  cut.src_stride[kCopyDims - 1] = cut.row_bytes;
  cut.dst_stride[kCopyDims - 1] = cut.row_bytes;
  return cut;
}

}  // namespace

cudaError_t copy_rows_cuda(const std::vector<StridedCopy>& copies, cudaStream_t stream) {
  size_t next = 0;
  while (next < copies.size()) {
    Batch batch = {};
    for (; next < copies.size() && batch.count < kMaxCopies; ++next) {
      if (copies[next].bytes() == 0) {
        continue;
      }
      const StridedCopy c = with_shorter_rows(copies[next]);
      const int64_t per_warp = std::max<int64_t>(1, kBytesPerWarp / c.row_bytes);
      const int n = batch.count++;
      batch.copies[n] = c;
      batch.rows_per_warp[n] = per_warp;
      batch.vector_bytes[n] = widest_access(c);
      batch.first_warp[n + 1] = batch.first_warp[n] + (c.rows() + per_warp - 1) / per_warp;
    }
    if (batch.count == 0) {
      break;
    }
    const int64_t warps = batch.first_warp[batch.count];
    const int64_t blocks = (warps * kWarp + kThreads - 1) / kThreads;
    copy_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(batch);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace deepsp
