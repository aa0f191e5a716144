#pragma once
// One exchange on real tensors, in either direction: packed and launched, then received. Blocks are
// copied once before they are sent, and once where what a rank receives doesn't lie as it is
// wanted; on the CPU a rank's own block goes straight to its place. Where ranks write into each
// other's memory, they write into the receiver's result, if its strides are known.

#include "../common/copies.h"
#include "../transport/moves.h"
#include "checks.h"

namespace deepsp {

// An exchange whose buffers have the size that both directions have.
// Ranks that write into each other's memory agree on the order.
Transfer transfer_of(
    const Group& group,
    const Layout& plan,
    int64_t chunk,
    const at::Tensor& like,
    BlockOrder order = BlockOrder::packed);
// The buffers of all chunks, on the meta device.
std::vector<at::Tensor> meta_buffers(const SymPlan& plan, const at::Tensor& like);

// The group of a call. With DEEPSP_DEBUG=1 its ranks have made the same call: of this op, this plan
// and this chunk.
Group group_of(
    const char* op,
    std::string_view name,
    const Layout& plan,
    const at::Tensor& like,
    int64_t chunk = 0);

// The buffers themselves, but for those that were never sent and have other strides.
std::vector<at::Tensor> dense(at::TensorList buffers);

// Anomaly mode looks for NaN in every gradient, in buffers on their way too: for
// it, an exchange arrives before its start returns.
void settle_if_watched(const at::Tensor& buffer, const Layout& plan, int64_t chunk);

struct Extent;

// Sends the blocks of this rank's tokens, each as soon as it is made; the blocks of what this rank
// computes attention for arrive in the buffer. Returns nothing, or the place of this rank's own
// block, which the caller makes: no other rank waits for it. `copied`: what `make` copies; none
// where it computes.
std::vector<PackedBlock> launch_to_heads(
    const MakeBlocks& make,
    at::TensorList copied,
    const Layout& plan,
    int64_t chunk,
    Transfer& transfer);

// The copies that make blocks of inputs [B, S_rank, H_i, D_i].
void pack_by_tokens(
    at::TensorList inputs, const Layout& plan, int64_t chunk, c10::ArrayRef<PackedBlock> places);

// What a buffer of all blocks by heads holds of a plan, for this rank: for each section's tensors
// [B, tokens, h_i, D_i]. Views where the blocks stack to one section; else fresh. `padding`:
// elements behind this rank's own block; if given, all are fresh.
std::vector<at::Tensor> receive_by_heads(
    const at::Tensor& buffer,
    const SymPlan& plan,
    int64_t chunk,
    std::optional<int64_t> padding = std::nullopt);

// Sends inputs by heads; blocks by tokens arrive in the buffer. Ranks whose memory is reached order
// theirs as `reached` says; is_expected: merge_by_tokens most likely wants them so. Where it
// doesn't, it merges once more.
void launch_to_seq(
    at::TensorList inputs,
    const Layout& plan,
    int64_t chunk,
    Transfer& transfer,
    BlockOrder reached,
    bool is_expected);

// The copies that make blocks of inputs by heads.
void pack_by_heads(
    at::TensorList inputs, const Layout& plan, int64_t chunk, c10::ArrayRef<PackedBlock> places);

// Where the parts of blocks by tokens lie in the buffer of rank `source`.
class BlockPlaces {
 public:
  BlockPlaces(
      const Layout& plan, int64_t source, int64_t chunk, BlockOrder order, int64_t padding = 0);

  // Rank p's part: of the first element, and how far apart tokens, and sequences of the batch, are.
  struct At {
    int64_t offset;
    int64_t token;
    int64_t sequence;

    View view(char* buffer, int64_t dim, int64_t item) const {
      return {buffer + offset * item, {token, sequence, dim, 1}};
    }
  };
  At of(int64_t p, const Part<int64_t>& part) const;
  // Where its whole block begins, if the order is packed.
  int64_t block(int64_t p) const { return before_[p]; }

