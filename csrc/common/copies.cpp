#include "copies.h"

#include "checks.h"
#include "wide.h"

#include <ATen/Parallel.h>
#include <ATen/record_function.h>

#include <algorithm>

#ifdef DEEPSP_CUDA
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace deepsp {
namespace {

// Bytes that are worth a thread of their own.
constexpr int64_t kGrainBytes = 64 << 10;

int64_t grain_rows(int64_t row_bytes) {
  return std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, row_bytes));
}

int64_t bytes_of(const std::vector<StridedCopy>& copies) {
  int64_t bytes = 0;
  for (const StridedCopy& copy : copies) {
    bytes += copy.bytes();
  }
  return bytes;
}

}  // namespace

StridedCopy copy_of(const View& from, const View& to, const int64_t (&n)[kCopyDims], int64_t item) {
  StridedCopy copy{from.data, to.data, {}, {}, {}, item};
  for (int d = 0; d < kCopyDims; ++d) {
    copy.n[d] = n[d];
    copy.src_stride[d] = from.stride[d] * item;
    copy.dst_stride[d] = to.stride[d] * item;
  }
  return coalesce(copy);
}

void run(const std::vector<StridedCopy>& copies, c10::Device device) {
  RECORD_FUNCTION("deepsp::copy", (std::vector<c10::IValue>{bytes_of(copies)}));
  if (device.is_cpu()) {
    for (const StridedCopy& copy : copies) {
      at::parallel_for(0, copy.rows(), grain_rows(copy.row_bytes), [&](int64_t begin, int64_t end) {
        copy_rows_cpu(copy, begin, end);
      });
    }
    return;
  }
#ifdef DEEPSP_CUDA
  c10::cuda::CUDAGuard device_guard(device);
  C10_CUDA_CHECK(copy_rows_cuda(copies, c10::cuda::getCurrentCUDAStream(device.index())));
#endif
}

void run(const std::vector<StridedSum>& sums, c10::Device device) {
  if (device.is_cpu()) {
    for (const StridedSum& sum : sums) {
      const int64_t row_bytes = sum.n[kSumDims - 1] * static_cast<int64_t>(sum.sources.size()) * 4;
      at::parallel_for(0, sum.rows(), grain_rows(row_bytes), [&](int64_t begin, int64_t end) {
        sum_rows_cpu(sum, begin, end);
      });
    }
    return;
  }
#ifdef DEEPSP_CUDA
  c10::cuda::CUDAGuard device_guard(device);
  const auto options = at::TensorOptions(device).dtype(at::kByte);
  const at::Tensor scratch = at::empty({scratch_bytes(sums)}, options);
  C10_CUDA_CHECK(sum_rows_cuda(
      sums, scratch.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream(device.index())));
#endif
}

#ifdef DEEPSP_CUDA
void run(const std::vector<Cast>& casts, c10::Device device) {
  c10::cuda::CUDAGuard device_guard(device);
  C10_CUDA_CHECK(cast_cuda(casts, c10::cuda::getCurrentCUDAStream(device.index())));
}
#endif

void add_sum(
    const at::Tensor& result,
    int64_t rows,
    int64_t row,
    at::ScalarType dtype,
    std::optional<at::ScalarType> within,
    const std::vector<Addend>& addends,
    std::vector<StridedSum>& sums) {
  constexpr int64_t kBlock = 4096;
  const bool dense = std::all_of(
      addends.begin(), addends.end(), [&](const Addend& addend) { return addend.row == row; });
  if (dense) {
    row = rows * row;
    rows = 1;
  }
  const Float from = float_type(dtype);
  const Float to = float_type(result.scalar_type());
  // Elements [begin, begin + blocks·block) of every row.
  const auto piece = [&](int64_t begin, int64_t blocks, int64_t block) {
    StridedSum sum{
        from,
        to,
        float_type(within.value_or(wide_dtype(dtype))),
        data_of(result) + begin * size_of(to),
        {1, rows, blocks, block},
        {0, row, block, 1},
        {}};
    for (const Addend& addend : addends) {
      sum.sources.push_back(
          {static_cast<const char*>(addend.data) + begin * size_of(from),
           {0, addend.row, block, 1}});
    }
    if (sum.elements() > 0) {
      sums.push_back(std::move(sum));
    }
  };
  const int64_t blocks = row / kBlock;
  piece(0, blocks, kBlock);
  piece(blocks * kBlock, 1, row % kBlock);
}

Float float_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return Float::f64;
    case at::kFloat:
      return Float::f32;
    case at::kBFloat16:
      return Float::bf16;
    case at::kHalf:
      return Float::f16;
    default:
      TORCH_CHECK_VALUE(
          false, "expected float64, float32, bfloat16 or float16 to sum or cast, got ",
          dtype_name(dtype));
  }
}

}  // namespace deepsp
