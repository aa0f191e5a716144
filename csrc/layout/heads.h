#pragma once
// Who computes attention for which heads, and for which of their queries. Pure integer arithmetic.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace deepsp {

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

// A run of heads of one tensor, and the ranks that read it: one, or several where their query heads
// share a kv head.
struct HeadSegment {
  Range heads;
  std::vector<int64_t> readers;  // ranks, ascending
  std::vector<int64_t> chunks;   // the chunk in which each of them reads it
};

// Some query heads, and the same part of each one's queries. A part [a, b) of n is the tokens
// [a, b) and, from the other end, their mirror image, both counted in 2n-ths of the sequence: its
// work is (b - a) / n with causal attention and without.
struct Cell {
  Range heads;
  Range queries;
};

// The part of [0, total) that `index` of `parts` gets: like torch.tensor_split,
// the first `total % parts` get one more.
Range split_range(int64_t total, int64_t parts, int64_t index);

// The heads of tensors that are sent together. Tensor 0 is q: its heads are dealt out to the ranks;
// head j of q reads head j / (H_0 / H_i) of tensor i. A rank gets all tokens of these.
//
// Whole heads (query_parts 1): each rank has consecutive query heads, cut evenly into chunks. A
// head of another tensor is sent to a rank once, with the first chunk whose query heads read it.
//
// Cut queries: a head's queries are cut into query_parts, which divides the number of ranks; rank r
// has the heads r % (ranks / query_parts), and of their queries the part r / (ranks / query_parts).
// kAuto: each rank has num_heads[0] / ranks heads, of which the first and the last may be cut
// anywhere. Chunks are parts of the sequence then, at most two: the tokens [a, b) of each cell and
// those mirrored. The other tensors are sent with chunk 0.
class HeadLayout {
 public:
  static constexpr int64_t kAuto = 0;

  // num_heads: global, one per tensor; each divides num_heads[0].
  HeadLayout(
      std::vector<int64_t> num_heads, int64_t ranks, int64_t chunks = 1, int64_t query_parts = 1);

  size_t tensors() const { return num_heads_.size(); }
  int64_t num_heads(size_t i) const { return num_heads_[i]; }
  const std::vector<int64_t>& num_heads() const { return num_heads_; }
  int64_t ranks() const { return ranks_; }
  // The chunk count in force: what was asked for, at most as many as leave every rank a query head
  // in every chunk, or two.
  int64_t chunks() const { return chunks_; }
  int64_t query_parts() const { return query_parts_; }
  bool cuts_queries() const { return query_parts_ != 1; }

  // What a rank computes in a chunk: one cell where heads are whole.
  std::vector<Cell> cells(int64_t rank, int64_t chunk = 0) const;
  // Whether it has all queries of its heads, in one chunk.
  bool is_whole(const Cell& cell) const {
    return !cuts_queries() || (cell.queries.size() == parts_ && chunks_ == 1);
  }
  // The number of cells of the rank that has most.
  int64_t most_cells() const;

  // The heads of tensor i that are sent to or from `rank` with `chunk`. Queries that are cut are
  // sent by cells; this is the range from the first cell's heads to the last one's.
  Range range(size_t i, int64_t rank, int64_t chunk) const;
  // The same over all chunks.
  Range range(size_t i, int64_t rank) const;
  // The heads of tensor i that the queries of a chunk read; those of them that are not in
  // range(i, rank, chunk) came with chunks before.
  Range reads(size_t i, int64_t rank, int64_t chunk) const;

  // Tensor i's heads cut into runs that the same ranks read in the same chunks. Not of queries that
  // are cut. O(ranks · chunks), but for the readers listed.
  std::vector<HeadSegment> segments(size_t i) const;

  // The tokens of a cell's queries in a chunk, of `total` in the sequence: ascending ranges.
  template <class Int>
  std::vector<std::pair<Int, Int>> tokens(const Cell& cell, const Int& total, int64_t chunk) const {
    const auto border = [&](int64_t part) { return Int(part) * total / Int(2 * parts_); };
    const Int begin = border(cell.queries.begin), end = border(cell.queries.end);
    // The last part meets its mirror image, with the token in the middle of an odd number.
    const bool joined = cell.queries.end == parts_;
    const Int tail = joined ? end : total - end;
    const bool halved = cuts_queries() && chunks_ == 2;
    if (!halved && joined) {
      return {{begin, total - begin}};
    }
    if (!halved) {
      return {{begin, end}, {tail, total - begin}};
    }
    return {
        chunk == 0 ? std::pair<Int, Int>{begin, end} : std::pair<Int, Int>{tail, total - begin}};
  }

 private:
  // The query heads of a chunk.
  Range queries(int64_t rank, int64_t chunk) const;

  std::vector<int64_t> num_heads_;
  int64_t ranks_;
  int64_t query_parts_;
  int64_t parts_;  // that a head's queries are counted in
  int64_t chunks_;
};

}  // namespace deepsp
