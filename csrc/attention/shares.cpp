// Attention of some heads' queries, where ranks share heads.

#include "shares.h"

#include "../common/checks.h"
#include "../exchange/checks.h"
#include "../shares/ops.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <algorithm>

namespace deepsp {

at::Tensor mask_of(const at::Tensor& mask, const Range& heads) {
  return mask.dim() >= 3 && mask.sym_size(-3) != 1 ? mask.narrow(-3, heads.begin, heads.size())
                                                   : mask;
}

OptionalTensor sinks_of(const OptionalTensor& sinks, const Range& heads) {
  return sinks.has_value() ? OptionalTensor(sinks->narrow(0, heads.begin, heads.size()))
                           : std::nullopt;
}

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

namespace {

constexpr const char* kHeads[] = {"q", "k"};

at::Tensor kv_of_share(
    const at::Tensor& received,
    int64_t num_heads,
    int64_t num_kv_heads,
    int64_t query_parts,
    int64_t parts,
    int64_t rank,
    int64_t cell) {
  check_rank(rank, parts);
  const ShareLayout shares = share_layout({num_heads, num_kv_heads}, parts, query_parts, kHeads);
  const std::vector<Cell> cells = shares.cells(rank);
  TORCH_CHECK_VALUE(
      cell >= 0 && cell < static_cast<int64_t>(cells.size()), "expected 0 <= cell < ", cells.size(),
      ", the number of cells of rank ", rank, ", got ", cell);
  const Range all = shares.reads(1, rank);
  TORCH_CHECK_VALUE(
      received.dim() == 4 && received.sym_size(2) == all.size(),
      "expected received to have shape [batch, sequence, ", all.size(),
      ", head_dim], with the kv heads that rank ", rank, " of ", parts, " receives, got ",
      received.sym_sizes());
  const Readers readers(cells[cell].heads, num_heads / num_kv_heads);
  return for_readers(
      {received.narrow(2, readers.kv.begin - all.begin, readers.kv.size())}, readers);
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

// Attention of some heads' queries, those of ranges of tokens: q [B, n, h, D], k and v [B, S, h_kv,
// D]. draws: as of dropout_seed.
at::Tensor attention_of_queries(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const Asked& asked,
    Range heads,
    c10::SymIntArrayRef queries,
    int64_t rank,
    int64_t draws) {
  const Pattern& pattern = asked.pattern;
  if (pattern.given() || (asked.is_causal && asked.dropout_p == 0)) {
    const OptionalTensor sinks = sinks_of(pattern.sinks, heads);
    return std::get<0>(blockwise_attention(
        q, k, v, pattern.documents, asked.is_causal, pattern.window_size, asked.scale,
        pattern.softcap, sinks, queries));
  }
  OptionalTensor mask;
  if (asked.is_causal) {
    mask = causal_mask(k, queries);
  } else if (asked.attn_mask.has_value()) {
    mask = mask_of(*asked.attn_mask, heads);
    if (mask->sym_size(-2) != 1) {
      Tensors rows;
      for (size_t n = 0; n < queries.size(); n += 2) {
        rows.push_back(mask->narrow_symint(-2, queries[n], queries[n + 1] - queries[n]));
      }
      mask = at::cat(rows, -2);
    }
  }
  if (asked.sharded_randomness && asked.dropout_p > 0) {
    return attention_with_dropout(
        q, k, v, mask, asked.dropout_p, /*is_causal=*/false, asked.scale,
        std::get<0>(dropout_seed(q, rank, draws)));
  }
  const at::Tensor out =
      at::scaled_dot_product_attention(
          q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, asked.dropout_p,
          /*is_causal=*/false, asked.scale, q.sym_size(2) != k.sym_size(2))
          .transpose(1, 2);
  // Where there is no query, it doesn't depend on the mask; but a rank whose output needs no
  // gradient would leave the others alone in backward.
  return mask.has_value() && mask->requires_grad() ? out.add(mask->narrow(-1, 0, 0).sum()) : out;
}

}  // namespace

at::Tensor attention_of_shares(
    at::TensorList inputs,
    const Asked& asked,
    int64_t query_parts,
    int64_t chunks,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name) {
  const auto ranks = static_cast<int64_t>(seq_lens.size());
  std::vector<int64_t> counts;
  SymInts num_heads, head_dims;
  c10::SymInt total = 0;
  for (const at::Tensor& x : inputs) {
    counts.push_back(x.sym_size(2).guard_int(__FILE__, __LINE__));
    num_heads.push_back(x.sym_size(2));
    head_dims.push_back(x.sym_size(3));
  }
  for (const c10::SymInt& length : seq_lens) {
    total = total + length;
  }
  const c10::SymInt batch = inputs[0].sym_size(0);
  const ShareLayout shares(counts, ranks, query_parts);
  const std::vector<Cell> cells = shares.cells(rank);
  // As many draws on every rank, whatever the number of its cells.
  const auto last = static_cast<int64_t>(cells.size()) - 1;
  const int64_t draws = asked.dropout_p > 0 ? shares.most_cells() - last : 1;
  chunks = std::min<int64_t>(chunks, 2);
  const Tensors arriving =
      seq_to_shares_start(inputs, query_parts, seq_lens, chunks, false, rank, group_name);
  at::Tensor k, v;
  Tensors leaving;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const Tensors arrived = seq_to_shares_wait(
        arriving[chunk], num_heads, head_dims, batch, query_parts, seq_lens, chunk, chunks, rank,
        group_name);
    if (chunk == 0) {
      k = arrived[cells.size()];
      v = arrived[cells.size() + 1];
    }
    Tensors out;
    for (int64_t c = 0; c <= last; ++c) {
      const auto read = [&](const at::Tensor& x) {
        return kv_of_share(x, counts[0], counts[1], query_parts, ranks, rank, c);
      };
      SymInts queries;
      for (const auto& [begin, end] : shares.tokens(cells[c], total, chunk, chunks)) {
        queries.push_back(begin);
        queries.push_back(end);
      }
      out.push_back(attention_of_queries(
          arrived[c], read(k), read(v), asked, cells[c].heads, queries, rank,
          c < last ? 1 : draws));
    }
    leaving.push_back(shares_to_seq_start(
        out, {num_heads[0]}, query_parts, seq_lens, chunk, chunks, rank, group_name));
  }
  return shares_to_seq_wait(
      leaving, {num_heads[0]}, {head_dims[2]}, batch, query_parts, seq_lens, rank, group_name)[0];
}

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  m.impl("kv_of_share", kv_of_share);
}

}  // namespace deepsp
