#pragma once
// Runs the kernels on the tensors' device, under a name that profilers show.

#include "../kernels/cast.h"
#include "../kernels/copy.h"
#include "../kernels/sum.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace deepsp {

inline int64_t item_of(const at::Tensor& x) {
  return static_cast<int64_t>(x.element_size());
}

inline char* data_of(const at::Tensor& x) {
  return static_cast<char*>(const_cast<void*>(x.const_data_ptr()));
}

// A [tokens, batch, heads, head_dim] view of memory: the address of its first element, and strides
// in elements in that order.
struct View {
  char* data;
  int64_t stride[kCopyDims];
};

// Copies of n = {tokens, batch, heads, head_dim} elements of `item` bytes.
StridedCopy copy_of(const View& from, const View& to, const int64_t (&n)[kCopyDims], int64_t item);

void run(const std::vector<StridedCopy>& copies, c10::Device device);
void run(const std::vector<StridedSum>& sums, c10::Device device);
#ifdef DEEPSP_CUDA
void run(const std::vector<Cast>& casts, c10::Device device);
#endif

// Rows to sum, `row` elements apart.
struct Addend {
  const void* data;
  int64_t row;
};
// Appends to `sums` the sum of addends [rows, row] into a contiguous result: in the order of the
// addends, rounded to `within` after every step (none: float32, or float64 for float64), in pieces
// that several threads can share.
void add_sum(
    const at::Tensor& result,
    int64_t rows,
    int64_t row,
    at::ScalarType dtype,
    std::optional<at::ScalarType> within,
    const std::vector<Addend>& addends,
    std::vector<StridedSum>& sums);

Float float_type(at::ScalarType dtype);

}  // namespace deepsp
