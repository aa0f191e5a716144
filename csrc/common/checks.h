#pragma once
// Symbolic sizes as integers, for kernels, where all sizes are known; and checks that several ops
// share. Messages say what was expected, what was got and, if that isn't plain, what to do.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/Exception.h>
#include <c10/util/safe_numerics.h>

#include <string>
#include <vector>

namespace deepsp {

inline std::vector<int64_t> ints(c10::SymIntArrayRef values) {
  std::vector<int64_t> result;
  for (const c10::SymInt& value : values) {
    result.push_back(value.guard_int(__FILE__, __LINE__));
  }
  return result;
}

// More than any machine holds, and few enough that sums of sizes and bytes over ranks don't
// overflow.
constexpr int64_t kMostElements = int64_t(1) << 44;

// ValueError if no memory holds a tensor of these sizes, which aren't negative. Symbolic sizes are
// those of existing tensors, so they aren't checked.
inline void check_fits(c10::SymIntArrayRef sizes, const char* name) {
  int64_t product = 1;
  for (const c10::SymInt& size : sizes) {
    if (const auto plain = size.maybe_as_int()) {
      TORCH_CHECK_VALUE(
          !c10::mul_overflows(product, *plain, &product) && product <= kMostElements, "expected ",
          name, " to describe at most ", kMostElements, " elements, got ", sizes,
          ", more than any memory holds");
    }
  }
}

// The floats that kernels sum.
inline bool is_summable(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 ||
         dtype == at::kHalf;
}

// A dtype as Python names it.
inline std::string dtype_name(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

// `name` may have several parts, which are put together only for the message.
template <class T, class... Name>
void check_at_least(const T& value, int64_t least, const Name&... name) {
  TORCH_CHECK_VALUE(value >= least, "expected ", name..., " >= ", least, ", got ", value);
}

// `in`: which argument says how many ranks there are, such as " in seq_lens".
inline void check_rank(int64_t rank, int64_t parts, const char* in = "") {
  TORCH_CHECK_VALUE(
      rank >= 0 && rank < parts, "expected 0 <= rank < ", parts, ", the number of ranks", in,
      ", got ", rank);
}

inline void check_chunk(int64_t chunk, int64_t chunks) {
  TORCH_CHECK_VALUE(
      chunk >= 0 && chunk < chunks, "expected 0 <= chunk < ", chunks,
      ", the number of chunks, got ", chunk);
}

// A hint for weights, which may be in another dtype than what they multiply.
constexpr const char* kAutocast = "; cast it, or use autocast, which casts both";

// `hint`: what to do about it.
inline void check_dtype(
    const at::Tensor& x,
    const std::string& name,
    const at::Tensor& first,
    const char* first_name,
    const char* hint = "") {
  TORCH_CHECK_VALUE(
      x.scalar_type() == first.scalar_type(), "expected ", name, " to have the dtype of ",
      first_name, " (", dtype_name(first.scalar_type()), "), got ", dtype_name(x.scalar_type()),
      hint);
}

inline void check_device(
    const at::Tensor& x, const std::string& name, const at::Tensor& first, const char* first_name) {
  TORCH_CHECK_VALUE(
      x.device() == first.device(), "expected ", name, " to be on the device of ", first_name, " (",
      first.device(), "), got ", x.device());
}

inline void check_like(
    const at::Tensor& x,
    const std::string& name,
    const at::Tensor& first,
    const char* first_name,
    const char* hint = "") {
  check_dtype(x, name, first, first_name, hint);
  check_device(x, name, first, first_name);
}

inline void check_bias(
    const at::Tensor& bias,
    const std::string& name,
    const at::Tensor& weight,
    const std::string& weight_name) {
  TORCH_CHECK_VALUE(
      bias.dim() == 1 && bias.sym_size(0) == weight.sym_size(0), "expected ", name,
      " to have shape [", weight.sym_size(0), "], one entry for each row of ", weight_name,
      ", got ", bias.sym_sizes());
}

inline void check_buffers(at::TensorList buffers) {
  TORCH_CHECK_VALUE(
      !buffers.empty(), "expected buffers to have one entry for each chunk, got an empty list");
}

// Checks `wanted`, which says for each of `inputs` whether a backward computes its gradient.
inline void check_wanted(at::IntArrayRef wanted, size_t entries, const char* inputs) {
  TORCH_CHECK_VALUE(
      wanted.size() == entries, "expected wanted to have ", entries, " entries, for ", inputs,
      ", got ", wanted.size());
}

}  // namespace deepsp
