#pragma once
// The plan of an exchange: which tokens of which heads every pair of ranks sends each other. Int is
// int64_t, or c10::SymInt where shapes are symbolic.
//
//   seq_to_heads: rank r, which holds the tokens [first(r), first(r + 1)) of all heads, sends every
//                 owner p the block of what p computes attention for of these tokens.
//   heads_to_seq: the same blocks the other way.
//
// With one chunk, an owner gets sections: some tokens of some heads, [tokens, B, columns]. A block
// has what its source holds of each section, one after another. Where an owner has one section,
// all ranks' blocks stack to it.
//
// Levels: not every token is everyone's. In a level of width w, each block of w ranks (deal.h)
// shares a sequence of its own, consecutive tokens each, whose heads are dealt out among them. A
// rank's tokens are those of the first level, then those of the next. Widths are 2, 3, 4, 6, ...
// and the number of ranks.

#include "deal.h"
#include "heads.h"

#include <optional>

namespace deepsp {

inline int64_t least(int64_t a, int64_t b) {
  return std::min(a, b);
}
inline int64_t most(int64_t a, int64_t b) {
  return std::max(a, b);
}
// Symbolic sizes aren't compared, since a graph is for both answers.
template <class Int>
Int least(const Int& a, const Int& b) {
  return a.min(b);
}
template <class Int>
Int most(const Int& a, const Int& b) {
  return a.max(b);
}

// Some heads of tensor `tensor`; `column` is where they begin among the section's.
template <class Int>
struct SectionHeads {
  size_t tensor;
  Range heads;
  Int column;
  Int columns;  // h · D
};

template <class Int>
struct TokenRange {
  Int begin, end;
  int64_t rank = -1;  // that holds them; -1: any
};

template <class Int>
struct Section {
  bool all_tokens;
  std::vector<TokenRange<Int>> tokens;  // ascending
  std::vector<SectionHeads<Int>> tensors;
  Int columns;
  size_t level = 0;

  // How many of its tokens come before `token` of the sequence.
  Int rows_before(const Int& token) const {
    if (all_tokens) {
      return token;
    }
    Int rows = 0;
    for (const auto& [begin, end, _] : tokens) {
      rows = rows + least(most(token - begin, Int(0)), end - begin);
    }
    return rows;
  }

  Int rows() const {
    Int rows = 0;
    for (const auto& [begin, end, _] : tokens) {
      rows = rows + (end - begin);
    }
    return rows;
  }
};

// The widths of levels: those of blocks of several ranks, and always all ranks.
inline std::vector<int64_t> level_widths(int64_t ranks) {
  std::vector<int64_t> widths = block_widths(ranks);
  if (widths.size() > 1) {
    widths.erase(widths.begin());
  }
  return widths;
}

template <class Int>
struct Level {
  int64_t width;
  HeadLayout heads;         // of `width` ranks
  std::vector<Int> lens;    // of every rank's tokens
  std::vector<Int> begins;  // the level's first one, of each rank's; and where its last one ends

  // The first rank of the block that has this one, if there is such a block.
  std::optional<int64_t> block(int64_t rank) const {
    return block_of(rank, width, static_cast<int64_t>(lens.size()));
  }
};

// What a block has of one tensor's heads in consecutive tokens: [tokens, B, columns].
template <class Int>
struct Part {
  size_t tensor;
  size_t result;  // which of the tensors that the owner gets with this chunk
  Range heads;
  Int begin, end;  // tokens of the full sequence
  Int row;         // of `begin` among the section's tokens
  Int offset;      // of these rows in the block, in elements
  Int columns;     // of a row
  Int column;      // where the tensor begins in it
  size_t level = 0;

  Int tokens() const { return end - begin; }
};

template <class Int>
class Plan {
 public:
  Plan(
      HeadLayout heads,
      std::vector<Int> head_dims,
      Int batch,
      std::vector<Int> seq_lens,  // of all levels: by level and rank
      int64_t rank,
      bool has_levels = false)
      : heads(std::move(heads)),
        head_dims(std::move(head_dims)),
        batch(std::move(batch)),
        seq_lens(std::move(seq_lens)),
        rank(rank),
        firsts_{Int(0)} {
    if (has_levels) {
      add_levels();
    }
    for (const Int& length : this->seq_lens) {
      firsts_.push_back(firsts_.back() + length);
    }
  }

  HeadLayout heads;
  std::vector<Int> head_dims;      // D_i
  Int batch;                       // B
  std::vector<Int> seq_lens;       // S_p
  int64_t rank;                    // this one
  std::vector<Level<Int>> levels;  // none: all ranks share all tokens

