#pragma once
// What others make of the exchange of rows.

#include "../op.h"

#include <ATen/ops/cat.h>

namespace deepsp {

inline const Op rows_start("_rows_start");
inline const Op rows_wait("_rows_wait");

struct RowRange {
  c10::SymInt begin, size;
};

// Ranges of rows, which may overlap, one after another. Autograd adds the gradients of a row that
// is in several in their order, those of 16 bits in float32: it begins with the last op.
inline at::Tensor joined_ranges(const at::Tensor& rows, const std::vector<RowRange>& ranges) {
  const at::ScalarType dtype = rows.scalar_type();
  const bool widens = dtype == at::kHalf || dtype == at::kBFloat16;
  const at::Tensor wide = widens ? rows.to(at::kFloat) : rows;
  Tensors parts(ranges.size());
  for (size_t i = ranges.size(); i-- > 0;) {
    parts[i] = wide.narrow_symint(0, ranges[i].begin, ranges[i].size).to(dtype);
  }
  return at::cat(parts);
}

}  // namespace deepsp
