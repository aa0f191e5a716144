#pragma once
// Who computes attention for which queries where heads alone can't be dealt out evenly. Queries are
// cut, keys and values stay whole: a rank gets all tokens of each kv head that its query heads
// read.
//
// A rank has cells: some heads, and of their queries the same share. A share [a, b) of n is the
// tokens [a, b) and, from the other end, those mirrored, both counted in 2n-ths of the sequence:
// its part of the work is (b - a) / n with causal attention and without. With two chunks, the
// mirrored ones are the second.

#include "heads.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace deepsp {

struct Cell {
  Range heads;  // query heads
  Range share;  // of their queries, in parts()
};

class ShareLayout {
 public:
  // num_heads: as of HeadLayout. query_parts: into how many parts the queries of a head are cut,
  // which divides the number of ranks: rank r has the heads r % (ranks / query_parts), and of their
  // queries the part r / (ranks / query_parts). kAuto: each rank has num_heads[0] / ranks heads, of
  // which the first and the last may be cut anywhere.
  static constexpr int64_t kAuto = 0;
  ShareLayout(std::vector<int64_t> num_heads, int64_t ranks, int64_t query_parts);

  int64_t ranks() const { return ranks_; }
  int64_t parts() const { return parts_; }
  int64_t query_parts() const { return query_parts_; }
  size_t tensors() const { return num_heads_.size(); }
  int64_t num_heads(size_t i) const { return num_heads_[i]; }
  std::vector<Cell> cells(int64_t rank) const;
  // Of the rank that has most.
  int64_t most_cells() const;
  // The heads of tensor `i` >= 1 that the cells of a rank read.
  Range reads(size_t i, int64_t rank) const;

  // The tokens of a cell's queries in a chunk, of `total` in the sequence: ascending ranges, as
  // pairs of begin and end.
  template <class Int>
  std::vector<std::pair<Int, Int>> tokens(
      const Cell& cell, const Int& total, int64_t chunk, int64_t chunks) const {
    const auto border = [&](int64_t part) { return Int(part) * total / Int(2 * parts_); };
    const Int begin = border(cell.share.begin), end = border(cell.share.end);
    // The last part meets its mirror image, with the token in the middle of an odd number.
    const bool joined = cell.share.end == parts_;
    const Int tail = joined ? end : total - end;
    if (chunks == 1 && joined) {
      return {{begin, total - begin}};
    }
    if (chunks == 1) {
      return {{begin, end}, {tail, total - begin}};
    }
    return {
        chunk == 0 ? std::pair<Int, Int>{begin, end} : std::pair<Int, Int>{tail, total - begin}};
  }

 private:
  std::vector<int64_t> num_heads_;
  int64_t ranks_;
  int64_t query_parts_;
  int64_t parts_;
};

// What an exchange to and from these shares moves. Tensor 0 is q; the others travel with chunk 0.
//
//   to shares: rank s sends p, for each cell of p in order, [n, B, h, D_0] of its tokens that are
//              queries of the cell; then [S_s, B, X_p], X_p as of BlockLayout for tensors 1 and on.
//   back:      the same blocks the other way.
template <class Int>
struct ShareBlocks {
  ShareLayout shares;
  std::vector<Int> head_dims;  // D_i
  Int batch;
  std::vector<Int> seq_lens;
  int64_t rank;
  int64_t chunks;

  Int total() const {
    Int sum = 0;
    for (const Int& length : seq_lens) {
      sum = sum + length;
    }
    return sum;
  }

  // X_p of the tensors that aren't cut, up to tensor i.
  Int columns(int64_t p, size_t i) const {
    Int sum = 0;
    for (size_t j = 1; j < i; ++j) {
      sum = sum + Int(shares.reads(j, p).size()) * head_dims[j];
    }
    return sum;
  }
  Int columns(int64_t p) const { return columns(p, shares.tensors()); }

  // How many queries a cell has.
  Int queries(const Cell& cell, int64_t chunk) const {
    Int sum = 0;
    for (const auto& [begin, end] : shares.tokens(cell, total(), chunk, chunks)) {
      sum = sum + (end - begin);
    }
    return sum;
  }

  // Elements that this rank gets as the owner of shares.
  Int elements_of_shares(int64_t chunk) const {
    Int sum = 0;
    for (const Cell& cell : shares.cells(rank)) {
      sum = sum + queries(cell, chunk) * Int(cell.heads.size()) * head_dims[0];
    }
    return batch * (chunk == 0 ? sum + total() * columns(rank) : sum);
  }
  // That it gives as the owner of tokens, at most: the queries of all chunks.
  Int elements_of_tokens(int64_t chunk) const {
    Int sum = Int(shares.num_heads(0)) * head_dims[0];
    for (int64_t p = 0; chunk == 0 && p < shares.ranks(); ++p) {
      sum = sum + columns(p);
    }
    return batch * seq_lens[rank] * sum;
  }
};

