#include "copies.h"

#include <ATen/Parallel.h>
#include <ATen/record_function.h>

#ifdef DEEPSP_CUDA
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

int64_t size_of(Float dtype) {
  return dtype == Float::f64 ? 8 : dtype == Float::f32 ? 4 : 2;
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
  for (const StridedSum& sum : sums) {
    C10_CUDA_CHECK(sum_rows_cuda(sum, c10::cuda::getCurrentCUDAStream(device.index())));
  }
#endif
}

#ifdef DEEPSP_CUDA
void run(const std::vector<Cast>& casts, c10::Device device) {
  c10::cuda::CUDAGuard device_guard(device);
  C10_CUDA_CHECK(cast_cuda(casts, c10::cuda::getCurrentCUDAStream(device.index())));
}
#endif

void add_sum(
    StridedSum sum,
    int64_t rows,
    int64_t row,
    const std::vector<int64_t>& from,
    std::vector<StridedSum>& sums) {
  constexpr int64_t kBlock = 4096;
  const bool dense = std::all_of(from.begin(), from.end(), [&](int64_t n) { return n == row; });
  if (dense) {
    row = rows * row;
    rows = 1;
  }
  // Elements [begin, begin + blocks·block) of every row.
  const auto piece = [&](int64_t begin, int64_t blocks, int64_t block) {
    StridedSum part = sum;
    const int64_t n[kSumDims] = {1, rows, blocks, block};
    std::copy_n(n, kSumDims, part.n);
    const auto stride = [&](int64_t of_rows, int64_t (&to)[kSumDims]) {
      const int64_t strides[kSumDims] = {0, of_rows, block, 1};
      std::copy_n(strides, kSumDims, to);
    };
    stride(row, part.dst_stride);
    part.dst = static_cast<char*>(part.dst) + begin * size_of(sum.to);
    for (size_t k = 0; k < part.sources.size(); ++k) {
      SumSource& source = part.sources[k];
      source.data = static_cast<const char*>(source.data) + begin * size_of(sum.dtype);
      stride(from[k], source.stride);
    }
    if (part.elements() > 0) {
      sums.push_back(std::move(part));
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
          false, "a head that several ranks hold can't be summed in ", dtype,
          "; float64, float32, bfloat16 or float16 is right");
  }
}

}  // namespace deepsp
