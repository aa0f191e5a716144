#pragma once
// Where the pieces of a gather, or of a reduce-scatter, lie in its buffer: bytes from its
// beginning.

#include "../layout/shards.h"

#include <vector>

namespace deepsp {

// Tensors of which a rank holds so much are sent on their own, straight from where they
// are to where they go; the others share a message, for one more copy each.
constexpr int64_t kInPlaceBytes = int64_t(512) << 10;

struct Plan {
  // point_to_point: any piece may go anywhere. Else blocks are of one size, and travel in
  // one collective.
  Plan(ShardLayout<int64_t> layout, bool point_to_point);

  ShardLayout<int64_t> layout;
  bool point_to_point;
  // Whether tensor i is whole where it arrives (gathered), or leaves from where it is
  // (scattered).
  std::vector<bool> in_place;

  bool any_packed() const { return packed_bytes(largest_) > 0; }
  // Of rank p's packed block.
  int64_t packed_bytes(int64_t p) const { return packed_[p].back(); }

  // Gathering: rank p's rows of tensor i, and its packed block.
  int64_t gathered(size_t i, int64_t p) const;
  int64_t gathered_block(int64_t p) const { return gathered_blocks_[p]; }
  // Scattering: rank p's contribution to this rank's rows of tensor i, and to all packed.
  int64_t scattered(size_t i, int64_t p) const;
  int64_t scattered_block(int64_t p) const { return scattered_blocks_[p]; }

 private:
  std::vector<std::vector<int64_t>> packed_;  // [rank]: where tensors begin in its block
  std::vector<int64_t> gathered_;             // where tensors begin that are in place
  std::vector<int64_t> scattered_;
  std::vector<int64_t> gathered_blocks_;
  std::vector<int64_t> scattered_blocks_;
  int64_t largest_ = 0;  // the rank with most packed
};

}  // namespace deepsp
