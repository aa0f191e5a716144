// The integer functions of the layout, as ops: a binding would break a full graph.

#include "common/checks.h"
#include "exchange/checks.h"
#include "layout/deal.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>

#include <cmath>

namespace deepsp {
namespace {

// More ranks than any group has: a list of as many lengths still fits in memory.
constexpr int64_t kMostParts = int64_t(1) << 24;

c10::IValue token_split(const Given& given) {
  const c10::SymInt total = given["total"];
  const int64_t parts = given["parts"];
  TORCH_CHECK_VALUE(
      parts > 0 && parts <= kMostParts, "expected 1 <= parts <= ", kMostParts, ", got ", parts);
  check_at_least(total, 0, "total");
  check_fits({total}, "total");
  SymInts lengths;
  for (int64_t p = 0; p < parts; ++p) {
    lengths.push_back((total + (parts - 1 - p)) / parts);
  }
  return lengths;
}

constexpr const char* kHeads[] = {"num_heads", "num_kv_heads"};

c10::IValue head_split(const Given& given) {
  const int64_t num_heads = given["num_heads"], num_kv_heads = given["num_kv_heads"];
  const int64_t parts = given["parts"], rank = given["rank"], chunk = given["chunk"];
  TORCH_CHECK_VALUE(
      parts < 1 || num_heads >= parts, "expected num_heads >= ", parts,
      ", the number of ranks of the group, got ", num_heads, "; use a group of at most ", num_heads,
      " ranks");
  TORCH_CHECK_VALUE(
      num_kv_heads > 0 && num_heads % num_kv_heads == 0,
      "expected num_kv_heads to divide num_heads (", num_heads, "), got ", num_kv_heads);
  const HeadLayout heads =
      head_layout({num_heads, num_kv_heads}, parts, given["chunks"], 1, kHeads);
  check_rank(rank, parts);
  check_chunk(chunk, heads.chunks());
  const Range q = heads.range(0, rank, chunk), kv = heads.range(1, rank, chunk);
  return std::vector<int64_t>{q.begin, q.end, kv.begin, kv.end};
}

// More ranks than any group has, and few enough that a batch is dealt out in seconds.
constexpr int64_t kMostDealt = int64_t(1) << 12;

c10::IValue deal_op(const Given& given) {
  const at::IntArrayRef lengths = given["lengths"];
  const int64_t ranks = given["ranks"], max_tokens = given["max_tokens"];
  const double linear = given["linear"], quadratic = given["quadratic"];
  TORCH_CHECK_VALUE(
      ranks > 0 && ranks <= kMostDealt, "expected 1 <= ranks <= ", kMostDealt, ", got ", ranks);
  TORCH_CHECK_VALUE(
      linear > 0 && quadratic >= 0 && std::isfinite(linear) && std::isfinite(quadratic),
      "expected finite costs, linear > 0 and quadratic >= 0, got ", linear, " and ", quadratic);
  const auto given_pairs = given["pairs"].value().toDoubleVector();
  TORCH_CHECK_VALUE(
      given_pairs.empty() || given_pairs.size() == lengths.size(),
      "expected pairs for each of the ", lengths.size(), " documents, got ", given_pairs.size());
  std::vector<double> pairs;
  int64_t total = 0;
  double cost = 0;
  for (size_t d = 0; d < lengths.size(); ++d) {
    check_at_least(lengths[d], 0, "the length of document ", d);
    TORCH_CHECK_VALUE(
        lengths[d] <= kMostElements - total, "expected lengths of at most ", kMostElements,
        " tokens in all, got more, at document ", d, "; pass numbers of tokens");
    total += lengths[d];
    const double length = double(lengths[d]);
    pairs.push_back(given_pairs.empty() ? length * length : given_pairs[d]);
    TORCH_CHECK_VALUE(
        pairs[d] >= 0 && pairs[d] <= length * length, "expected pairs of document ", d,
        " from 0 to its length squared, got ", pairs[d]);
    cost += linear * length + quadratic * pairs[d];
  }
  TORCH_CHECK_VALUE(
      cost < 1e300, "expected a batch to cost less than 1e300, got ", cost, " with ", linear,
      " a token and ", quadratic, " a pair of tokens; use another unit");
  check_at_least(max_tokens, 0, "max_tokens");
  const int64_t needed = total / ranks + (total % ranks > 0);
  TORCH_CHECK_VALUE(
      needed <= max_tokens, "expected documents of at most ranks * max_tokens = ", ranks, " * ",
      max_tokens, " tokens in all, got ", total, "; use max_tokens >= ", needed,
      ", or leave out documents");
  const Deal deal = deal_documents(lengths.vec(), pairs, ranks, max_tokens, linear, quadratic);
  std::vector<int64_t> numbers;
  for (const DocumentPlace& place : deal.places) {
    numbers.push_back(place.level);
    numbers.push_back(place.first);
  }
  for (const int64_t width : block_widths(ranks)) {
    numbers.push_back(width);
  }
  for (const std::vector<int64_t>& lens : deal.lens) {
    numbers.insert(numbers.end(), lens.begin(), lens.end());
  }
  return numbers;
}

c10::IValue cells(const Given& given) {
  const int64_t num_heads = given["num_heads"], ranks = given["ranks"], rank = given["rank"];
  const int64_t chunk = given["chunk"];
  const c10::SymInt total = given["total"];
  const HeadLayout heads =
      head_layout({num_heads}, ranks, given["chunks"], given["query_parts"], kHeads);
  check_rank(rank, ranks);
  check_chunk(chunk, heads.chunks());
  check_at_least(total, 0, "total");
  SymInts found;
  for (const Cell& cell : heads.cells(rank, chunk)) {
    found.push_back(cell.heads.begin);
    found.push_back(cell.heads.end);
    auto ranges = heads.tokens(cell, total, chunk);
    ranges.resize(2, {ranges.back().second, ranges.back().second});
    for (const auto& [begin, end] : ranges) {
      found.push_back(begin);
      found.push_back(end);
    }
  }
  return found;
}

c10::IValue chunks_in_force(const Given& given) {
  const int64_t num_heads = given["num_heads"];
  return head_layout({num_heads}, given["ranks"], given["chunks"], given["query_parts"], kHeads)
      .chunks();
}

c10::IValue indices_in(const Given& given) {
  const at::Tensor like = given["like"];
  const c10::SymIntArrayRef ranges = given["ranges"];
  TORCH_CHECK_VALUE(
      !ranges.empty() && ranges.size() % 2 == 0,
      "expected ranges to have the begin and end of each, got ", ranges.size(), " numbers");
  Tensors parts;
  for (size_t n = 0; n < ranges.size(); n += 2) {
    parts.push_back(at::arange(ranges[n], ranges[n + 1], like.options().dtype(at::kLong)));
  }
  return at::cat(parts);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  implement<token_split>(m, "token_split");
  implement<head_split>(m, "head_split");
  implement<deal_op>(m, "deal_documents");
  implement<cells>(m, "_cells");
  implement<chunks_in_force>(m, "_chunks_in_force");
}

TORCH_LIBRARY_IMPL(deepsp, CompositeExplicitAutograd, m) {
  implement<indices_in>(m, "_indices_in");
}

}  // namespace deepsp
