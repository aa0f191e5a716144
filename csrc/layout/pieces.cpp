#include "pieces.h"

#include <algorithm>
#include <limits>

namespace deepsp {

namespace {

Range common(Range a, Range b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

// Of the queries in a range, `before` tokens behind their numbers.
void add_pieces(
    const std::vector<Document>& documents,
    Band band,
    Range keys,
    Range queries,
    int64_t before,
    std::vector<Piece>& pieces) {
  for (const Document& document : documents) {
    const Range tokens = document.tokens;
    const Range seen = common(tokens, keys);
    if (seen.size() <= 0 || document.rows.size() <= 0) {
      continue;
    }
    const auto add = [&](Range of, Range sees, Sight sight) {
      if (of.size() > 0 && sees.size() > 0) {
        pieces.push_back({document.rows, of, sees, sight, before});
      }
    };
    const auto reaches_all = [&](int64_t reach) {
      return reach == kUnlimited || reach >= tokens.size() - 1;
    };
    if (reaches_all(band.left) && reaches_all(band.right)) {
      add(common(tokens, queries), seen, Sight::kAll);
    } else if (reaches_all(band.left) && band.right == 0) {
      const Range square = common(seen, queries);
      add(square, square, Sight::kCausal);
      add(square, {seen.begin, square.begin}, Sight::kAll);
      add(common({seen.end, tokens.end}, queries), seen, Sight::kAll);
    } else {
      const int64_t first =
          reaches_all(band.right) ? tokens.begin : std::max(tokens.begin, seen.begin - band.right);
      const int64_t end =
          reaches_all(band.left) ? tokens.end : std::min(tokens.end, seen.end + band.left);
      add(common({first, end}, queries), seen, Sight::kBand);
    }
  }
}

}  // namespace

std::vector<Piece> pieces_of(
    const std::vector<Document>& documents,
    Band band,
    Range keys,
    const std::vector<Range>& queries) {
  std::vector<Piece> pieces;
  if (queries.empty()) {
    add_pieces(documents, band, keys, {0, std::numeric_limits<int64_t>::max()}, 0, pieces);
  }
  int64_t count = 0;
  for (const Range& range : queries) {
    add_pieces(documents, band, keys, range, range.begin - count, pieces);
    count += range.size();
  }
  return pieces;
}

}  // namespace deepsp
