// The tokens before a rank's own, made of an exchange of rows and of aten ops: what the exchange
// brings home, autograd adds to the gradients of the tokens.

#include "../op.h"
#include "../reshard/checks.h"
#include "checks.h"
#include "ops.h"

#include <ATen/ops/constant_pad_nd.h>

namespace deepsp {
namespace {

SymRows plan_of(const Given& given) {
  return check_halo(given["n"], given["seq_lens"], given["rank"]);
}

// The dimension of the tokens, and the number of elements of each.
std::pair<int64_t, c10::SymInt> token_of(
    c10::SymIntArrayRef shape, const SymRows& halo, const Given& given) {
  const int64_t dim = wrap_dim(given["dim"], static_cast<int64_t>(shape.size()));
  const c10::SymInt& mine = halo.counts[halo.rank];
  TORCH_CHECK_VALUE(
      shape[dim] == mine, "expected input to have size ", mine, " in dimension ", dim,
      ", which is seq_lens[", halo.rank, "], this rank's entry, got ", shape[dim]);
  check_fits(resized(shape, dim, *halo.halo), "n tokens");
  return {dim, product(resized(shape, dim, 1))};
}

c10::IValue previous_tokens_start(const Given& given) {
  const at::Tensor input = given["input"];
  check_dense(input, "input");
  const SymRows halo = plan_of(given);
  const auto [dim, token] = token_of(input.sym_sizes(), halo, given);
  SymInts blocks;  // of the ranks behind, none longer than the one before it
  halo.each_block(halo.rank, true, [&](int64_t, const auto& tokens) { blocks.push_back(tokens); });
  const c10::SymInt longest = blocks.empty() ? 0 : blocks[0];
  at::Tensor rows = input.narrow_symint(dim, halo.counts[halo.rank] - longest, longest)
                        .movedim(dim, 0)
                        .reshape_symint({longest, token});
  if (blocks.size() > 1) {
    std::vector<RowRange> ranges;
    for (const c10::SymInt& block : blocks) {
      ranges.push_back({longest - block, block});
    }
    rows = joined_ranges(rows, ranges);
  }
  return rows_start(
             given,
             {{"rows", rows}, {"counts", halo.counts}, {"halo", *halo.halo}, {"home", false}})
      .value();
}

c10::IValue previous_tokens_wait(const Given& given) {
  const at::Tensor buffer = given["buffer"];
  SymInts shape = c10::SymIntArrayRef(given["shape"]).vec();
  const SymRows halo = plan_of(given);
  const auto [dim, token] = token_of(shape, halo, given);
  check_rows(buffer, "buffer", halo.buffer(halo.rank), token);
  const at::Tensor rows =
      rows_wait(given, {{"counts", halo.counts}, {"halo", *halo.halo}, {"home", false}});
  // Padded, not put together with zeros: of a rank that receives nothing there would be no trace of
  // the exchange in a graph, and a compiler would drop it there, and only there.
  const SymInts zeros{0, 0, *halo.halo - rows.sym_size(0), 0};
  shape.erase(shape.begin() + dim);
  shape.insert(shape.begin(), *halo.halo);
  return at::constant_pad_nd_symint(rows, zeros).view_symint(shape).movedim(0, dim).contiguous();
}

c10::IValue previous_tokens(const Given& given) {
  const at::Tensor buffer = Op("previous_tokens_start")(given, {});
  const at::Tensor input = given["input"];
  return Op("previous_tokens_wait")(given, {{"buffer", buffer}, {"shape", input.sym_sizes()}})
      .value();
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  implement<previous_tokens>(m, "previous_tokens");
  implement<previous_tokens_start>(m, "previous_tokens_start");
  implement<previous_tokens_wait>(m, "previous_tokens_wait");
}

}  // namespace deepsp
