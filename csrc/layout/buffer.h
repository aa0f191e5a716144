#pragma once
// Where the parts of tensors that are gathered, or scattered, lie in the buffer, and in how many
// messages they are sent. In bytes.

#include "shards.h"

#include <algorithm>
#include <vector>

namespace deepsp {

using Shards = ShardLayout<int64_t>;

// Tensors of which a rank holds so much are sent on their own, straight from where they are to
// where they go; the others share a message, for one more copy each.
constexpr int64_t kInPlaceBytes = int64_t(512) << 10;
// Rows of a tensor that is sharded along an inner dimension are sent one by one: at most so many,
// each of at least so many bytes on every rank.
constexpr int64_t kRows = 8;
constexpr int64_t kRowBytes = int64_t(64) << 10;

struct BufferLayout {
  // point_to_point: any piece may go anywhere. Else blocks are sent in one collective, those that
  // are gathered padded to one size.
  BufferLayout(Shards shards, bool point_to_point);

  Shards shards;
  bool point_to_point;

  // Whether tensor i is sent on its own, from where it is, or to where it is wanted; rows(i)
  // messages to each rank then.
  bool in_place(size_t i) const { return in_place_[i]; }
  int64_t rows(size_t i) const { return shards[i].outer; }
  // Where rank p's part of tensor i begins along n.
  int64_t begin(size_t i, int64_t p) const { return begins_[i][p]; }
  // Whether it is whole where it arrives; else it is copied out.
  bool is_received_whole(size_t i) const { return in_place_[i] && (point_to_point || even_); }

  bool any_packed() const {
    return std::find(in_place_.begin(), in_place_.end(), false) != in_place_.end();
  }
  // The size of rank p's packed block.
  int64_t packed_bytes(int64_t p) const { return packed_[p].back(); }

  // Gathering: where rank p's part of tensor i begins, and its packed block.
  int64_t gathered(size_t i, int64_t p) const;
  int64_t gathered_block(int64_t p) const { return gathered_blocks_[p]; }
  // Scattering: rank p's contribution to this rank's part of tensor i, and to all packed.
  int64_t scattered(size_t i, int64_t p) const;
  int64_t scattered_block(int64_t p) const { return scattered_blocks_[p]; }

 private:
  std::vector<std::vector<int64_t>> begins_;
  std::vector<bool> in_place_;
  bool even_ = true;                          // of a single tensor
  std::vector<std::vector<int64_t>> packed_;  // [rank]: where tensors begin in its block
  std::vector<int64_t> gathered_;             // where tensors begin that are in place
  std::vector<int64_t> scattered_;
  std::vector<int64_t> gathered_blocks_;
  std::vector<int64_t> scattered_blocks_;
};

}  // namespace deepsp
