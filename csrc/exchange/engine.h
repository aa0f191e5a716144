#pragma once
// One exchange on real tensors, in either direction: packed and launched, then
// landed. One copy before sending, none after arriving by heads, one after
// arriving by tokens; on the CPU a rank's own block goes straight to its place.
// Where ranks write into each other's memory, the first copy is all, wherever
// it is known how the result is to lie.

#include "../layout/blocks.h"
#include "../transport/departure.h"
#include "checks.h"
#include "../common/copies.h"

namespace deepsp {

using Layout = BlockLayout<int64_t>;

// An exchange whose buffers have the size that both directions have.
// Ranks that write into each other's memory agree on the order.
Departure departure_of(
    const Group* group,
    const Layout& layout,
    int64_t chunk,
    const at::Tensor& like,
    Order order = Order::packed);
// The same buffer on the meta device; those of all chunks.
at::Tensor meta_buffer(const SymBlockLayout& shapes, int64_t chunk, const at::Tensor& like);
std::vector<at::Tensor> meta_buffers(const SymBlockLayout& shapes, const at::Tensor& like);

// The group to talk to; null where there is nobody. With DEEPSP_DEBUG=1 its ranks have made the
// same call then: of this op, these sizes and this chunk.
std::unique_ptr<Group> group_of(
    const char* op,
    std::string_view name,
    const Layout& layout,
    const at::Tensor& like,
    int64_t chunk = 0);

// The buffers themselves, but for those that never travelled and have other strides.
std::vector<at::Tensor> dense(at::TensorList buffers);

// Anomaly mode looks for NaN in every gradient, in buffers on their way too: for
// it, an exchange arrives before its start returns.
void settle_if_watched(const at::Tensor& buffer, const Layout& layout, int64_t chunk);

// Where the block [S_rank, B, X_p] for rank p is to be made.
struct Place {
  int64_t p;
  char* block;
};
using MakeBlocks = std::function<void(c10::ArrayRef<Place>)>;

// Sends blocks off, each as soon as it is made; [S, B, X_rank] arrives in the
// buffer. Empty, or the place of this rank's own block, which is left to the
// caller to make: nobody else waits for it. `copied`: what `make` copies; none where it computes.
std::vector<Place> launch_to_heads(
    const MakeBlocks& make,
    at::TensorList copied,
    const Layout& layout,
    int64_t chunk,
    const Group* group,
    Departure& departure);

// The copies that make blocks of inputs [B, S_rank, H_i, D_i].
void pack_by_tokens(
    at::TensorList inputs, const Layout& layout, int64_t chunk, c10::ArrayRef<Place> places);

// Views [B, S, h_i, D_i] of what arrived.
std::vector<at::Tensor> views_by_heads(
    const at::Tensor& buffer, const SymBlockLayout& layout, int64_t chunk);

// Sends inputs [B, S, h_i, D_i] off; blocks [S_rank, B, X_p] arrive in the buffer. Ranks whose
// memory is reached order theirs as `reached` says; is_expected: merge_by_tokens most likely wants
// them so. Where it doesn't, it merges once more.
void launch_to_seq(
    at::TensorList inputs,
    const Layout& layout,
    int64_t chunk,
    const Group* group,
    Departure& departure,
    Order reached,
    bool is_expected);

// What a heads_to_seq exchange brings, block by block as it arrives.
class Arrivals {
 public:
  // Puts this rank's own block where it would have arrived.
  Arrivals(const at::Tensor& buffer, const Layout& layout, int64_t chunk);
  // Waits for rank p's block.
  void wait(int64_t p);
  // Of rank p's block, `heads` of tensor i: [S_rank·B, heads·D_i].
  at::Tensor part(size_t i, int64_t p, Range heads) const;
  // Rank p's whole block: [S_rank·B, X_p]. Of one tensor, or whole().
  at::Tensor block(int64_t p) const;
  // Whether a block of several tensors lies in one piece.
  bool whole() const { return order_ == Order::packed; }
  // Waits for what is left. A buffer is waited for once.
  void finish();

 private:
  at::Tensor buffer_;
  const Layout& layout_;
  int64_t chunk_;
  Order order_;
  std::unique_ptr<Flight> flight_;
};

// The same as Arrivals::block, of a buffer that was waited for.
at::Tensor landed_block(const at::Tensor& buffer, const Layout& layout, int64_t chunk, int64_t p);

// Waits for a buffer by tokens that nobody has waited for; one that was waited for is
// left as it is.
void ensure_landed(const at::Tensor& buffer, const Layout& layout, int64_t chunk);

// The sum of matrices, taken as heads_to_seq takes it.
at::Tensor sum_of(const std::vector<at::Tensor>& parts);

// Waits for the buffers of all chunks, and merges them to [B, S_rank, H_i, D_i], contiguous or
// lying as [S_rank, B, H_i, D_i].
std::vector<at::Tensor> merge_by_tokens(
    const std::vector<at::Tensor>& buffers, const Layout& layout, bool tokens_first);
// The same side by side, as a matrix [S_rank·B, Σ H_i·D_i]. landed: nothing is on its way.
at::Tensor merge_to_rows(
    const std::vector<at::Tensor>& buffers, const Layout& layout, bool landed = false);

// Waits, and makes the buffer hold all that a wait would find.
void settle(const at::Tensor& buffer, const Layout& layout, int64_t chunk);

// ---- how blocks lie in memory

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

}  // namespace deepsp
