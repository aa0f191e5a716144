#pragma once
// The dtype that 16-bit floats are computed and summed in.

#include <c10/core/ScalarType.h>

namespace deepsp {

// float32, but float64 for float64.
inline at::ScalarType wide_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace deepsp
