#pragma once
// What a rank can see of a wrong call from its own arguments. All raise ValueError, before anything
// is sent.

#include "../common/checks.h"
#include "../exchange/checks.h"
#include "../layout/halo.h"
#include "../rows/checks.h"

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

}  // namespace deepsp
