#pragma once
// Who owns which heads. Pure integer arithmetic.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace deepsp {

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

// Where a run of heads of one tensor is read: by one rank, or (a kv head that
// several ranks' query heads share) by several.
struct HeadSegment {
  Range heads;
  std::vector<int64_t> readers;  // ranks, ascending
  std::vector<int64_t> chunks;   // the chunk in which that rank reads it
};

// The part of [0, total) that `index` of `parts` gets: like torch.tensor_split,
// the first `total % parts` get one more.
Range split_range(int64_t total, int64_t parts, int64_t index);

// The head layout of tensors that travel together. Tensor 0 is q: its heads are
// split over the ranks; head j of q reads head j / (H_0 / H_i) of tensor i. A
// rank's query heads are further cut into chunks, evenly. A head of another
// tensor travels to a rank once, with the first chunk whose query heads read it.
class HeadLayout {
 public:
  // num_heads: global, one per tensor; each divides num_heads[0].
  HeadLayout(std::vector<int64_t> num_heads, int64_t parts, int64_t chunks = 1);

  // The heads of tensor `i` that travel to or from `rank` with `chunk`.
  Range range(size_t i, int64_t rank, int64_t chunk) const;
  // The same over all chunks.
  Range range(size_t i, int64_t rank) const;
  // The heads of tensor `i` that this chunk's query heads read; those of them that
  // are not in range(i, rank, chunk) came with chunks before.
  Range reads(size_t i, int64_t rank, int64_t chunk) const;

  size_t tensors() const { return num_heads_.size(); }
  int64_t num_heads(size_t i) const { return num_heads_[i]; }
  int64_t parts() const { return parts_; }
  // The chunk count in force: what was asked for, at most as many as leave every
  // rank a query head in every chunk.
  int64_t chunks() const { return chunks_; }

  // Tensor i's heads cut into runs that the same ranks read in the same chunks.
  std::vector<HeadSegment> segments(size_t i) const;

 private:
  std::vector<int64_t> num_heads_;
  int64_t parts_;
  int64_t chunks_;
};

}  // namespace deepsp