  int64_t ranks() const { return heads.ranks(); }
  int64_t chunks() const { return heads.chunks(); }
  bool cuts_queries() const { return heads.cuts_queries(); }
  // Whether all blocks that an owner gets stack to one section.
  bool stacks() const { return levels.empty() && !heads.cuts_queries(); }
  // The lengths as they were given.
  std::vector<Int> given_lens() const {
    std::vector<Int> given;
    for (const auto& level : levels) {
      given.insert(given.end(), level.lens.begin(), level.lens.end());
    }
    return levels.empty() ? seq_lens : given;
  }
  // The first token of rank p; first(ranks()) is the length S of the sequence.
  const Int& first(int64_t p) const { return firsts_[p]; }
  const Int& total() const { return firsts_.back(); }
  const Int& tokens() const { return seq_lens[rank]; }

  // What `owner` gets with a chunk: queries first, where they are cut. By level, if there are any.
  std::vector<Section<Int>> sections(int64_t owner, int64_t chunk) const {
    if (levels.empty()) {
      return sections(heads, total(), owner, chunk);
    }
    std::vector<Section<Int>> found;
    for (size_t n = 0; n < levels.size(); ++n) {
      const Level<Int>& level = levels[n];
      if (const auto first = level.block(owner)) {
        Int length = 0;
        for (int64_t p = *first; p < *first + level.width; ++p) {
          length = length + level.lens[p];
        }
        for (auto& section : sections(level.heads, length, owner - *first, chunk)) {
          section.tokens = of_ranks(level, *first, section);
          section.all_tokens = false;
          section.level = n;
          found.push_back(std::move(section));
        }
      }
    }
    return found;
  }

  // The parts of the block between a source and an owner, in order, some without tokens.
  std::vector<Part<Int>> parts(int64_t source, int64_t owner, int64_t chunk) const {
    std::vector<Part<Int>> found;
    const Int &first = this->first(source), &last = this->first(source + 1);
    Int offset = 0;
    size_t result = 0;
    for (const Section<Int>& section : sections(owner, chunk)) {
      Int row = 0;
      for (const auto& [from, to, holder] : section.tokens) {
        if (holder >= 0 && holder != source) {
          row = row + (to - from);
          continue;
        }
        const bool all = section.all_tokens, known = holder == source;
        const Int begin = known ? from : all ? first : least(most(from, first), last);
        const Int end = known ? to : all ? last : most(begin, least(to, last));
        // The row of a range's part that is empty is anything within the range.
        const Int at = known ? row
                       : all ? first
                             : row + least(most(begin - from, Int(0)), to - from);
        for (size_t i = 0; i < section.tensors.size(); ++i) {
          const auto& heads = section.tensors[i];
          found.push_back(
              {heads.tensor, result + i, heads.heads, begin, end, at, offset, section.columns,
               heads.column, section.level});
        }
        offset = offset + (end - begin) * batch * section.columns;
        row = row + (to - from);
      }
      result += section.tensors.size();
    }
    return found;
  }

  // Elements of the blocks of all sources before this one that `owner` gets.
  Int elements_before(int64_t source, int64_t owner, int64_t chunk) const {
    if (stacks()) {  // as below, without lists
      return first(source) * batch * columns(owner, chunk);
    }
    Int sum = 0;
    for (const Section<Int>& section : sections(owner, chunk)) {
      sum = sum + section.rows_before(first(source)) * batch * section.columns;
    }
    return sum;
  }

  // Elements of the block between a source and an owner.
  Int elements(int64_t source, int64_t owner, int64_t chunk) const {
    if (stacks()) {
      return seq_lens[source] * batch * columns(owner, chunk);
    }
    Int sum = 0;
    for (const Section<Int>& section : sections(owner, chunk)) {
      const Int rows = section.all_tokens ? seq_lens[source]
                                          : section.rows_before(first(source + 1)) -
                                                section.rows_before(first(source));
      sum = sum + rows * batch * section.columns;
    }
    return sum;
  }

  // Elements of the blocks between this rank, as the owner of heads or of tokens, and every rank.
  std::vector<Int> counts_by_heads(int64_t chunk) const {
    return counts([&](int64_t p) { return elements(p, rank, chunk); });
  }
  std::vector<Int> counts_by_tokens(int64_t chunk) const {
    return counts([&](int64_t p) { return elements(rank, p, chunk); });
  }

  // Elements that rank p exchanges as an owner of heads.
  Int elements_by_heads(int64_t p, int64_t chunk) const {
    if (stacks()) {
      return total() * batch * columns(p, chunk);
    }
    Int sum = 0;
    for (const Section<Int>& section : sections(p, chunk)) {
      sum = sum + section.rows() * batch * section.columns;
    }
    return sum;
  }

  // Columns that every owner of tokens exchanges; of queries that are cut, those of all chunks,
  // which is simpler. Of levels: of the one where these are most.
  Int columns_by_tokens(int64_t chunk) const {
    if (levels.empty()) {
      return columns_by_tokens(heads, chunk);
    }
    Int most_columns = 0;
    for (const auto& level : levels) {
      most_columns = most(most_columns, columns_by_tokens(level.heads, chunk));
    }
    return most_columns;
  }

