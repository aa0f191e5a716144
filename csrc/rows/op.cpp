// Rows that each rank sends to each: tokens to the ranks that hold their experts, and back.

#include "../transport/agreement.h"
#include "checks.h"
#include "exchange.h"

#include <ATen/ops/empty.h>

namespace deepsp {
namespace {

const Op rows_start("_rows_start");
const Op rows_wait("_rows_wait");

c10::IValue start(const Given& given) {
  const at::Tensor rows = given["rows"];
  const SymRows shapes = check_counts(given);
  const bool home = given["home"];
  const c10::SymInt total = shapes.total(shapes.rank, !home);
  TORCH_CHECK_VALUE(
      rows.dim() == 2 && rows.sym_size(0) == total, "expected rows to have shape [", total,
      ", elements], the rows that counts says rank ", shapes.rank, " sends, got ",
      rows.sym_sizes());
  if (rows.is_meta()) {
    return at::empty_symint({shapes.buffer(shapes.rank), rows.sym_size(1)}, rows.options());
  }
  const RowCounts<int64_t> plan{ints(shapes.sent), shapes.size, shapes.rank};
  const Group group = agreed_group(
      home ? "expert_combine" : "expert_dispatch", given["group_name"], plan.rank, plan.ranks(),
      rows.device(), "counts", [&]() -> std::vector<std::string> {
        return {
            to_text("counts ", plan.sent), to_text("rows of ", rows.size(1), " elements"),
            to_text("dtype ", rows.scalar_type())};
      });
  return exchange_rows(rows.contiguous(), plan, home, group);
}

c10::IValue wait(const Given& given) {
  const at::Tensor buffer = given["buffer"];
  const SymRows plan = check_counts(given);
  const c10::SymInt elements = buffer.dim() > 0 ? buffer.sym_size(-1) : 1;
  check_rows(buffer, "buffer", plan.buffer(plan.rank), elements);
  if (!buffer.is_meta()) {
    wait_and_take(buffer);
  }
  return buffer.narrow_symint(0, 0, plan.total(plan.rank, given["home"]))
      .clone(at::MemoryFormat::Contiguous);
}

Tensors start_backward(const Call& call, const Tensors& buffers) {
  return {rows_wait(call, {{"buffer", buffers[0]}, {"home", !call["home"]}})};
}

Tensors wait_backward(const Call& call, const Tensors& gradients) {
  return {rows_start(call, {{"rows", gradients[0]}, {"home", !call["home"]}})};
}

template <bool home>
c10::IValue both(const Given& given) {
  const at::Tensor buffer = rows_start(given, {{"home", home}});
  return rows_wait(given, {{"buffer", buffer}, {"home", home}}).value();
}

}  // namespace

DEEPSP_KERNELS(m) {
  implement<start>(m, "_rows_start");
  implement<wait>(m, "_rows_wait");
}

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  implement<both<false>>(m, "expert_dispatch");
  implement<both<true>>(m, "expert_combine");
}

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  differentiable(m, "_rows_start", start_backward);
  differentiable(m, "_rows_wait", wait_backward);
}

}  // namespace deepsp
