#pragma once
// Who attends to whom in a row of documents, as rectangles of queries and keys. Pure integer
// arithmetic.

#include "heads.h"

#include <cstdint>
#include <limits>
#include <vector>

namespace deepsp {

// Tokens that attend to each other only: a range of tokens in each of some rows of a batch.
// A document with a parent goes on where that ends: its queries see all tokens of its ancestors,
// too, as far as a window goes back along this path. Queries are causal then.
struct Document {
  Range rows;
  Range tokens;
  int64_t parent = -1;  // an earlier document of these rows
  int64_t depth = 0;    // how many tokens its ancestors have
  // Tokens of documents that it is an ancestor of, in ascending ranges that don't touch.
  std::vector<Range> descendants = {};
};

// Sets the depth and descendants of documents whose parents are set.
void join_tree(std::vector<Document>& documents);

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
  int64_t ahead = 0;   // a query at i is at i + ahead among its keys, of an ancestor
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

// What one call of a GPU's kernels computes: a piece; or neighbours in a row, each of whose queries
// see keys of their own piece only.
struct KernelCall {
  Piece piece;  // all of them together
  // Flash attention of several: where each begins among the tokens of `piece`, and where the last
  // ends; empty: there is one.
  std::vector<int32_t> borders;
  int32_t longest = 0;  // of them
  // The lower right corner of a piece of n queries and m keys is on the band's diagonal: query i
  // sees the keys from i + m - n - left to i + m - n + right.
  Band window;
  // A dense call, which has neither borders nor a window: this many documents of one length, as its
  // rows. 0: flash attention.
  int64_t dense = 0;
};

// Which pieces become dense calls: those of about as much work as a square of `from` tokens.
// Kernels for dense calls are planned once for each length, for some hundred milliseconds: of a
// document whose length may be new, the greatest part is taken that few lengths share.
struct DenseRule {
  int64_t from = std::numeric_limits<int64_t>::max();
  bool lengths_recur = false;
};

// The pieces of one call of pieces_of, in as few calls as possible. band: that of the pieces. Flash
// attention takes a window that is as wide as there are keys for an unlimited one, which it isn't
// where there are more queries than keys: a band is cut so that this doesn't matter. borders:
// whether a call may have some.
std::vector<KernelCall> kernel_calls(
    const std::vector<Piece>& pieces, Band band, DenseRule dense, bool borders);

}  // namespace deepsp
