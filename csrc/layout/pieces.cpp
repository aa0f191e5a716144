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

std::vector<FlashCall> flash_calls(const std::vector<Piece>& pieces, Band band) {
  std::vector<FlashCall> calls;
  // A document whose queries and keys are the same tokens.
  const auto is_square = [](const Piece& piece) {
    return piece.queries.begin == piece.keys.begin && piece.queries.end == piece.keys.end;
  };
  const auto add = [&](Piece piece, Band window) {
    calls.push_back({piece, {}, static_cast<int32_t>(piece.queries.size()), window});
  };
  for (const Piece& piece : pieces) {
    if (!calls.empty()) {
      Piece& last = calls.back().piece;
      if (last.sight == Sight::kCausal && piece.rows.begin == last.rows.begin &&
          piece.queries.begin == last.queries.begin && piece.keys.end == last.keys.begin) {
        last.keys.begin = piece.keys.begin;  // those before the square
        continue;
      }
    }
    if (is_square(piece)) {
      if (!calls.empty()) {
        FlashCall& last = calls.back();
        if (is_square(last.piece) && last.piece.queries.end == piece.queries.begin &&
            last.piece.rows.begin == piece.rows.begin && last.piece.rows.size() == 1 &&
            piece.rows.size() == 1) {
          const int64_t first = last.piece.queries.begin;
          if (last.borders.empty()) {
            last.borders = {0, static_cast<int32_t>(piece.queries.begin - first)};
          }
          last.borders.push_back(static_cast<int32_t>(piece.queries.end - first));
          // Not 1: flash attention then takes a path of its own, which orders its sums by head.
          last.longest =
              std::max({last.longest, static_cast<int32_t>(piece.queries.size()), int32_t{2}});
          last.piece.queries.end = last.piece.keys.end = piece.queries.end;
          last.piece.sight = Sight::kBand;
          last.window = band;
          continue;
        }
      }
      add(piece, piece.sight == Sight::kAll      ? Band{}
                 : piece.sight == Sight::kCausal ? Band{kUnlimited, 0}
                                                 : band);
      continue;
    }
    if (piece.sight != Sight::kBand) {
      add(piece, {});
      continue;
    }
    const auto left_of = [&](const Piece& part) {
      return band.left == kUnlimited ? kUnlimited : band.left + part.keys.end - part.queries.end;
    };
    Piece limited = piece, unlimited = piece;  // on the right
    if (band.right != kUnlimited) {
      limited.queries.end = std::min(piece.queries.end, piece.keys.end - band.right);
      limited.keys.end = std::min(piece.keys.end, limited.queries.end + band.right);
      unlimited.queries.begin = std::max(piece.queries.begin, limited.queries.end);
      if (limited.queries.size() > 0 && limited.keys.size() > 0) {
        add(limited, {left_of(limited), 0});
      }
    }
    if (unlimited.queries.size() > 0) {
      add(unlimited, {left_of(unlimited), kUnlimited});
    }
  }
  return calls;
}

}  // namespace deepsp
