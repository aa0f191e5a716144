// Rows that ranks send each other: one all-to-all.

#include "../rows/checks.h"
#include "decomposition.h"

namespace deepsp::inductor {
namespace {

// What this rank sends to itself behind its own block, since its buffer has the size of the larger
// one of both directions'.
c10::SymInt padding_of(const SymRows& plan, bool home) {
  return plan.buffer(plan.rank) - plan.total(plan.rank, home);
}

// The parts that aren't empty.
at::Tensor joined_parts(const Tensors& parts) {
  Tensors filled;
  for (const at::Tensor& part : parts) {
    if (!is_zero(part.sym_size(0))) {
      filled.push_back(part);
    }
  }
  return filled.empty() ? parts[0] : joined(filled);
}

c10::IValue rows_start(const Given& given) {
  const SymRows plan = check_counts(given);
  const at::Tensor rows = given["rows"];
  const bool home = given["home"];
  const int64_t rank = plan.rank;
  SymInts gets = plan.received(rank, home), gives = plan.received(rank, !home);
  const c10::SymInt padding = padding_of(plan, home), total = plan.total(rank, !home);
  const c10::SymInt begin = plan.total(rank, !home, rank + 1);
  gets[rank] = gets[rank] + padding;
  gives[rank] = gives[rank] + padding;
  const at::Tensor sent = joined_parts(
      {rows.narrow_symint(0, 0, begin), rows.new_zeros_symint({padding, rows.sym_size(1)}),
       rows.narrow_symint(0, begin, total - begin)});
  return launch("all_to_all_single", plan.ranks(), sent, {gets, gives}, given["group_name"]);
}

c10::IValue rows_wait(const Given& given) {
  const SymRows plan = check_counts(given);
  const bool home = given["home"];
  const at::Tensor buffer = waited(given["buffer"], plan.ranks());
  const c10::SymInt begin = plan.total(plan.rank, home, plan.rank + 1);
  const c10::SymInt left = plan.total(plan.rank, home) - begin;
  return joined_parts(
      {buffer.narrow_symint(0, 0, begin),
       buffer.narrow_symint(0, begin + padding_of(plan, home), left)});
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp_inductor, CompositeImplicitAutograd, m) {
  implement<rows_start>(m, "_rows_start");
  implement<rows_wait>(m, "_rows_wait");
}

}  // namespace deepsp::inductor