 private:
  const Layout& plan_;
  int64_t tokens_;  // of the source
  BlockOrder order_;
  std::vector<int64_t> before_;              // packed: elements before each rank's block
  std::vector<std::vector<int64_t>> lefts_;  // else: by tensor, columns before each rank's
};

// The copies of inputs by heads, where defined, into the buffer of rank p.
void place_by_tokens(
    at::TensorList inputs,
    const Layout& plan,
    int64_t chunk,
    int64_t p,
    char* buffer,
    BlockOrder order,
    std::vector<StridedCopy>& copies);

// Whether each head of tensor i is one rank's alone.
bool has_one_reader_each(const Layout& plan, size_t i);
// Whether tensor i arrives as it is wanted, [B, S_rank, H_i, D_i], with tokens first or not.
bool is_received_whole(const Layout& plan, size_t i, BlockOrder order, bool tokens_first);

// What a heads_to_seq exchange of whole heads brings, block by block as it arrives.
class ReceivedBlocks {
 public:
  // Puts this rank's own block where it would have been received.
  ReceivedBlocks(const at::Tensor& buffer, const Layout& plan, int64_t chunk);
  // Waits for rank p's block.
  void wait(int64_t p);
  // `heads` of tensor i in rank p's block: [S_rank·B, heads·D_i].
  at::Tensor part(size_t i, int64_t p, Range heads) const;
  // Rank p's whole block: [S_rank·B, X_p]. Of one tensor, or whole().
  at::Tensor block(int64_t p) const;
  // Whether a block of several tensors lies in one piece.
  bool whole() const { return order_ == BlockOrder::packed; }
  // Waits for what is left. A buffer is waited for once.
  void finish();

 private:
  at::Tensor buffer_;
  const Layout& plan_;
  int64_t chunk_;
  BlockOrder order_;
  std::unique_ptr<Flight> flight_;
};

// The same as ReceivedBlocks::block, of a buffer that was waited for.
at::Tensor received_block(const at::Tensor& buffer, const Layout& plan, int64_t chunk, int64_t p);

// Waits for a buffer by tokens, unless that was done already.
void ensure_waited(const at::Tensor& buffer, const Layout& plan, int64_t chunk);

// The sum of what several ranks have for some heads.
StridedSum sum_of(
    const std::vector<View>& sources, const View& to, const Extent& extent, at::ScalarType dtype);
// The sum of matrices, taken as heads_to_seq takes it.
at::Tensor sum_of(const std::vector<at::Tensor>& parts);

// Waits for the buffers of all chunks, and merges them to [B, S_rank, H_i, D_i], contiguous or
// lying as [S_rank, B, H_i, D_i]. paddings: elements behind this rank's own block in each buffer.
std::vector<at::Tensor> merge_by_tokens(
    const std::vector<at::Tensor>& buffers,
    const Layout& plan,
    bool tokens_first,
    const std::vector<int64_t>& paddings = {});
// The same side by side, as a matrix [S_rank·B, Σ H_i·D_i]. waited: nothing is in flight.
at::Tensor merge_to_rows(
    const std::vector<at::Tensor>& buffers, const Layout& plan, bool waited = false);

// Waits, and makes the buffer hold all that a wait would find.
void settle(const at::Tensor& buffer, const Layout& plan, int64_t chunk);

// ---- how blocks lie in memory

// x [B, S, H, D] from (token, head) on.
inline View view_of(const at::Tensor& x, int64_t token, int64_t head) {
  return {
      data_of(x) + (token * x.stride(1) + head * x.stride(2)) * item_of(x),
      {x.stride(1), x.stride(0), x.stride(2), x.stride(3)}};
}

// A part of a packed block, which begins at `block`.
inline View view_in_block(
    char* block, const Layout& plan, const Part<int64_t>& part, int64_t item) {
  return {
      block + (part.offset + part.column) * item,
      {plan.batch * part.columns, part.columns, plan.head_dims[part.tensor], 1}};
}

// Some heads of a part's view.
inline View heads_of(View view, const Part<int64_t>& part, Range heads, int64_t item) {
  view.data += (heads.begin - part.heads.begin) * view.stride[2] * item;
  return view;
}

// n = {tokens, batch, heads, head_dim} of a part.
struct Extent {
  int64_t n[kCopyDims];

  Extent(const Layout& plan, const Part<int64_t>& part) : Extent(plan, part, part.heads) {}
  // The extent of some of its heads.
  Extent(const Layout& plan, const Part<int64_t>& part, Range heads)
      : n{part.tokens(), plan.batch, heads.size(), plan.head_dims[part.tensor]} {}
};

}  // namespace deepsp
