// Halos: one all-to-all of rows.

#include "../halo/checks.h"
#include "decomposition.h"

#include <ATen/ops/constant_pad_nd.h>

namespace deepsp::inductor {
namespace {

// What this rank sends to itself, since its buffer has the size of the larger one of both
// directions': before its blocks for ranks behind it, or, home, behind those for ranks before.
c10::SymInt padding_of(const SymHalo& halo, bool home) {
  return halo.buffer(halo.rank) - halo.total(halo.rank, home);
}

c10::IValue halo_start(const Given& given) {
  const SymHalo halo = check_halo(given);
  const bool home = given["home"];
  SymInts gets = halo.counts(halo.rank, home), gives = halo.counts(halo.rank, !home);
  gets[halo.rank] = gives[halo.rank] = padding_of(halo, home);
  SymInts zeros{0, 0, 0, 0};
  zeros[home ? 3 : 2] = gets[halo.rank];
  const at::Tensor sent = at::constant_pad_nd_symint(given["rows"], zeros);
  return launch("all_to_all_single", halo.ranks(), sent, {gets, gives}, given["group_name"]);
}

c10::IValue halo_wait(const Given& given) {
  const SymHalo halo = check_halo(given);
  const bool home = given["home"];
  const c10::SymInt begin = home ? padding_of(halo, home) : 0;
  return landed(given["buffer"], halo.ranks()).narrow_symint(0, begin, halo.total(halo.rank, home));
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp_inductor, CompositeImplicitAutograd, m) {
  implement<halo_start>(m, "_halo_start");
  implement<halo_wait>(m, "_halo_wait");
}

}  // namespace deepsp::inductor
