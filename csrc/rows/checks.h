#pragma once
// What a rank can see of a wrong call from its own arguments. All raise ValueError, before anything
// is sent.

#include "../common/checks.h"
#include "../layout/rows.h"
#include "../op.h"

#include <string>

namespace deepsp {

using SymRows = RowCounts<c10::SymInt>;

// A matrix.
inline void check_rows(
    const at::Tensor& x, const char* name, const c10::SymInt& rows, const c10::SymInt& elements) {
  TORCH_CHECK_VALUE(
      x.dim() == 2 && x.sym_size(0) == rows && x.sym_size(1) == elements, "expected ", name,
      " to have shape [", rows, ", ", elements, "], got ", x.sym_sizes(),
      "; pass what the start returned, with the sizes given to it");
}

// Of counts, by source and receiver, and the rank.
inline SymRows check_counts(const Given& given) {
  const c10::SymIntArrayRef counts = given["counts"];
  int64_t ranks = 0;
  while ((ranks + 1) * (ranks + 1) <= static_cast<int64_t>(counts.size())) {
    ++ranks;
  }
  TORCH_CHECK_VALUE(
      ranks > 0 && ranks * ranks == static_cast<int64_t>(counts.size()),
      "expected counts to have the rows that each rank sends to each rank, P * P numbers, got ",
      counts.size());
  check_rank(given["rank"], ranks, " in counts");
  for (size_t n = 0; n < counts.size(); ++n) {
    check_at_least(counts[n], 0, "counts[", n, "]");
    check_fits(counts[n], "counts");
  }
  return {counts.vec(), ranks, given["rank"]};
}

}  // namespace deepsp