  // Elements of rank p's buffer of a chunk, the same both ways: a buffer's gradient is the buffer
  // of the exchange back. by_tokens: columns_by_tokens(chunk).
  Int buffer_elements(int64_t p, int64_t chunk, const Int& by_tokens) const {
    return most(elements_by_heads(p, chunk), seq_lens[p] * batch * by_tokens);
  }
  Int buffer_elements(int64_t chunk) const {
    return buffer_elements(rank, chunk, columns_by_tokens(chunk));
  }

  // How much of the buffer this rank receives nothing in, by heads or by tokens.
  Int padding(int64_t chunk, bool to_heads) const {
    Int left = buffer_elements(chunk);
    for (const Int& count : to_heads ? counts_by_heads(chunk) : counts_by_tokens(chunk)) {
      left = left - count;
    }
    return left;
  }

  // The columns of owner p's section of whole heads; of tensor i among them; where that begins.
  Int columns(int64_t p, int64_t chunk) const { return column(heads.tensors(), p, chunk); }
  Int width(size_t i, int64_t p, int64_t chunk) const {
    return Int(heads.range(i, p, chunk).size()) * head_dims[i];
  }
  Int column(size_t i, int64_t p, int64_t chunk) const {
    Int sum = 0;
    for (size_t j = 0; j < i; ++j) {
      sum = sum + width(j, p, chunk);
    }
    return sum;
  }

 private:
  void add_levels() {
    const int64_t P = heads.ranks();
    std::vector<Int> sums(P, Int(0));
    auto next = seq_lens.begin();
    for (const int64_t width : level_widths(P)) {
      const int64_t parts = heads.num_heads(0) < width ? HeadLayout::kAuto : 1;
      levels.push_back(
          {width, HeadLayout(heads.num_heads(), width, 1, parts), {next, next + P}, sums});
      for (int64_t p = 0; p < P; ++p) {
        sums[p] = sums[p] + *next++;
      }
    }
    seq_lens = sums;
  }

  // The sections of one sequence that ranks share as `layout` says.
  std::vector<Section<Int>> sections(
      const HeadLayout& layout, const Int& length, int64_t owner, int64_t chunk) const {
    std::vector<Section<Int>> found;
    size_t others = 0;
    if (layout.cuts_queries()) {
      others = 1;
      for (const Cell& cell : layout.cells(owner, chunk)) {
        found.push_back({false, {}, {}, Int(0)});
        for (const auto& [begin, end] : layout.tokens(cell, length, chunk)) {
          found.back().tokens.push_back({begin, end});
        }
        add(found.back(), 0, cell.heads);
      }
      if (chunk > 0 || layout.tensors() == 1) {
        return found;
      }
    }
    found.push_back({true, {{Int(0), length}}, {}, Int(0)});
    for (size_t i = others; i < layout.tensors(); ++i) {
      add(found.back(), i, layout.range(i, owner, chunk));
    }
    return found;
  }

  // Where tokens of the sequence of a block are among all ranks' tokens.
  std::vector<TokenRange<Int>> of_ranks(
      const Level<Int>& level, int64_t first, const Section<Int>& section) const {
    std::vector<TokenRange<Int>> found;
    for (const auto& [begin, end, _] : section.tokens) {
      Int before = 0;
      for (int64_t p = first; p < first + level.width; ++p) {
        const Int &length = level.lens[p], at = this->first(p) + level.begins[p];
        const Int from = section.all_tokens ? Int(0) : least(most(begin - before, Int(0)), length);
        const Int to = section.all_tokens ? length : most(least(end - before, length), from);
        found.push_back({at + from, at + to, p});
        before = before + length;
      }
    }
    return found;
  }

  Int columns_by_tokens(const HeadLayout& layout, int64_t chunk) const {
    Int all = layout.cuts_queries() ? Int(layout.num_heads(0)) * head_dims[0] : Int(0);
    for (size_t i = layout.cuts_queries(); i < layout.tensors(); ++i) {
      if (layout.cuts_queries() && chunk > 0) {
        break;
      }
      for (int64_t owner = 0; owner < layout.ranks(); ++owner) {
        all = all + Int(layout.range(i, owner, chunk).size()) * head_dims[i];
      }
    }
    return all;
  }

  void add(Section<Int>& section, size_t i, Range range) const {
    const Int columns = Int(range.size()) * head_dims[i];
    section.tensors.push_back({i, range, section.columns, columns});
    section.columns = section.columns + columns;
  }

  template <class Count>
  std::vector<Int> counts(const Count& count) const {
    std::vector<Int> found;
    for (int64_t p = 0; p < ranks(); ++p) {
      found.push_back(count(p));
    }
    return found;
  }

  std::vector<Int> firsts_;  // and the sum of all
};

}  // namespace deepsp
