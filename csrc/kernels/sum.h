#pragma once
// The sum of several strided blocks into one, in the order given: how contributions
// to a shared kv head, or to the gradient of a shard, meet.

#include <cstdint>
#include <vector>

#ifdef DEEPSP_CUDA
#include <cuda_runtime_api.h>
#endif

namespace deepsp {

enum class Float { f64, f32, bf16, f16 };

inline int64_t size_of(Float dtype) {
  return dtype == Float::f64 ? 8 : dtype == Float::f32 ? 4 : 2;
}

constexpr int kSumDims = 4;
constexpr int kMaxSumSources = 512;  // of one launch

struct SumSource {
  const void* data;
  int64_t stride[kSumDims];  // in elements
};

// The default dtype in which a sum is accumulated.
inline Float wide(Float dtype) {
  return dtype == Float::f64 ? Float::f64 : Float::f32;
}

// dst[i] = Σ_k sources[k][i] for every index i < n; dimension 0 is outermost.
struct StridedSum {
  Float dtype;   // of the sources
  Float to;      // of dst
  Float within;  // the sum is rounded to this dtype after every step
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
// The size of the scratch memory that sum_rows_cuda needs: 0 unless a sum has more than
// kMaxSumSources sources.
int64_t scratch_bytes(const std::vector<StridedSum>& sums);
// All sums in as few launches as their number allows; none reads what another writes. A sum of more
// than kMaxSumSources sources takes several launches, between which `scratch` (aligned to 16 bytes)
// holds its total.
cudaError_t sum_rows_cuda(const std::vector<StridedSum>& sums, void* scratch, cudaStream_t stream);
#endif

}  // namespace deepsp
