#pragma once
// Symbolic sizes as plain ones, in kernels, where all are known; what sizes and dtypes may be.

#include <c10/core/ScalarType.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/Exception.h>
#include <c10/util/safe_numerics.h>

#include <vector>

namespace deepsp {

inline std::vector<int64_t> ints(c10::SymIntArrayRef values) {
  std::vector<int64_t> result;
  for (const c10::SymInt& value : values) {
    result.push_back(value.guard_int(__FILE__, __LINE__));
  }
  return result;
}

// More than any machine holds. Up to here, sums over ranks of sizes, and of bytes, don't overflow.
constexpr int64_t kMostElements = int64_t(1) << 44;

// ValueError where so many elements, the product of sizes that aren't negative, can't be held.
// Symbolic sizes are those of tensors that exist.
inline void check_fits(c10::SymIntArrayRef sizes, const char* name) {
  int64_t product = 1;
  for (const c10::SymInt& size : sizes) {
    if (const auto plain = size.maybe_as_int()) {
      TORCH_CHECK_VALUE(
          !c10::mul_overflows(product, *plain, &product) && product <= kMostElements, name,
          ": what is described, ", sizes, ", has more elements than any memory; at most ",
          kMostElements, " are right");
    }
  }
}

// The floats that kernels sum.
inline bool is_summable(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 ||
         dtype == at::kHalf;
}

}  // namespace deepsp
