// Attention over a sharded sequence: an exchange there, any attention on full
// sequences, an exchange back. Composite: no kernel and no backward of its own.

#include "../common/checks.h"
#include "../exchange/checks.h"
#include "../exchange/ops.h"
#include "../shares/checks.h"
#include "ops.h"
#include "readers.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <algorithm>

namespace deepsp {
namespace {

constexpr const char* kNames[] = {"q", "k", "v"};

// The rows of a global mask that belong to these query heads.
at::Tensor mask_of(const at::Tensor& mask, const Range& heads) {
  return mask.dim() >= 3 && mask.sym_size(-3) != 1 ? mask.narrow(-3, heads.begin, heads.size())
                                                   : mask;
}

OptionalTensor sinks_of(const OptionalTensor& sinks, const Range& heads) {
  return sinks.has_value() ? OptionalTensor(sinks->narrow(0, heads.begin, heads.size()))
                           : std::nullopt;
}

// Blocks take neither.
void check_only_pattern(const OptionalTensor& attn_mask, double dropout_p) {
  TORCH_CHECK_VALUE(
      !attn_mask.has_value(),
      "expected no attn_mask with documents, window_size, softcap, sinks or kv_chunk, got one; put "
      "all into attn_mask, or leave it out");
  TORCH_CHECK_VALUE(
      dropout_p == 0,
      "expected dropout_p to be 0 with documents, window_size, softcap, sinks or kv_chunk, got ",
      dropout_p);
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

at::Tensor kv_of_chunk(
    at::TensorList received,
    int64_t num_heads,
    int64_t num_kv_heads,
    int64_t chunk,
    int64_t chunks,
    int64_t rank,
    int64_t parts) {
  check_num_heads({num_heads, num_kv_heads}, parts, kNames);
  const HeadLayout layout({num_heads, num_kv_heads}, parts, chunks);
  check_chunk(chunk, layout.chunks());
  TORCH_CHECK_VALUE(
      static_cast<int64_t>(received.size()) > chunk,
      "expected received to have the tensors of chunks 0 to ", chunk, ", got ", received.size(),
      " entries");
  const Readers readers(layout, rank, chunk);
  Tensors pieces;  // the heads read, in order
  for (int64_t c = 0; c <= chunk; ++c) {
    const Range came = layout.range(1, rank, c);
    const at::Tensor& x = received[c];
    TORCH_CHECK_VALUE(
        x.dim() == 4 && x.sym_size(2) == came.size(), "expected received[", c,
        "] to have shape [batch, sequence, ", came.size(),
        ", head_dim], with the kv heads that rank ", rank, " of ", parts, " receives in chunk ", c,
        ", got ", x.sym_sizes());
    const Range used = {std::max(came.begin, readers.kv.begin), std::min(came.end, readers.kv.end)};
    if (used.size() > 0) {
      pieces.push_back(
          used.size() == came.size() ? x : x.narrow(2, used.begin - came.begin, used.size()));
    }
  }
  return for_readers(pieces, readers);
}

at::Tensor kv_of_share(
    const at::Tensor& received,
    int64_t num_heads,
    int64_t num_kv_heads,
    int64_t query_parts,
    int64_t parts,
    int64_t rank,
    int64_t cell) {
  check_rank(rank, parts);
  const ShareLayout shares = share_layout({num_heads, num_kv_heads}, parts, query_parts, kNames);
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

at::Tensor attention_of_chunk(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const OptionalTensor& attn_mask,
    double dropout_p,
    bool is_causal,
    std::optional<double> scale,
    int64_t num_heads,
    int64_t chunk,
    int64_t chunks,
    int64_t rank,
    int64_t parts,
    bool sharded_randomness,
    const OptionalTensor& documents,
    at::IntArrayRef window_size,
    std::optional<double> softcap,
    const OptionalTensor& sinks) {
  check_num_heads({num_heads}, parts, kNames);
  const HeadLayout layout({num_heads}, parts, chunks);
  check_chunk(chunk, layout.chunks());
  const Range heads = layout.range(0, rank, chunk);
  TORCH_CHECK_VALUE(
      q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && q.sym_size(2) == heads.size(),
      "expected q, k and v of shape [batch, sequence, heads, head_dim], with the ", heads.size(),
      " query heads of this chunk, got ", q.sym_sizes(), ", ", k.sym_sizes(), " and ",
      v.sym_sizes());
  check_attention(
      attn_mask, dropout_p, is_causal, q.scalar_type(), q.sym_size(0), num_heads, q.sym_size(1));
  const Pattern pattern{documents, window_size, softcap, sinks};
  if (pattern.given()) {
    check_only_pattern(attn_mask, dropout_p);
    check_pattern(pattern, q.sym_size(0), q.sym_size(1), num_heads);
    const OptionalTensor mine = sinks_of(sinks, heads);
    return std::get<0>(
        blockwise_attention(q, k, v, documents, is_causal, window_size, scale, softcap, mine, {}));
  }
  OptionalTensor mask;
  if (attn_mask.has_value()) {
    mask = mask_of(*attn_mask, heads);
  }
  if (sharded_randomness && dropout_p > 0 && parts > 1) {
    return std::get<0>(attention_with_dropout(q, k, v, mask, dropout_p, is_causal, scale, rank));
  }
  const bool grouped = q.sym_size(2) != k.sym_size(2);
  return at::scaled_dot_product_attention(
             q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, dropout_p, is_causal,
             scale, grouped)
      .transpose(1, 2);
}

// How queries attend to keys: the arguments of distributed_attention.
struct Asked {
  const OptionalTensor& attn_mask;
  double dropout_p;
  bool is_causal;
  std::optional<double> scale;
  bool sharded_randomness;
  const Pattern& pattern;
};

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
// D].
at::Tensor attention_of_queries(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const Asked& asked,
    Range heads,
    c10::SymIntArrayRef queries,
    int64_t rank) {
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
    return std::get<0>(attention_with_dropout(
        q, k, v, mask, asked.dropout_p, /*is_causal=*/false, asked.scale, rank));
  }
  return at::scaled_dot_product_attention(
             q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, asked.dropout_p,
             /*is_causal=*/false, asked.scale, q.sym_size(2) != k.sym_size(2))
      .transpose(1, 2);
}

// Over shares of queries; inputs [B, S_rank, H_i, D_i].
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
    for (size_t c = 0; c < cells.size(); ++c) {
      const auto read = [&](const at::Tensor& x) {
        return kv_of_share(
            x, counts[0], counts[1], query_parts, ranks, rank, static_cast<int64_t>(c));
      };
      SymInts queries;
      for (const auto& [begin, end] : shares.tokens(cells[c], total, chunk, chunks)) {
        queries.push_back(begin);
        queries.push_back(end);
      }
      out.push_back(
          attention_of_queries(arrived[c], read(k), read(v), asked, cells[c].heads, queries, rank));
    }
    leaving.push_back(shares_to_seq_start(
        out, {num_heads[0]}, query_parts, seq_lens, chunk, chunks, rank, group_name));
  }
  return shares_to_seq_wait(
      leaving, {num_heads[0]}, {head_dims[2]}, batch, query_parts, seq_lens, rank, group_name)[0];
}

// Where [B, S, H, D] stand among the dimensions of a layout.
struct Order {
  int64_t dims[4];
  const char* names;
};

Order order_of(std::string_view layout) {
  if (layout == "bshd") {
    return {{0, 1, 2, 3}, "[batch, sequence, heads, head_dim]"};
  }
  if (layout == "sbhd") {
    return {{1, 0, 2, 3}, "[sequence, batch, heads, head_dim]"};
  }
  TORCH_CHECK_VALUE(
      layout == "bhsd", "expected layout to be 'bshd', 'sbhd' or 'bhsd', got '", layout, "'");
  return {{0, 2, 1, 3}, "[batch, heads, sequence, head_dim]"};
}

// q, k and v [B, S_rank, H_i, D_i].
void check_heads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool grouped) {
  TORCH_CHECK_VALUE(
      k.sym_size(2) == v.sym_size(2), "expected v to have the number of heads of k (",
      k.sym_size(2), "), got ", v.sym_size(2));
  TORCH_CHECK_VALUE(
      grouped || q.sym_size(2) == k.sym_size(2),
      "expected k and v to have the number of heads of q (", q.sym_size(2), "), got ",
      k.sym_size(2), "; pass enable_gqa=True if several query heads share one kv head");
  TORCH_CHECK_VALUE(
      q.sym_size(3) == k.sym_size(3), "expected k to have the head_dim of q (", q.sym_size(3),
      "), got ", k.sym_size(3));
  TORCH_CHECK_VALUE(
      q.is_floating_point(), "expected q to have a floating-point dtype, got ",
      dtype_name(q.scalar_type()));
}

