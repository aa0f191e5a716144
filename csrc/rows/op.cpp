// Rows that ranks send each other: tokens to the ranks that hold their experts, the tokens before a
// rank's own, and back.

#include "../transport/agreement.h"
#include "../transport/moves.h"
#include "checks.h"
#include "ops.h"

#include <ATen/ops/empty.h>

namespace deepsp {
namespace {

// rows [n, elements], those for rank 0 first. Blocks lie one after another, by rank, in what is
// sent and in what is received, and are sent from where they are.
at::Tensor exchange(
    const at::Tensor& rows, const RowPlan<int64_t>& plan, bool home, const Group& group) {
  const int64_t elements = rows.size(1), bytes = elements * item_of(rows), rank = plan.rank;
  Transfer transfer(
      group, [&](int64_t p) { return plan.buffer(p) * elements; }, {plan.buffer(rank), elements},
      rows.options());
  const auto gives = plan.received(rank, !home), gets = plan.received(rank, home);
  const auto sent_at = prefix_sums(gives), received_at = prefix_sums(gets);
  Moves moves;
  moves.reads = {rows};
  moves.blocks.push_back(
      {[&](int64_t p) { return Span{received_at[p] * bytes, gets[p] * bytes}; },
       [&](int64_t p) { return Bytes{data_of(rows) + sent_at[p] * bytes, gives[p] * bytes}; }});
  moves.place = [&](int64_t p, char* buffer, auto& copies) {
    if (const Bytes block = moves.blocks[0].send(p); block.size > 0) {
      char* const to = buffer + plan.total(p, home, rank) * bytes;
      copies.push_back(copy_of_bytes(block.data, to, block.size));
    }
  };
  auto flight = transfer.start(moves);
  if (!transfer.moves_own()) {
    std::vector<StridedCopy> copies;
    moves.place(rank, data_of(transfer.buffer()), copies);
    run(copies, rows.device());
  }
  transfer.attach(std::move(flight));
  return transfer.buffer();
}

c10::IValue start(const Given& given) {
  const at::Tensor rows = given["rows"];
  const SymRows shapes = check_counts(given);
  const bool home = given["home"], halo = shapes.halo.has_value();
  const c10::SymInt total = shapes.total(shapes.rank, !home);
  TORCH_CHECK_VALUE(
      rows.dim() == 2 && rows.sym_size(0) == total, "expected rows to have shape [", total,
      ", elements], the rows that counts says rank ", shapes.rank, " sends, got ",
      rows.sym_sizes());
  if (rows.is_meta()) {
    return at::empty_symint({shapes.buffer(shapes.rank), rows.sym_size(1)}, rows.options());
  }
  const RowPlan<int64_t> plan{
      ints(shapes.counts),
      halo ? std::make_optional(shapes.halo->guard_int(__FILE__, __LINE__)) : std::nullopt,
      shapes.size, shapes.rank};
  const std::optional<std::string> name = given.optional<std::string>("op");
  const char* const op = name   ? name->c_str()
                         : halo ? (home ? "previous_tokens_backward" : "previous_tokens")
                                : (home ? "expert_combine" : "expert_dispatch");
  const char* const sizes = halo ? "seq_lens" : "counts";
  const Group group = agreed_group(
      op, given["group_name"], plan.rank, plan.ranks(), rows.device(), sizes,
      [&]() -> std::vector<std::string> {
        std::vector<std::string> arguments{
            to_text(sizes, " ", plan.counts),
            to_text(halo ? "tokens of " : "rows of ", rows.size(1), " elements"),
            to_text("dtype ", rows.scalar_type())};
        if (halo) {
          arguments.insert(arguments.begin(), to_text("n ", *plan.halo));
        }
        return arguments;
      });
  return exchange(rows.contiguous(), plan, home, group);
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
