// The exchange between tokens and shares of attention. Kernels pack and merge: where lengths are
// symbols, so is what of each range lies on which rank, and Inductor takes minutes for the graph of
// all those slices.

#include "../shares/checks.h"
#include "decomposition.h"

namespace deepsp::inductor {
namespace {

constexpr const char* kNamespace = "deepsp_inductor";

const Op<at::Tensor(
    at::TensorList inputs,
    int64_t query_parts,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank)>
    seq_to_shares_pack("seq_to_shares_pack", kNamespace);

const Op<at::Tensor(
    at::TensorList inputs,
    c10::SymIntArrayRef num_heads,
    int64_t query_parts,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank)>
    shares_to_seq_pack("shares_to_seq_pack", kNamespace);

// Of buffers that have arrived.
const decltype(deepsp::seq_to_shares_wait) seq_to_shares_merge("seq_to_shares_merge", kNamespace);
const decltype(deepsp::shares_to_seq_wait) shares_to_seq_merge("shares_to_seq_merge", kNamespace);

int64_t ranks(const Given& given) {
  return static_cast<c10::SymIntArrayRef>(given["seq_lens"]).size();
}

// A buffer's gradient is the buffer of the way back: the difference in size travels from this rank
// to itself, behind its own block.
at::Tensor send(
    const at::Tensor& packed,
    const SymShareBlocks& blocks,
    int64_t chunk,
    bool mine_are_tokens,
    std::string_view group_name) {
  SymInts gives = counts_of_blocks(blocks, chunk, mine_are_tokens);
  SymInts gets = counts_of_blocks(blocks, chunk, !mine_are_tokens);
  const c10::SymInt padding = padding_of(blocks, chunk, !mine_are_tokens);
  gives[blocks.rank] = gives[blocks.rank] + padding;
  gets[blocks.rank] = gets[blocks.rank] + padding;
  return launch("all_to_all_single", blocks.shares.ranks(), packed, {gets, gives}, group_name);
}

c10::IValue seq_to_shares_start(const Given& given) {
  const int64_t chunks = given["chunks"], rank = given["rank"], parts = given["query_parts"];
  const bool last_first = given["last_first"];
  const SymShareBlocks blocks =
      check_tokens_to_share(given["inputs"], parts, given["seq_lens"], chunks, rank);
  Tensors buffers(chunks);
  for (int64_t n = 0; n < chunks; ++n) {
    const int64_t chunk = last_first ? chunks - 1 - n : n;
    const at::Tensor packed =
        seq_to_shares_pack(given["inputs"], parts, given["seq_lens"], chunk, chunks, rank);
    buffers[chunk] = send(packed, blocks, chunk, /*mine_are_tokens=*/true, given["group_name"]);
  }
  return buffers;
}

c10::IValue seq_to_shares_wait(const Given& given) {
  return seq_to_shares_merge(
      landed(given["buffer"], ranks(given)), given["num_heads"], given["head_dims"], given["batch"],
      given["query_parts"], given["seq_lens"], given["chunk"], given["chunks"], given["rank"],
      given["group_name"]);
}

c10::IValue shares_to_seq_start(const Given& given) {
  const int64_t chunk = given["chunk"], chunks = given["chunks"], rank = given["rank"];
  const SymShareBlocks blocks = check_shares(
      given["inputs"], given["num_heads"], given["query_parts"], given["seq_lens"], chunk, chunks,
      rank);
  const at::Tensor packed = shares_to_seq_pack(
      given["inputs"], given["num_heads"], given["query_parts"], given["seq_lens"], chunk, chunks,
      rank);
  return send(packed, blocks, chunk, /*mine_are_tokens=*/false, given["group_name"]);
}

c10::IValue shares_to_seq_wait(const Given& given) {
  Tensors arrived;
  for (const at::Tensor& buffer : static_cast<at::TensorList>(given["buffers"])) {
    arrived.push_back(landed(buffer, ranks(given)));
  }
  return shares_to_seq_merge(
      arrived, given["num_heads"], given["head_dims"], given["batch"], given["query_parts"],
      given["seq_lens"], given["rank"], given["group_name"]);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp_inductor, CompositeImplicitAutograd, m) {
  decomposes<seq_to_shares_start>(m, "seq_to_shares_start");
  decomposes<seq_to_shares_wait>(m, "seq_to_shares_wait");
  decomposes<shares_to_seq_start>(m, "shares_to_seq_start");
  decomposes<shares_to_seq_wait>(m, "shares_to_seq_wait");
}

}  // namespace deepsp::inductor
