#pragma once
// The dtype that 16-bit numbers are computed and summed in.

#include <c10/core/ScalarType.h>

namespace deepsp {

// float32, but float64 for float64, and a complex dtype for complex numbers.
inline at::ScalarType wide_dtype(at::ScalarType dtype) {
  if (c10::isComplexType(dtype)) {
    return dtype == at::kComplexHalf ? at::kComplexFloat : dtype;
  }
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace deepsp