inline int64_t least(int64_t a, int64_t b) {
  return std::min(a, b);
}
inline int64_t most(int64_t a, int64_t b) {
  return std::max(a, b);
}
// Of symbolic sizes: no comparison, since a graph is for both answers.
template <class Int>
Int least(const Int& a, const Int& b) {
  return a.min(b);
}
template <class Int>
Int most(const Int& a, const Int& b) {
  return a.max(b);
}

// What of a block between the tokens of rank `source` and the cells of rank `owner` lies together,
// [tokens, B, columns]: of a cell's queries, or of a tensor that isn't cut.
template <class Int>
struct SharePart {
  size_t tensor;  // 0: queries
  size_t cell;    // or, behind the cells, which of the other tensors
  size_t range;   // of the cell's tokens
  Range heads;
  Int begin, end;  // tokens of the full sequence
  Int row;         // the first one's number among the queries of the cell, or in the sequence
  Int offset;      // in the block, in elements
  Int columns;
  Int column;  // where the tensor begins in them

  Int tokens() const { return end - begin; }
};

// The parts of a block, in order, some without tokens; and the number of its elements.
template <class Int>
std::pair<std::vector<SharePart<Int>>, Int> parts_of_block(
    const ShareBlocks<Int>& blocks, int64_t source, int64_t owner, int64_t chunk) {
  Int first = 0;
  for (int64_t r = 0; r < source; ++r) {
    first = first + blocks.seq_lens[r];
  }
  const Int last = first + blocks.seq_lens[source];
  std::vector<SharePart<Int>> parts;
  Int offset = 0;
  const std::vector<Cell> cells = blocks.shares.cells(owner);
  for (size_t c = 0; c < cells.size(); ++c) {
    const Int columns = Int(cells[c].heads.size()) * blocks.head_dims[0];
    const auto ranges = blocks.shares.tokens(cells[c], blocks.total(), chunk, blocks.chunks);
    Int row = 0;
    for (size_t n = 0; n < ranges.size(); ++n) {
      const auto& [from, to] = ranges[n];
      const Int begin = least(most(from, first), last);
      const Int end = most(begin, least(to, last));
      // Of a range that begins before this rank's tokens, or behind them, the row of none.
      const Int at = row + least(most(begin - from, Int(0)), to - from);
      parts.push_back({0, c, n, cells[c].heads, begin, end, at, offset, columns, Int(0)});
      offset = offset + (end - begin) * blocks.batch * columns;
      row = row + (to - from);
    }
  }
  if (chunk == 0) {
    const Int columns = blocks.columns(owner);
    for (size_t i = 1; i < blocks.shares.tensors(); ++i) {
      parts.push_back(
          {i, cells.size() + i - 1, 0, blocks.shares.reads(i, owner), first, last, first, offset,
           columns, blocks.columns(owner, i)});
    }
    offset = offset + blocks.seq_lens[source] * blocks.batch * columns;
  }
  return {parts, offset};
}

// Elements of the blocks between this rank's tokens and each rank's cells, or the other way round.
template <class Int>
std::vector<Int> counts_of_blocks(
    const ShareBlocks<Int>& blocks, int64_t chunk, bool mine_are_tokens) {
  std::vector<Int> counts;
  for (int64_t p = 0; p < blocks.shares.ranks(); ++p) {
    counts.push_back(
        parts_of_block(
            blocks, mine_are_tokens ? blocks.rank : p, mine_are_tokens ? p : blocks.rank, chunk)
            .second);
  }
  return counts;
}

// Of the buffer of a chunk: the same both ways, since each is the other's gradient.
template <class Int>
Int elements_of_buffer(const ShareBlocks<Int>& blocks, int64_t chunk) {
  return most(blocks.elements_of_shares(chunk), blocks.elements_of_tokens(chunk));
}

// How much of it nothing arrives in.
template <class Int>
Int padding_of(const ShareBlocks<Int>& blocks, int64_t chunk, bool mine_are_tokens) {
  Int left = elements_of_buffer(blocks, chunk);
  for (const Int& count : counts_of_blocks(blocks, chunk, mine_are_tokens)) {
    left = left - count;
  }
  return left;
}

}  // namespace deepsp
