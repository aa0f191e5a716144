#pragma once
// What a rank can see of a wrong call from its own arguments. All raise ValueError, before anything
// is sent.

#include "../common/checks.h"
#include "../exchange/checks.h"
#include "../layout/halo.h"

namespace deepsp {

using SymHalo = Halo<c10::SymInt>;

inline SymHalo check_halo(const Given& given) {
  const c10::SymIntArrayRef lens = given["seq_lens"];
  const c10::SymInt n = given["n"];
  check_seq_lens(lens, given["rank"]);
  check_at_least(n, 0, "n");
  check_fits({n}, "n");
  return {n, lens.vec(), given["rank"]};
}

// A matrix whose rows are tokens.
inline void check_rows(
    const at::Tensor& x, const char* name, const c10::SymInt& tokens, const c10::SymInt& elements) {
  TORCH_CHECK_VALUE(
      x.dim() == 2 && x.sym_size(0) == tokens && x.sym_size(1) == elements, "expected ", name,
      " to have shape [", tokens, ", ", elements, "], got ", x.sym_sizes(),
      "; pass what the start returned, with the sizes given to it");
}

}  // namespace deepsp
