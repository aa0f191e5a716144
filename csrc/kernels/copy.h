#pragma once
// Strided copies of rows of bytes, several in one go: how blocks are packed for
// sending and merged on arrival.

#include <cstdint>
#include <vector>

#ifdef DEEPSP_CUDA
#include <cuda_runtime_api.h>
#endif

namespace deepsp {

constexpr int kCopyDims = 4;

// Copies row_bytes from src + Σ i_d·src_stride[d] to dst + Σ i_d·dst_stride[d]
// for every index i < n. Strides are in bytes, dimension 0 is outermost.
struct StridedCopy {
  const char* src;
  char* dst;
  int64_t n[kCopyDims];
  int64_t src_stride[kCopyDims];
  int64_t dst_stride[kCopyDims];
  int64_t row_bytes;

  int64_t rows() const { return n[0] * n[1] * n[2] * n[3]; }
  int64_t bytes() const { return rows() * row_bytes; }
};

// The copy of contiguous bytes.
inline StridedCopy copy_of_bytes(const char* from, char* to, int64_t bytes) {
  return {from, to, {1, 1, 1, 1}, {}, {}, bytes};
}

// The same copy with the longest rows and the fewest dimensions that its
// strides allow.
StridedCopy coalesce(const StridedCopy& copy);

// Appends the part of a copy that is written to the `bytes` bytes from `begin` on, but so that it
// is written to those from `to` on. Steps of dst are positive.
void add_within(
    const StridedCopy& copy,
    const char* begin,
    int64_t bytes,
    char* to,
    std::vector<StridedCopy>& parts);

// Copies rows [begin, end), counted with the innermost dimension fastest.
void copy_rows_cpu(const StridedCopy& copy, int64_t begin, int64_t end);

#ifdef DEEPSP_CUDA
// All copies in as few launches as their number allows (one, up to 128).
cudaError_t copy_rows_cuda(const std::vector<StridedCopy>& copies, cudaStream_t stream);
#endif

}  // namespace deepsp
