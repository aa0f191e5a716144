#include "deal.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

namespace deepsp {
namespace {

constexpr double kTolerance = 0.03;  // how far the largest cost may be above the mean
constexpr double kStep = 0.8;        // find_places
constexpr int kRounds = 24;
constexpr double kMostWork = 1e6;  // deal_documents; about 20 ms

// From a block to the next one of this width.
int64_t stride_of(int64_t width) {
  int64_t stride = 1;
  while (stride < width) {
    stride *= 2;
  }
  return stride;
}

// Blocks of ranks are nested: the parent of a block is the narrowest block that contains it.
struct Block {
  int64_t first;
  int64_t width;
  size_t parent;  // of the last block: itself
};

struct Blocks {
  explicit Blocks(std::vector<int64_t> nested) : widths(std::move(nested)) {
    const int64_t ranks = widths.back();
    for (const int64_t width : widths) {
      begins.push_back(all.size());
      strides.push_back(stride_of(width));
      for (int64_t first = 0; first + width <= ranks; first += strides.back()) {
        all.push_back({first, width, 0});
      }
    }
    begins.push_back(all.size());
    for (size_t level = 0; level < widths.size(); ++level) {
      for (size_t n = begins[level]; n < begins[level + 1]; ++n) {
        size_t above = level + 1;
        while (above < levels() && block_of(all[n].first, widths[above], ranks) == std::nullopt) {
          ++above;
        }
        all[n].parent = above < levels() ? at(above, all[n].first) : n;
      }
    }
  }

  size_t levels() const { return widths.size(); }
  // The block of a level that begins at a rank, or has it.
  size_t at(size_t level, int64_t rank) const { return begins[level] + rank / strides[level]; }

  std::vector<int64_t> widths;
  std::vector<int64_t> strides;
  std::vector<size_t> begins;  // by level: its first block; at the end: the number of blocks
  std::vector<Block> all;
};

struct Document {
  size_t index;
  int64_t length;
  double attention;  // its cost on one rank
};

// Places documents one by one, so that a split of their tokens remains in which no rank exceeds
// the limits of tokens and cost.
//
// A rank with attention of cost a has room for min(max_tokens, (limit - a) / linear) tokens. By
// Hall's theorem a split exists if no block has negative slack: the room of its ranks, less the
// tokens of its documents and of those of the blocks within it.
class Placement {
 public:
  Placement(const Blocks& blocks, int64_t max_tokens, double linear, double limit)
      : attention(blocks.widths.back(), 0),
        tokens(blocks.all.size(), 0),
        blocks_(blocks),
        max_tokens_(max_tokens),
        linear_(linear),
        limit_(limit),
        lost_(attention.size() + 1) {
    for (const Block& block : blocks.all) {
      slack_.push_back(block.width * room(0));
    }
  }

  // Places a document in the block of a level that has the most slack per rank, its own and its
  // parents' considered, and returns the block; none if the document fits into no block.
  std::optional<size_t> place(size_t level, const Document& document) {
    std::optional<size_t> best;
    std::pair<double, double> most;
    for (size_t n = blocks_.begins[level]; n < blocks_.begins[level + 1]; ++n) {
      const double own = double(slack_[n]) / blocks_.all[n].width;
      double least = own;
      for (size_t at = n; at != blocks_.all[at].parent;) {
        at = blocks_.all[at].parent;
        least = std::min(least, double(slack_[at]) / blocks_.all[at].width);
      }
      // Among equal blocks take the last one, which may be in no block of the next width: fewer
      // documents can use it.
      if ((!best || std::pair{least, own} >= most) && fits(level, n, document)) {
        best = n;
        most = {least, own};
      }
    }
    if (best) {
      for_changes(level, *best, document, [&](size_t at, int64_t less) {
        slack_[at] -= less;
        return true;
      });
      tokens[*best] += document.length;
      const Block& block = blocks_.all[*best];
      for (int64_t r = block.first; r < block.first + block.width; ++r) {
        attention[r] += document.attention / block.width;
      }
    }
    return best;
  }

  std::vector<double> attention;  // by rank, its cost
  std::vector<int64_t> tokens;    // by block, of its own documents

 private:
  int64_t room(double attention) const {
    if (attention > limit_) {
      return -1;  // makes the rank's slack negative
    }
    const double tokens = std::floor((limit_ - attention) / linear_);
    return tokens < double(max_tokens_) ? int64_t(tokens) : max_tokens_;
  }