at::Tensor distributed_attention(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const OptionalTensor& attn_mask,
    double dropout_p,
    bool is_causal,
    std::optional<double> scale,
    bool enable_gqa,
    int64_t chunks,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name,
    std::string_view order_name,
    bool sharded_randomness,
    const OptionalTensor& documents,
    at::IntArrayRef window_size,
    std::optional<double> softcap,
    const OptionalTensor& sinks,
    std::optional<int64_t> kv_chunk,
    int64_t query_parts) {
  const Order order = order_of(order_name);
  Tensors inputs;  // [B, S_rank, H_i, D_i]
  for (const at::Tensor& x : {q, k, v}) {
    check_four(x, kNames[inputs.size()], order.names);
    inputs.push_back(x.permute(order.dims));
  }
  const bool cuts_queries = query_parts != 1;
  check_at_least(chunks, 1, "chunks");
  const c10::SymInt total =
      cuts_queries ? check_tokens_to_share(inputs, query_parts, seq_lens, 1, rank, kNames).total()
                   : check_by_tokens(inputs, seq_lens, chunks, rank, kNames).total();
  check_heads(inputs[0], inputs[1], inputs[2], enable_gqa);
  const int64_t num_heads = inputs[0].sym_size(2).guard_int(__FILE__, __LINE__);
  const int64_t num_kv_heads = inputs[1].sym_size(2).guard_int(__FILE__, __LINE__);
  const c10::SymInt batch = inputs[0].sym_size(0);
  check_attention(attn_mask, dropout_p, is_causal, q.scalar_type(), batch, num_heads, total);
  if (attn_mask.has_value()) {
    check_device(*attn_mask, "attn_mask", q, "q");
  }
  const Pattern pattern{documents, window_size, softcap, sinks};
  check_pattern(pattern, batch, total, num_heads);
  if (pattern.given() || kv_chunk.has_value()) {
    check_only_pattern(attn_mask, dropout_p);
  }
  // What heads first looks like is what SDPA returns: in memory the tokens come first, as whoever
  // joins the heads again wants them.
  const bool tokens_first = order_name == "sbhd";
  if (kv_chunk.has_value()) {
    TORCH_CHECK_VALUE(
        !cuts_queries, "expected query_parts to be 1 with kv_chunk, got ", query_parts);
    TORCH_CHECK_VALUE(
        chunks == 1, "expected chunks to be 1 with kv_chunk, got ", chunks,
        "; keys and values come in parts of tokens then, not of heads");
    const at::Tensor out = std::get<0>(streamed_attention(
        inputs[0], inputs[1], inputs[2], documents, is_causal, window_size, scale, softcap, sinks,
        *kv_chunk, seq_lens, rank, group_name));
    return (tokens_first ? out.transpose(0, 1).contiguous().transpose(0, 1) : out)
        .permute(order.dims);
  }
  if (cuts_queries) {
    const Asked asked{attn_mask, dropout_p, is_causal, scale, sharded_randomness, pattern};
    const at::Tensor out =
        attention_of_shares(inputs, asked, query_parts, chunks, seq_lens, rank, group_name);
    return (tokens_first ? out.transpose(0, 1).contiguous().transpose(0, 1) : out)
        .permute(order.dims);
  }
  const HeadLayout heads(
      {num_heads, num_kv_heads, num_kv_heads}, static_cast<int64_t>(seq_lens.size()), chunks);
  Tensors ks, vs;
  const auto attend = [&](const Tensors& qkv, int64_t chunk) {
    ks.push_back(qkv[1]);
    vs.push_back(qkv[2]);
    const auto read = [&](at::TensorList received) {
      return kv_of_chunk(
          received, num_heads, num_kv_heads, chunk, heads.chunks(), rank, heads.parts());
    };
    return attention_of_chunk(
        qkv[0], read(ks), read(vs), attn_mask, dropout_p, is_causal, scale, num_heads, chunk,
        heads.chunks(), rank, heads.parts(), sharded_randomness, documents, window_size, softcap,
        sinks);
  };
  Tensors out;
  if (heads.chunks() == 1) {
    out = heads_to_seq(
        {attend(seq_to_heads(inputs, seq_lens, rank, group_name), 0)}, {num_heads}, seq_lens, rank,
        group_name, tokens_first);
  } else {
    const c10::SymInt counts[] = {num_heads, num_kv_heads, num_kv_heads};
    const c10::SymInt head_dims[] = {
        inputs[0].sym_size(3), inputs[1].sym_size(3), inputs[2].sym_size(3)};
    const Tensors arriving =
        seq_to_heads_start(inputs, seq_lens, heads.chunks(), false, rank, group_name);
    Tensors leaving;
    for (int64_t chunk = 0; chunk < heads.chunks(); ++chunk) {
      const Tensors qkv = seq_to_heads_wait(
          arriving[chunk], counts, head_dims, batch, seq_lens, chunk, heads.chunks(), rank,
          group_name);
      leaving.push_back(heads_to_seq_start(
          {attend(qkv, chunk)}, {num_heads}, seq_lens, chunk, heads.chunks(), rank, group_name));
    }
    out = heads_to_seq_wait(
        leaving, {num_heads}, head_dims[2], batch, seq_lens, rank, group_name, tokens_first);
  }
  return out[0].permute(order.dims);  // each order is its own inverse
}

void check_attention_op(
    const OptionalTensor& attn_mask,
    double dropout_p,
    bool is_causal,
    at::ScalarType dtype,
    c10::SymInt batch,
    c10::SymInt num_heads,
    c10::SymInt tokens,
    const OptionalTensor& documents,
    at::IntArrayRef window_size,
    std::optional<double> softcap,
    const OptionalTensor& sinks) {
  check_attention(attn_mask, dropout_p, is_causal, dtype, batch, num_heads, tokens);
  const Pattern pattern{documents, window_size, softcap, sinks};
  if (pattern.given()) {
    check_only_pattern(attn_mask, dropout_p);
  }
  check_pattern(pattern, batch, tokens, num_heads.guard_int(__FILE__, __LINE__));
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  m.impl("distributed_attention", distributed_attention);
  m.impl("kv_of_chunk", kv_of_chunk);
  m.impl("kv_of_share", kv_of_share);
  m.impl("attention_of_chunk", attention_of_chunk);
  m.impl("check_attention", check_attention_op);
}

}  // namespace deepsp
