// The exchange of halos differentiated, and previous_tokens, which is made of it and of aten ops:
// what the exchange brings home, autograd adds to the gradients of the tokens.

#include "../op.h"
#include "../reshard/checks.h"
#include "checks.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>

namespace deepsp {
namespace {

const Op halo_start("_halo_start");
const Op halo_wait("_halo_wait");

Tensors halo_start_backward(const Call& call, const Tensors& buffers) {
  return {halo_wait(call, {{"buffer", buffers[0]}, {"home", !call["home"]}})};
}

Tensors halo_wait_backward(const Call& call, const Tensors& gradients) {
  return {halo_start(call, {{"rows", gradients[0]}, {"home", !call["home"]}})};
}

// The dimension of the tokens, and the number of elements of each.
std::pair<int64_t, c10::SymInt> token_of(
    c10::SymIntArrayRef shape, const SymHalo& halo, const Given& given) {
  const int64_t dim = wrap_dim(given["dim"], static_cast<int64_t>(shape.size()));
  const c10::SymInt& mine = halo.lens[halo.rank];
  TORCH_CHECK_VALUE(
      shape[dim] == mine, "expected input to have size ", mine, " in dimension ", dim,
      ", which is seq_lens[", halo.rank, "], this rank's entry, got ", shape[dim]);
  check_fits(resized(shape, dim, halo.n), "n tokens");
  return {dim, product(resized(shape, dim, 1))};
}

c10::IValue previous_tokens_start(const Given& given) {
  const at::Tensor input = given["input"];
  check_dense(input, "input");
  const SymHalo halo = check_halo(given);
  const auto [dim, token] = token_of(input.sym_sizes(), halo, given);
  SymInts blocks;  // of the ranks behind, none longer than the one before it
  halo.each_block(halo.rank, true, [&](int64_t, const auto& tokens) { blocks.push_back(tokens); });
  const c10::SymInt longest = blocks.empty() ? 0 : blocks[0];
  at::Tensor rows = input.narrow_symint(dim, halo.lens[halo.rank] - longest, longest)
                        .movedim(dim, 0)
                        .reshape_symint({longest, token});
  if (blocks.size() > 1) {
    // Gradients of 16 bits are added in float32, in rank order: autograd begins with the last op.
    const at::ScalarType dtype = input.scalar_type();
    rows = dtype == at::kHalf || dtype == at::kBFloat16 ? rows.to(at::kFloat) : rows;
    Tensors parts(blocks.size());
    for (size_t i = blocks.size(); i-- > 0;) {
      parts[i] = rows.narrow_symint(0, longest - blocks[i], blocks[i]).to(dtype);
    }
    rows = at::cat(parts);
  }
  return halo_start(given, {{"rows", rows}, {"home", false}}).value();
}

c10::IValue previous_tokens_wait(const Given& given) {
  const at::Tensor buffer = given["buffer"];
  SymInts shape = c10::SymIntArrayRef(given["shape"]).vec();
  const SymHalo halo = check_halo(given);
  const auto [dim, token] = token_of(shape, halo, given);
  check_rows(buffer, "buffer", halo.buffer(halo.rank), token);
  const at::Tensor rows = halo_wait(given, {{"home", false}});
  // Padded, not put together with zeros: of a rank that receives nothing there would be no trace of
  // the exchange in a graph, and a compiler would drop it there, and only there.
  const SymInts zeros{0, 0, halo.n - rows.sym_size(0), 0};
  shape.erase(shape.begin() + dim);
  shape.insert(shape.begin(), halo.n);
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

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  differentiable(m, "_halo_start", halo_start_backward);
  differentiable(m, "_halo_wait", halo_wait_backward);
}

}  // namespace deepsp