  bool fits(size_t level, size_t n, const Document& document) {
    return slack_[n] >= document.length &&
           for_changes(
               level, n, document, [&](size_t at, int64_t less) { return slack_[at] >= less; });
  }

  // Calls use(block, tokens) for all blocks to whose slack a document in block n makes a
  // difference, until it returns false. A document needs room for its tokens, and its attention
  // takes room from the block's ranks.
  template <class Use>
  bool for_changes(size_t level, size_t n, const Document& document, const Use& use) {
    const Block& block = blocks_.all[n];
    const int64_t end = block.first + block.width;
    lost_[block.first] = 0;  // lost_: room that the block's ranks before each one lose
    for (int64_t r = block.first; r < end; ++r) {
      const double more = attention[r] + document.attention / block.width;
      lost_[r + 1] = lost_[r] + room(attention[r]) - room(more);
    }
    for (size_t below = 0; below < level; ++below) {
      const int64_t width = blocks_.widths[below];
      for (int64_t r = block.first; r + width <= end; r += blocks_.strides[below]) {
        if (!use(blocks_.at(below, r), lost_[r + width] - lost_[r])) {
          return false;
        }
      }
    }
    for (size_t at = n;; at = blocks_.all[at].parent) {
      if (!use(at, lost_[end] + document.length)) {
        return false;
      }
      if (at == blocks_.all[at].parent) {
        return true;
      }
    }
  }

