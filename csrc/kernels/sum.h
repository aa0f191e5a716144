#pragma once
// The sum of several strided blocks into one: how contributions to a shared kv
// head meet. Accumulates in float32 (float64 for float64), in the order given.

#include <cstdint>
#include <vector>

#ifdef DEEPSP_CUDA
#include <cuda_runtime_api.h>
#endif

namespace deepsp {

enum class Float { f64, f32, bf16, f16 };

constexpr int kSumDims = 4;
constexpr int kMaxSumSources = 512;

struct SumSource {
  const void* data;
  int64_t stride[kSumDims];  // in elements
};

// dst[i] = Σ_k sources[k][i] for every index i < n; dimension 0 is outermost.
struct StridedSum {
  Float dtype;
  void* dst;
  int64_t n[kSumDims];
  int64_t dst_stride[kSumDims];  // in elements
  std::vector<SumSource> sources;

  int64_t elements() const { return n[0] * n[1] * n[2] * n[3]; }
  // Rows of the innermost dimension.
  int64_t rows() const { return n[0] * n[1] * n[2]; }
};

// Sums rows [begin, end).
void sum_rows_cpu(const StridedSum& sum, int64_t begin, int64_t end);

#ifdef DEEPSP_CUDA
// At most kMaxSumSources sources.
cudaError_t sum_rows_cuda(const StridedSum& sum, cudaStream_t stream);
#endif

}  // namespace deepsp
