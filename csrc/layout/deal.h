#pragma once
// Which ranks share which document of a batch, and how many tokens each rank holds. Pure
// arithmetic.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace deepsp {

// The widths of blocks of ranks, by level: 1, 2, 4, ... below `ranks`, then `ranks` itself. A block
// of width w < ranks has the ranks [k * w, (k + 1) * w), all of which exist. The block of the last
// level has all ranks.
std::vector<int64_t> block_widths(int64_t ranks);

// A document's tokens are split over the ranks of its block. Each of them computes 1 / width of the
// document's attention.
struct DocumentPlace {
  int64_t level = 0;
  int64_t first = 0;  // the block's first rank
};

struct Deal {
  std::vector<DocumentPlace> places;       // by document
  std::vector<std::vector<int64_t>> lens;  // by level and rank: tokens of that level's documents
};

// A rank costs `linear` for each token that it holds, and quadratic * pairs / width for each
// document of its blocks. pairs: by document, its length squared, or what is to stand for it.
//
// - No rank holds more than max_tokens.
// - With m as the mean cost of the ranks, no rank costs more than 1.03 * m or m + linear,
//   whichever is larger, up to rounding.
// - Documents are shared as narrowly as a search finds within these two. For the places found, no
//   other lens have a smaller largest cost.
//
// The result depends on the arguments only. 0 <= lengths; 1 <= ranks; sum(lengths) <= ranks *
// max_tokens < 2^63; 0 < linear; 0 <= quadratic; all costs are finite.
Deal deal_documents(
    const std::vector<int64_t>& lengths,
    const std::vector<double>& pairs,
    int64_t ranks,
    int64_t max_tokens,
    double linear,
    double quadratic);

}  // namespace deepsp
