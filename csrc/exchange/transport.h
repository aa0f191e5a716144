#pragma once
// One exchange on real tensors, in either direction: packed and launched, then
// landed. One copy before sending, none after arriving by heads, one after
// arriving by tokens; on the CPU a rank's own block goes straight to its place.

#include "../collectives/exchange.h"
#include "../layout/blocks.h"
#include "copies.h"

namespace deepsp {

using Layout = BlockLayout<int64_t>;

// `group` is null where there is nobody to talk to.

// Sends inputs [B, S_rank, H_i, D_i] off; [S, B, X_rank] arrives in the buffer.
void launch_to_heads(
    at::TensorList inputs,
    const Layout& layout,
    int64_t chunk,
    const Group* group,
    const at::Tensor& buffer);

// Views [B, S, h_i, D_i] of what arrived.
std::vector<at::Tensor> views_by_heads(
    const at::Tensor& buffer, const Layout& layout, int64_t chunk);

// Sends inputs [B, S, h_i, D_i] off; blocks [S_rank, B, X_p] arrive in the buffer.
void launch_to_seq(
    at::TensorList inputs,
    const Layout& layout,
    int64_t chunk,
    const Group* group,
    const at::Tensor& buffer);

// Waits for the buffers of all chunks, and merges them to [B, S_rank, H_i, D_i].
std::vector<at::Tensor> merge_by_tokens(
    const std::vector<at::Tensor>& buffers, const Layout& layout);

// Waits, and makes the buffer hold all that a wait would find.
void settle(const at::Tensor& buffer, const Layout& layout, int64_t chunk);

// ---- how blocks lie in memory

inline int64_t item_of(const at::Tensor& x) {
  return static_cast<int64_t>(x.element_size());
}

inline char* data_of(const at::Tensor& x) {
  return static_cast<char*>(const_cast<void*>(x.const_data_ptr()));
}

// x [B, S, H, D] from (token, head) on.
inline View view_of(const at::Tensor& x, int64_t token, int64_t head) {
  return {
      data_of(x) + (token * x.stride(1) + head * x.stride(2)) * item_of(x),
      {x.stride(1), x.stride(0), x.stride(2), x.stride(3)}};
}

// Tensor i's part of a block [T, B, X]; `column` of X is where it begins.
inline View block_view(
    char* block, int64_t batch, int64_t columns, int64_t column, int64_t dim, int64_t item) {
  return {block + column * item, {batch * columns, columns, dim, 1}};
}

inline std::vector<int64_t> prefix_sums(const std::vector<int64_t>& counts) {
  std::vector<int64_t> sums{0};
  for (const int64_t count : counts) {
    sums.push_back(sums.back() + count);
  }
  return sums;
}

// Elements of each block that this rank gets from, or gives to, every rank: by
// heads [S_p, B, X_rank], by tokens [S_rank, B, X_p].
inline std::vector<int64_t> counts_by_heads(const Layout& layout, int64_t chunk) {
  std::vector<int64_t> counts;
  for (int64_t p = 0; p < layout.parts(); ++p) {
    counts.push_back(layout.seq_lens[p] * layout.batch * layout.columns(layout.rank, chunk));
  }
  return counts;
}

inline std::vector<int64_t> counts_by_tokens(const Layout& layout, int64_t chunk) {
  std::vector<int64_t> counts;
  for (int64_t p = 0; p < layout.parts(); ++p) {
    counts.push_back(layout.seq_lens[layout.rank] * layout.batch * layout.columns(p, chunk));
  }
  return counts;
}

}  // namespace deepsp
