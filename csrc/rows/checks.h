#pragma once
// What a rank can see of a wrong call from its own arguments. All raise ValueError, before anything
// is sent.

#include "../common/checks.h"
#include "../exchange/checks.h"
#include "../layout/rows.h"
#include "../op.h"

namespace deepsp {

using SymRows = RowPlan<c10::SymInt>;

// A matrix.
inline void check_rows(
    const at::Tensor& x, const char* name, const c10::SymInt& rows, const c10::SymInt& elements) {
  TORCH_CHECK_VALUE(
      x.dim() == 2 && x.sym_size(0) == rows && x.sym_size(1) == elements, "expected ", name,
      " to have shape [", rows, ", ", elements, "], got ", x.sym_sizes(),
      "; pass what the start returned, with the sizes given to it");
}

inline SymRows check_halo(const c10::SymInt& n, c10::SymIntArrayRef seq_lens, int64_t rank) {
  check_seq_lens(seq_lens, rank);
  check_at_least(n, 0, "n");
  check_fits({n}, "n");
  return {seq_lens.vec(), n, static_cast<int64_t>(seq_lens.size()), rank};
}

// Checks the op's `counts`, `halo` and rank.
inline SymRows check_counts(const Given& given) {
  const c10::SymIntArrayRef counts = given["counts"];
  const int64_t rank = given["rank"];
  if (const auto halo = given.optional<c10::SymInt>("halo")) {
    return check_halo(*halo, counts, rank);
  }
  int64_t ranks = 0;
  while ((ranks + 1) * (ranks + 1) <= static_cast<int64_t>(counts.size())) {
    ++ranks;
  }
  TORCH_CHECK_VALUE(
      ranks > 0 && ranks * ranks == static_cast<int64_t>(counts.size()),
      "expected counts to have the rows that each rank sends to each rank, P * P numbers, got ",
      counts.size());
  check_rank(rank, ranks, " in counts");
  for (size_t n = 0; n < counts.size(); ++n) {
    check_at_least(counts[n], 0, "counts[", n, "]");
    check_fits(counts[n], "counts");
  }
  return {counts.vec(), std::nullopt, ranks, rank};
}

}  // namespace deepsp