  const Blocks& blocks_;
  const int64_t max_tokens_;
  const double linear_;
  const double limit_;
  std::vector<int64_t> slack_;  // by block
  std::vector<int64_t> lost_;
};

// Places all documents, longest first, each in the narrowest block for which it isn't too long or
// too expensive, and that has room. Where one finds no room, those before it are shared more widely
// in the next round: a document may cost a rank less. In the end all ranks share all documents.
Placement find_places(
    const Blocks& blocks,
    const std::vector<Document>& documents,
    int64_t max_tokens,
    double linear,
    double limit,
    std::vector<DocumentPlace>& places) {
  double most = limit;
  for (int round = 0;; ++round, most *= kStep) {
    const bool all_shared = round == kRounds;
    Placement placement(
        blocks, max_tokens, linear, all_shared ? std::numeric_limits<double>::infinity() : limit);
    const bool placed = std::all_of(documents.begin(), documents.end(), [&](const Document& d) {
      for (size_t level = 0; level < blocks.levels(); ++level) {
        const double width = blocks.widths[level];
        const bool narrow = all_shared || d.length > width * max_tokens ||
                            linear * d.length + d.attention > width * most;
        if (narrow && level + 1 < blocks.levels()) {
          continue;
        }
        if (const std::optional<size_t> n = placement.place(level, d)) {
          places[d.index] = {int64_t(level), blocks.all[*n].first};
          return true;
        }
      }
      return false;
    });
    if (placed || all_shared) {
      return placement;
    }
  }
}

// Splits a block's tokens over its ranks, on top of the tokens they hold, so that the largest cost
// is least: up to a common level of cost, as water fills a basin.
std::vector<int64_t> fill(
    const Block& block,
    int64_t tokens,
    const double* attention,
    const int64_t* held,
    int64_t max_tokens,
    double linear) {
  const auto room = [&](double level) {
    std::vector<int64_t> result;
    for (int64_t i = 0; i < block.width; ++i) {
      const double more = std::floor((level - attention[i]) / linear) - double(held[i]);
      const int64_t most = max_tokens - held[i];
      result.push_back(more <= 0 ? 0 : more < double(most) ? int64_t(more) : most);
    }
    return result;
  };
  const auto sum = [](const std::vector<int64_t>& x) {
    return std::accumulate(x.begin(), x.end(), int64_t(0));
  };
  double below = 0;
  double above = 2 * (*std::max_element(attention, attention + block.width) + linear * max_tokens);
  const auto middle = [&] { return below + (above - below) / 2; };
  for (double level = middle(); below < level && level < above; level = middle()) {
    const int64_t fit = sum(room(level));
    below = fit <= tokens ? level : below;
    above = fit >= tokens ? level : above;
  }
  // Several ranks may get one more token at the same cost: the first ones do.
  std::vector<int64_t> added = room(below);
  const std::vector<int64_t> most = room(above);
  int64_t left = tokens - sum(added);
  for (int64_t i = 0; i < block.width; ++i) {
    const int64_t more = std::min(left, most[i] - added[i]);
    added[i] += more;
    left -= more;
  }
  return added;
}

// Splits the tokens of all blocks over their ranks: by level of `blocks` and rank.
std::vector<std::vector<int64_t>> split_tokens(
    const Blocks& blocks, const Placement& placement, int64_t max_tokens, double linear) {
  // Narrow blocks first: wider ones can even out what these leave. Each block's own best split is
  // best for all: how much room a block has left below a cost doesn't depend on its split.
  const int64_t ranks = blocks.widths.back();
  std::vector<std::vector<int64_t>> result;
  std::vector<int64_t> held(ranks, 0);
  for (size_t level = 0; level < blocks.levels(); ++level) {
    std::vector<int64_t> lens(ranks, 0);
    for (size_t n = blocks.begins[level]; n < blocks.begins[level + 1]; ++n) {
      const Block& block = blocks.all[n];
      const std::vector<int64_t> added = fill(
          block, placement.tokens[n], &placement.attention[block.first], &held[block.first],
          max_tokens, linear);
      std::copy(added.begin(), added.end(), lens.begin() + block.first);
    }
    for (int64_t r = 0; r < ranks; ++r) {
      held[r] += lens[r];
    }
    result.push_back(std::move(lens));
  }
  return result;
}

}  // namespace

std::vector<int64_t> block_widths(int64_t ranks) {
  std::vector<int64_t> widths;
  for (int64_t width = 1; width < ranks; width *= 2) {
    widths.push_back(width);
    if (width > 1 && width / 2 * 3 < ranks) {
      widths.push_back(width / 2 * 3);
    }
  }
  widths.push_back(ranks);
  return widths;
}

std::optional<int64_t> block_of(int64_t rank, int64_t width, int64_t ranks) {
  const int64_t stride = stride_of(width), first = rank / stride * stride;
  const bool has = rank < first + width && first + width <= ranks;
  return has ? std::optional(first) : std::nullopt;
}

Deal deal_documents(
    const std::vector<int64_t>& lengths,
    const std::vector<double>& pairs,
    int64_t ranks,
    int64_t max_tokens,
    double linear,
    double quadratic) {
  std::vector<Document> documents;
  int64_t total = 0;
  double cost = 0;
  for (size_t d = 0; d < lengths.size(); ++d) {
    total += lengths[d];
    cost += linear * double(lengths[d]) + quadratic * pairs[d];
    if (lengths[d] > 0) {
      documents.push_back({d, lengths[d], quadratic * pairs[d]});
    }
  }
  std::stable_sort(documents.begin(), documents.end(), [](const Document& a, const Document& b) {
    return a.length > b.length;
  });
  max_tokens = std::min(max_tokens, total);
  const double mean = cost / ranks;
  const double limit = std::max((1 + kTolerance) * mean, mean + linear);

  const std::vector<int64_t> widths = block_widths(ranks);
  Deal best;
  double least = std::numeric_limits<double>::infinity();
  int64_t part = 1;
  while (2 * part < ranks) {
    part *= 2;
  }
  // Nested blocks have powers of two ranks; or 3 * part ranks instead of 2 * part, for one part.
  // Each of these families of blocks is tried, until nothing is sent or it would take long.
  double work = 0;
  for (; part > 0 && least > 0 && work < kMostWork; part /= 2) {
    work += double(documents.size()) * double(ranks);
    std::vector<int64_t> nested;
    std::vector<size_t> levels;
    for (size_t level = 0; level < widths.size(); ++level) {
      const int64_t width = widths[level];
      if (width == ranks || (width % 3 == 0 ? width == 3 * part : width != 2 * part)) {
        nested.push_back(width);
        levels.push_back(level);
      }
    }
    const Blocks blocks(nested);
    std::vector<DocumentPlace> places(lengths.size());
    const Placement placement = find_places(blocks, documents, max_tokens, linear, limit, places);
    double sent = 0;
    for (size_t n = 0; n < blocks.all.size(); ++n) {
      const double width = blocks.all[n].width;
      sent += placement.tokens[n] * (width - 1) / width;
    }
    if (sent < least) {
      least = sent;
      best = {places, {widths.size(), std::vector<int64_t>(ranks, 0)}};
      for (DocumentPlace& place : best.places) {
        place.level = levels[place.level];
      }
      const auto lens = split_tokens(blocks, placement, max_tokens, linear);
      for (size_t n = 0; n < levels.size(); ++n) {
        best.lens[levels[n]] = lens[n];
      }
    }
  }
  return best;
}

}  // namespace deepsp
