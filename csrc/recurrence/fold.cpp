// The state that a rank's part of a sequence begins with, where a rank's tokens change a state as
// an affine map: after them it is transition · state + update. Every rank receives the maps of all
// ranks and folds those of the ranks before it. What is sent doesn't depend on the tokens.

#include "../common/checks.h"
#include "../common/wide.h"
#include "../op.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

namespace deepsp {
namespace {

c10::IValue fold_states(const Given& given) {
  const at::Tensor transition = given["transition"], update = given["update"];
  const int64_t rank = given["rank"];
  const c10::SymIntArrayRef rows = given["rows"];
  TORCH_CHECK_VALUE(
      update.dim() == 4, "expected update to have shape [B, H, K, V], got ", update.sym_sizes());
  const c10::SymIntArrayRef sizes = update.sym_sizes();
  const c10::SymInt &batch = sizes[0], &heads = sizes[1], &keys = sizes[2];
  const bool diagonal = transition.dim() == 2;
  const SymInts shape = diagonal ? SymInts{batch, heads} : SymInts{batch, heads, keys, keys};
  TORCH_CHECK_VALUE(
      transition.sym_sizes() == shape, "expected transition to have shape ",
      SymInts{batch, heads, keys, keys}, " or ", SymInts{batch, heads}, ", got ",
      transition.sym_sizes());
  for (const c10::SymInt& of_rank : rows) {
    TORCH_CHECK_VALUE(
        of_rank == batch, "expected rows to be the batch size, ", batch, ", of each rank, got ",
        rows);
  }
  const at::ScalarType dtype =
      c10::promoteTypes(wide_dtype(transition.scalar_type()), wide_dtype(update.scalar_type()));
  const at::Tensor map = at::cat(
      {transition.to(dtype).reshape_symint({batch, heads, diagonal ? c10::SymInt(1) : keys * keys}),
       update.to(dtype).reshape_symint({batch, heads, keys * sizes[3]})},
      2);
  const bool complex = c10::isComplexType(dtype);  // whose gradients no kernel sums
  const at::Tensor gathered = Op("all_gather")(
      given, {{"input", complex ? at::view_as_real(map) : map},
              {"dim", int64_t(0)},
              {"sizes", rows},
              {"grad", "partial"}});
  const at::Tensor maps = complex ? at::view_as_complex(gathered) : gathered;
  // Each rank's result depends on the maps, or ranks would differ in what backward sends.
  at::Tensor state = at::zeros_symint(sizes, map.options()) + maps.narrow(0, 0, 0).sum();
  for (int64_t source = 0; source < rank; ++source) {
    const at::Tensor all = maps.narrow_symint(0, batch * source, batch);
    const c10::SymInt columns = map.sym_size(2) - keys * sizes[3];
    const at::Tensor m = all.narrow_symint(2, 0, columns);
    const at::Tensor moved =
        diagonal ? state * m.unsqueeze(3) : at::matmul(m.reshape_symint(shape), state);
    state = moved + all.narrow_symint(2, columns, keys * sizes[3]).reshape_symint(sizes);
  }
  return state;
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  implement<fold_states>(m, "_fold_states");
}

}  // namespace deepsp
