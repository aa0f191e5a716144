#pragma once
// Who attends to whom in a row of documents, as rectangles of queries and keys. Pure integer
// arithmetic.

#include "heads.h"

#include <cstdint>
#include <vector>

namespace deepsp {

// Tokens that attend to each other only: a range of tokens in each of some rows of a batch.
struct Document {
  Range rows;
  Range tokens;
};

// A query at i sees keys from i - left to i + right; kUnlimited: as far as the document goes.
constexpr int64_t kUnlimited = -1;

struct Band {
  int64_t left = kUnlimited;
  int64_t right = kUnlimited;
};

// All queries of a rectangle see all of its keys; or it is a square, and a query sees the keys up
// to its own; or the band says which.
enum class Sight { kAll, kCausal, kBand };

struct Piece {
  Range rows;
  Range queries;
  Range keys;
  Sight sight = Sight::kAll;
  int64_t before = 0;  // tokens before these queries that have none
};

// What queries see of the keys in a range of tokens: every pair once, no pair that a document or
// the band forbids outside of a piece of kBand. Pieces of one call share queries only where keys
// are a part of a document, or queries are. queries: the tokens that have any, in ascending ranges;
// empty: all.
std::vector<Piece> pieces_of(
    const std::vector<Document>& documents,
    Band band,
    Range keys,
    const std::vector<Range>& queries);

}  // namespace deepsp
