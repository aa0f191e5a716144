// Attention of a cell: some heads of a rank, and all of their queries or some.

#include "cell.h"

#include "../common/checks.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <algorithm>

namespace deepsp {

void check_only_pattern(const OptionalTensor& attn_mask, double dropout_p) {
  TORCH_CHECK_VALUE(
      !attn_mask.has_value(),
      "expected no attn_mask with documents, window_size, softcap, sinks, kv_chunk or return_lse, "
      "got one; put all into attn_mask, or leave it out");
  TORCH_CHECK_VALUE(
      dropout_p == 0,
      "expected dropout_p to be 0 with documents, window_size, softcap, sinks, kv_chunk or "
      "return_lse, got ",
      dropout_p);
}

Asked::Asked(const Given& given, bool return_log_sum)
    : BlockArguments(given),
      attn_mask(given.optional<at::Tensor>("attn_mask")),
      dropout_p(given["dropout_p"]),
      sharded_randomness(given["sharded_randomness"]),
      return_log_sum(return_log_sum) {
}

void check_asked(
    const OptionalTensor& attn_mask,
    double dropout_p,
    bool is_causal,
    const Pattern& pattern,
    at::ScalarType dtype,
    const c10::SymInt& batch,
    int64_t num_heads,
    const c10::SymInt& tokens) {
  check_attention(attn_mask, dropout_p, is_causal, dtype, batch, num_heads, tokens);
  if (pattern.given()) {
    check_only_pattern(attn_mask, dropout_p);
  }
  check_pattern(pattern, batch, tokens, num_heads);
}

namespace {

constexpr const char* kHeads[] = {"q", "k"};

// The part of a tensor that has an entry for each head of all ranks.
at::Tensor of_heads(const at::Tensor& x, int64_t dim, const Range& heads) {
  return x.narrow(dim, heads.begin, heads.size());
}

OptionalTensor sinks_of(const OptionalTensor& sinks, const Range& heads) {
  return sinks.has_value() ? OptionalTensor(of_heads(*sinks, 0, heads)) : std::nullopt;
}

// Which of the keys j these queries see: j <= i.
at::Tensor causal_mask(const at::Tensor& k, c10::SymIntArrayRef queries) {
  const auto options = k.options().dtype(at::kLong);
  Tensors rows;
  for (size_t n = 0; n < queries.size(); n += 2) {
    rows.push_back(at::arange(queries[n], queries[n + 1], options));
  }
  return at::arange(k.sym_size(1), options).le(at::cat(rows).unsqueeze(1));
}

// The rows of a global mask that belong to these query heads, and to these queries of them.
at::Tensor mask_of(at::Tensor mask, const Range& heads, c10::SymIntArrayRef queries) {
  if (mask.dim() >= 3 && mask.sym_size(-3) != 1) {
    mask = of_heads(mask, -3, heads);
  }
  if (queries.empty() || mask.sym_size(-2) == 1) {
    return mask;
  }
  Tensors rows;
  for (size_t n = 0; n < queries.size(); n += 2) {
    rows.push_back(mask.narrow_symint(-2, queries[n], queries[n + 1] - queries[n]));
  }
  return at::cat(rows, -2);
}

// The kv heads read [B, S, h, D], in order, as often as is needed for all to be read by as many
// query heads.
at::Tensor for_readers(const Tensors& pieces, const Readers& readers) {
  if (readers.uniform()) {
    return pieces.size() == 1 ? pieces[0] : at::cat(pieces, 2);
  }
  // Not an index tensor: that would be a constant in a traced graph, and a copy
  // to the device.
  Tensors repeated;
  for (const at::Tensor& piece : pieces) {
    for (const at::Tensor& head : piece.unbind(2)) {
      repeated.push_back(head.unsqueeze(2).expand_symint(
          {head.sym_size(0), head.sym_size(1), c10::SymInt(readers.counts[repeated.size()]),
           head.sym_size(2)}));
    }
  }
  return at::cat(repeated, 2);
}

// A cell of a rank and chunk, as the arguments of an op describe it.
CellOf cell_of(const Given& given, int64_t num_kv_heads) {
  const int64_t num_heads = given["num_heads"], ranks = given["ranks"], rank = given["rank"];
  const int64_t chunk = given["chunk"], cell = given["cell"];
  HeadLayout heads =
      head_layout({num_heads, num_kv_heads}, ranks, given["chunks"], given["query_parts"], kHeads);
  check_rank(rank, ranks);
  check_chunk(chunk, heads.chunks());
  const auto cells = static_cast<int64_t>(heads.cells(rank, chunk).size());
  TORCH_CHECK_VALUE(
      cell >= 0 && cell < cells, "expected 0 <= cell < ", cells, ", the number of cells of rank ",
      rank, ", got ", cell);
  return {std::move(heads), rank, chunk, cell};
}

c10::IValue kv_of_cell_op(const Given& given) {
  return kv_of_cell(given["received"], cell_of(given, given["num_kv_heads"]));
}

c10::IValue attention_of_cell_op(const Given& given) {
  const CellOf cell = cell_of(given, given["num_heads"]);
  const at::Tensor q = given["q"], k = given["k"], v = given["v"];
  const int64_t heads = cell.cell.heads.size(), num_heads = given["num_heads"];
  TORCH_CHECK_VALUE(
      q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && q.sym_size(2) == heads,
      "expected q, k and v of shape [batch, sequence, heads, head_dim], with the ", heads,
      " query heads of this chunk, got ", q.sym_sizes(), ", ", k.sym_sizes(), " and ",
      v.sym_sizes());
  const Asked asked(given);
  check_asked(
      asked.attn_mask, asked.dropout_p, asked.is_causal, asked.pattern(), q.scalar_type(),
      q.sym_size(0), num_heads, k.sym_size(1));
  return attention_of_cell(q, k, v, asked, cell).out;
}

c10::IValue check_attention_op(const Given& given) {
  const OptionalTensor documents = given.optional<at::Tensor>("documents");
  const OptionalTensor sinks = given.optional<at::Tensor>("sinks");
  check_asked(
      given["attn_mask"], given["dropout_p"], given["is_causal"],
      {documents, given["window_size"], given["softcap"], sinks, given["is_causal"]},
      given["dtype"], given["batch"], given["num_heads"], given["tokens"]);
  return {};
}

}  // namespace

at::Tensor kv_of_cell(at::TensorList received, const CellOf& of) {
  const HeadLayout& heads = of.heads;
  const Readers readers(of.cell.heads, heads.num_heads(0) / heads.num_heads(1));
  // With queries that are cut, all came with the first chunk.
  const int64_t came_until = heads.cuts_queries() ? 0 : of.chunk;
  TORCH_CHECK_VALUE(
      static_cast<int64_t>(received.size()) > came_until,
      "expected received to have the tensors of chunks 0 to ", came_until, ", got ",
      received.size(), " entries");
  Tensors pieces;  // the heads read, in order
  for (int64_t c = 0; c <= came_until; ++c) {
    const Range came = heads.range(1, of.rank, c);
    const at::Tensor& x = received[c];
    TORCH_CHECK_VALUE(
        x.dim() == 4 && x.sym_size(2) == came.size(), "expected received[", c,
        "] to have shape [batch, sequence, ", came.size(),
        ", head_dim], with the kv heads that rank ", of.rank, " of ", heads.ranks(),
        " receives in chunk ", c, ", got ", x.sym_sizes());
    const Range used = {std::max(came.begin, readers.kv.begin), std::min(came.end, readers.kv.end)};
    if (used.size() > 0) {
      pieces.push_back(
          used.size() == came.size() ? x : x.narrow(2, used.begin - came.begin, used.size()));
    }
  }
  return for_readers(pieces, readers);
}

Attention attention_by_blocks(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const Asked& how,
    const OptionalTensor& sinks,
    const SymInts& queries) {
  const Tensors results = blockwise_attention({
      {"q", q},
      {"k", k},
      {"v", v},
      {"documents", how.documents},
      {"is_causal", how.is_causal},
      {"window_size", how.window_size},
      {"scale", how.scale},
      {"softcap", how.softcap},
      {"sinks", sinks},
      {"queries", queries},
  });
  return {results[0], how.return_log_sum ? results[1].transpose(1, 2) : at::Tensor()};
}

Attention attention_of_cell(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const Asked& asked,
    const CellOf& of) {
  const Cell& cell = of.cell;
  const SymInts queries = of.queries(k.sym_size(1));
  const bool cut = !queries.empty();
  const Pattern pattern = asked.pattern();
  const bool by_blocks = pattern.given() || asked.return_log_sum;
  if (by_blocks || (cut && asked.is_causal && asked.dropout_p == 0)) {
    return attention_by_blocks(q, k, v, asked, sinks_of(asked.sinks, cell.heads), queries);
  }
  OptionalTensor mask;
  if (cut && asked.is_causal) {
    mask = causal_mask(k, queries);
  } else if (asked.attn_mask.has_value()) {
    mask = mask_of(*asked.attn_mask, cell.heads, queries);
  }
  const bool is_causal = asked.is_causal && !cut;
  if (asked.sharded_randomness && asked.dropout_p > 0 && of.heads.ranks() > 1) {
    const Tensors seed = dropout_seed({{"like", q}, {"rank", of.rank}, {"draws", of.draws()}});
    const at::Tensor out = attention_with_dropout({
        {"q", q},
        {"k", k},
        {"v", v},
        {"attn_mask", mask},
        {"dropout_p", asked.dropout_p},
        {"is_causal", is_causal},
        {"scale", asked.scale},
        {"seed", seed[0]},
    });
    return {out, {}};
  }
  const at::Tensor out =
      at::scaled_dot_product_attention(
          q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, asked.dropout_p, is_causal,
          asked.scale, q.sym_size(2) != k.sym_size(2))
          .transpose(1, 2);
  // Where there is no query, it doesn't depend on the mask; but a rank whose output needs no
  // gradient would leave the others alone in backward.
  const bool joins = cut && mask.has_value() && mask->requires_grad();
  return {joins ? out.add(mask->narrow(-1, 0, 0).sum()) : out, {}};
}

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  implement<kv_of_cell_op>(m, "_kv_of_cell");
  implement<attention_of_cell_op>(m, "_attention_of_cell");
  implement<check_attention_op>(m, "_check_attention");
}

}  // namespace deepsp
