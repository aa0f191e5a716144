#include "pieces.h"

#include <algorithm>
#include <limits>

namespace deepsp {

namespace {

Range common(Range a, Range b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

void add_piece(std::vector<Piece>& pieces, const Piece& piece) {
  if (piece.queries.size() > 0 && piece.keys.size() > 0) {
    pieces.push_back(piece);
  }
}

// Adds the pieces of the queries in a range, which lie `before` tokens behind their numbers.
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
      add_piece(pieces, {document.rows, of, sees, sight, before});
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

// Adds what queries see of ancestors' keys. Those of all descendants see them at once, where no
// window ends among them.
void add_ancestors(
    const std::vector<Document>& documents,
    int64_t left,
    Range keys,
    Range queries,
    int64_t before,
    std::vector<Piece>& pieces) {
  int64_t deepest = 0;
  for (const Document& document : documents) {
    deepest = std::max(deepest, document.depth + document.tokens.size());
  }
  for (const Document& document : documents) {
    if (left == kUnlimited || left >= deepest) {
      const Range seen = common(document.tokens, keys);
      for (const Range& run : document.descendants) {
        add_piece(pieces, {document.rows, common(run, queries), seen, Sight::kAll, before});
      }
      continue;
    }
    const Range of = common(document.tokens, queries);
    for (int64_t n = document.parent; n >= 0 && of.size() > 0; n = documents[n].parent) {
      const Document& above = documents[n];
      const int64_t ahead =
          document.depth - document.tokens.begin - (above.depth - above.tokens.begin);
      const int64_t first = of.begin + ahead - left;  // that a query sees
      if (first >= above.tokens.end) {
        break;
      }
      const Range seen = common(common(above.tokens, keys), {first, above.tokens.end});
      const Range see = common(of, {of.begin, seen.end + left - ahead});
      const bool all = see.end - 1 + ahead - left <= seen.begin;
      add_piece(
          pieces, {document.rows, see, seen, all ? Sight::kAll : Sight::kBand, before, ahead});
    }
  }
}

}  // namespace

void join_tree(std::vector<Document>& documents) {
  for (Document& document : documents) {
    if (document.parent >= 0) {
      const Document& parent = documents[document.parent];
      document.depth = parent.depth + parent.tokens.size();
    }
    for (int64_t n = document.parent; n >= 0; n = documents[n].parent) {
      std::vector<Range>& runs = documents[n].descendants;
      if (!runs.empty() && runs.back().end == document.tokens.begin) {
        runs.back().end = document.tokens.end;
      } else {
        runs.push_back(document.tokens);
      }
    }
  }
}

std::vector<Piece> pieces_of(
    const std::vector<Document>& documents,
    Band band,
    Range keys,
    const std::vector<Range>& queries) {
  std::vector<Piece> pieces;
  const auto add = [&](Range range, int64_t before) {
    add_pieces(documents, band, keys, range, before, pieces);
    add_ancestors(documents, band.left, keys, range, before, pieces);
  };
  if (queries.empty()) {
    add({0, std::numeric_limits<int64_t>::max()}, 0);
  }
  int64_t count = 0;
  for (const Range& range : queries) {
    add(range, range.begin - count);
    count += range.size();
  }
  return pieces;
}

namespace {

// A document, or a part of one, whose queries and keys are the same tokens.
bool is_square(const Piece& piece) {
  return piece.queries.begin == piece.keys.begin && piece.queries.end == piece.keys.end;
}

KernelCall call_of(const Piece& piece, Band window) {
  return {piece, {}, static_cast<int32_t>(piece.queries.size()), window, 0};
}

// How many of the pieces from `at` on are neighbours in a row and as long as the first: 0 if that
// isn't a square, 1 if it is more than one row's.
size_t count_alike(const std::vector<Piece>& pieces, size_t at) {
  const Piece& first = pieces[at];
  if (!is_square(first)) {
    return 0;
  }
  size_t end = at + 1;
  for (; end < pieces.size() && first.rows.size() == 1; ++end) {
    const Piece& piece = pieces[end];
    if (!is_square(piece) || piece.rows.begin != first.rows.begin ||
        piece.queries.begin != pieces[end - 1].queries.end || piece.sight != first.sight ||
        piece.queries.size() != first.queries.size()) {
      break;
    }
  }
  return end - at;
}

constexpr size_t kMostRows = 32768;  // of a call of cuDNN's

// The part of so many tokens that is a multiple of a sixteenth of their power of two: 16 lengths
// between a power of two and the next.
int64_t rounded_down(int64_t tokens) {
  int64_t step = 1;
  while (step * 32 <= tokens) {
    step *= 2;
  }
  return tokens / step * step;
}

// Adds the dense calls that the pieces from `at` on begin with, and what such a call leaves of a
// document. Returns how many pieces that are.
size_t add_dense(
    const std::vector<Piece>& pieces, size_t at, DenseRule rule, std::vector<KernelCall>& calls) {
  const auto is_enough = [&](int64_t work) { return work / rule.from >= rule.from; };
  const Piece& first = pieces[at];
  const int64_t n = first.queries.size(), m = first.keys.size();
  if (first.sight == Sight::kBand) {
    return 0;
  }
  const auto add = [&](Piece piece, size_t count) {
    calls.push_back(call_of(piece, {}));
    calls.back().dense = static_cast<int64_t>(count);
  };
  const size_t alike = count_alike(pieces, at);
  if (alike == 0) {
    if (!rule.lengths_recur || !is_enough(std::min(n, m) * std::min(n, m))) {
      return 0;
    }
    add(first, 1);
    return 1;
  }
  if (!is_enough(static_cast<int64_t>(alike) * n * n)) {
    return 0;
  }
  if (alike > 1 || rule.lengths_recur) {
    size_t count = 1;  // few numbers of documents are planned, too
    while (count * 2 <= alike && count < kMostRows) {
      count *= 2;
    }
    Piece joined = first;
    joined.queries.end = joined.keys.end = pieces[at + count - 1].queries.end;
    add(joined, count);
    return count;
  }
  const bool sees_more = at + 1 < pieces.size() && pieces[at + 1].rows.begin == first.rows.begin &&
                         pieces[at + 1].queries.begin == first.queries.begin;
  if (first.sight != Sight::kCausal || sees_more) {
    return 0;
  }
  Piece square = first, rest = first;
  square.queries.end = square.keys.end = rest.queries.begin = first.queries.begin + rounded_down(n);
  add(square, 1);
  if (rest.queries.size() > 0) {
    rest.sight = Sight::kBand;
    calls.push_back(call_of(rest, {kUnlimited, 0}));
  }
  return 1;
}

// Whether a call computes the next piece, too: the keys before its causal square, or one more
// document in its row.
bool takes_on(KernelCall& call, const Piece& piece, Band band, bool borders) {
  Piece& last = call.piece;
  if (call.dense > 0 || piece.rows.begin != last.rows.begin) {
    return false;
  }
  if (last.sight == Sight::kCausal && piece.queries.begin == last.queries.begin &&
      piece.queries.end == last.queries.end && piece.keys.end == last.keys.begin) {
    last.keys.begin = piece.keys.begin;
    return true;
  }
  if (!borders || !is_square(last) || !is_square(piece) ||
      last.queries.end != piece.queries.begin || last.rows.size() != 1 || piece.rows.size() != 1) {
    return false;
  }
  const int64_t first = last.queries.begin;
  if (call.borders.empty()) {
    call.borders = {0, static_cast<int32_t>(piece.queries.begin - first)};
  }
  call.borders.push_back(static_cast<int32_t>(piece.queries.end - first));
  // Not 1: flash attention then takes a path of its own, which orders its sums by head.
  call.longest = std::max({call.longest, static_cast<int32_t>(piece.queries.size()), int32_t{2}});
  call.window = band;
  last.queries.end = last.keys.end = piece.queries.end;
  last.sight = Sight::kBand;
  return true;
}

// Those of queries that don't see the last key, and those that do: only the former have a limit on
// the right.
void add_band(const Piece& piece, Band band, std::vector<KernelCall>& calls) {
  if (band.left != kUnlimited) {
    band.left -= piece.ahead;
  }
  const auto add = [&](const Piece& part, int64_t right) {
    const int64_t left =
        band.left == kUnlimited ? kUnlimited : band.left + part.keys.end - part.queries.end;
    if (part.queries.size() > 0 && part.keys.size() > 0) {
      calls.push_back(call_of(part, {left, right}));
    }
  };
  Piece seeing = piece;
  if (band.right != kUnlimited) {
    Piece limited = piece;
    limited.queries.end = std::min(piece.queries.end, piece.keys.end - band.right);
    limited.keys.end = std::min(piece.keys.end, limited.queries.end + band.right);
    seeing.queries.begin = std::max(piece.queries.begin, limited.queries.end);
    add(limited, 0);
  }
  add(seeing, kUnlimited);
}

}  // namespace

std::vector<KernelCall> kernel_calls(
    const std::vector<Piece>& pieces, Band band, DenseRule dense, bool borders) {
  std::vector<KernelCall> calls;
  for (size_t at = 0; at < pieces.size();) {
    if (const size_t count = add_dense(pieces, at, dense, calls)) {
      at += count;
      continue;
    }
    const Piece& piece = pieces[at++];
    if (!calls.empty() && takes_on(calls.back(), piece, band, borders)) {
      continue;
    }
    if (piece.sight == Sight::kBand && !is_square(piece)) {
      add_band(piece, band, calls);
    } else {
      calls.push_back(call_of(
          piece, piece.sight == Sight::kAll      ? Band{}
                 : piece.sight == Sight::kCausal ? Band{kUnlimited, 0}
                                                 : band));
    }
  }
  return calls;
}

}  // namespace deepsp
