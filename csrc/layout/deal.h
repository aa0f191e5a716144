#pragma once
// Which ranks share which document of a batch, and how many tokens each rank holds. Pure
// arithmetic.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace deepsp {

// The widths of blocks of ranks, by level: 1, 2, 3, 4, 6, 8, 12, ... (powers of two, and three
// times those) below `ranks`, then `ranks` itself. A block begins at a multiple of the next power
// of two, so it lies within an aligned block of so many ranks; the block of the last level has all
// ranks.
std::vector<int64_t> block_widths(int64_t ranks);

// The first rank of the block of this width that has `rank`, if all its ranks exist.
std::optional<int64_t> block_of(int64_t rank, int64_t width, int64_t ranks);

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
// - Few elements leave their rank: (w - 1) / w of a block's. A search places documents in narrow
//   blocks within these two limits. For these places, no lens have a smaller largest cost.
// - The blocks in use are nested.
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
