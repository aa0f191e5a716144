#include "pieces.h"

#include <algorithm>

namespace deepsp {

std::vector<Piece> pieces_of(const std::vector<Document>& documents, Band band, Range keys) {
  std::vector<Piece> pieces;
  const auto add = [&](const Document& of, Range queries, Range seen, Sight sight) {
    if (queries.size() > 0 && seen.size() > 0) {
      pieces.push_back({of.rows, queries, seen, sight});
    }
  };
  for (const Document& document : documents) {
    const Range tokens = document.tokens;
    const Range seen = {std::max(tokens.begin, keys.begin), std::min(tokens.end, keys.end)};
    if (seen.size() <= 0 || document.rows.size() <= 0) {
      continue;
    }
    const auto reaches_all = [&](int64_t reach) {
      return reach == kUnlimited || reach >= tokens.size() - 1;
    };
    if (reaches_all(band.left) && reaches_all(band.right)) {
      add(document, tokens, seen, Sight::kAll);
    } else if (reaches_all(band.left) && band.right == 0) {
      add(document, seen, seen, Sight::kCausal);
      add(document, {seen.end, tokens.end}, seen, Sight::kAll);
    } else {
      const int64_t first =
          reaches_all(band.right) ? tokens.begin : std::max(tokens.begin, seen.begin - band.right);
      const int64_t end =
          reaches_all(band.left) ? tokens.end : std::min(tokens.end, seen.end + band.left);
      add(document, {first, end}, seen, Sight::kBand);
    }
  }
  return pieces;
}

}  // namespace deepsp
