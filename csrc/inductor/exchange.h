#pragma once
// Blocks that are sent between ranks, in terms of aten.

#include "../exchange/checks.h"
#include "decomposition.h"

#include <numeric>

namespace deepsp::inductor {

// What this rank gets from every rank, and gives to it, with one chunk of an exchange, in elements.
struct Way {
  SymInts gets;
  SymInts gives;
  // Both directions' buffers have the size of the larger one: they are each other's gradients. The
  // difference is sent from this rank to itself, behind its own block.
  c10::SymInt padding = 0;
  bool is_padded;  // blocks come with it
  int64_t rank;

  Way(const SymPlan& plan, int64_t chunk, bool to_heads)
      : gets(plan.counts_by_heads(chunk)),
        gives(plan.counts_by_tokens(chunk)),
        is_padded(!plan.stacks()),
        rank(plan.rank) {
    if (!plan.stacks()) {
      if (!to_heads) {
        std::swap(gets, gives);
      }
      padding = plan.padding(chunk, to_heads);
      return;
    }
    const c10::SymInt by_heads = std::accumulate(gets.begin(), gets.end(), c10::SymInt(0));
    const c10::SymInt by_tokens = std::accumulate(gives.begin(), gives.end(), c10::SymInt(0));
    const bool larger_by_heads = by_heads >= by_tokens;  // one guard, so that the two sizes agree
    if (!to_heads) {
      std::swap(gets, gives);
    }
    if (larger_by_heads != to_heads) {
      padding = larger_by_heads ? by_heads - by_tokens : by_tokens - by_heads;
    }
  }

  int64_t parts() const { return static_cast<int64_t>(gets.size()); }
};

// One all-to-all of flat blocks, one for each rank, or of all in one tensor. Blocks of queries that
// are cut have the padding already.
at::Tensor send(Tensors blocks, const Way& way, std::string_view group_name);

// Launches all chunks, of which `pack` makes the blocks.
template <class Pack>
Tensors start_chunks(const Given& given, const SymPlan& plan, const Pack& pack) {
  const int64_t count = plan.chunks();
  const bool last_first = given["last_first"];
  Tensors buffers(count);
  for (int64_t n = 0; n < count; ++n) {
    const int64_t chunk = last_first ? count - 1 - n : n;
    buffers[chunk] = send(pack(chunk), Way(plan, chunk, /*to_heads=*/true), given["group_name"]);
  }
  return buffers;
}

// The received blocks [S_rank·B, X_p], by chunk and by rank.
std::vector<Tensors> blocks_by_tokens(at::TensorList buffers, const SymPlan& plan);

// All heads of tensors [first, last), summed over the ranks that read them: [S_rank·B, Σ H_i·D_i],
// fresh.
at::Tensor all_heads_of(
    const std::vector<Tensors>& blocks, const SymPlan& plan, size_t first, size_t last);

}  // namespace deepsp::inductor
