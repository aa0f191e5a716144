// Attention over a sharded sequence: an exchange there, any attention on full
// sequences, an exchange back. Composite: no kernel and no backward of its own.

#include "../common/checks.h"
#include "../exchange/checks.h"
#include "../exchange/ops.h"
#include "../shares/checks.h"
#include "shares.h"

#include <ATen/ops/scaled_dot_product_attention.h>

#include <algorithm>

namespace deepsp {
namespace {

constexpr const char* kNames[] = {"q", "k", "v"};

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
    return attention_with_dropout(
        q, k, v, mask, dropout_p, is_causal, scale, std::get<0>(dropout_seed(q, rank, 1)));
  }
  const bool grouped = q.sym_size(2) != k.sym_size(2);
  return at::scaled_dot_product_attention(
             q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, dropout_p, is_causal,
             scale, grouped)
      .transpose(1, 2);
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
  const c10::SymInt counts[] = {num_heads, num_kv_heads, num_kv_heads};
  const c10::SymInt head_dims[] = {
      inputs[0].sym_size(3), inputs[1].sym_size(3), inputs[2].sym_size(3)};
  const Tensors arriving =
      seq_to_heads_start(inputs, seq_lens, heads.chunks(), false, rank, group_name);
  const auto attend = [&](int64_t chunk) {
    const Tensors qkv = seq_to_heads_wait(
        arriving[chunk], counts, head_dims, batch, seq_lens, chunk, heads.chunks(), rank,
        group_name, tokens_first);
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
    out = heads_to_seq({attend(0)}, {num_heads}, seq_lens, rank, group_name, tokens_first);
  } else {
    Tensors leaving;
    for (int64_t chunk = 0; chunk < heads.chunks(); ++chunk) {
      leaving.push_back(heads_to_seq_start(
          {attend(chunk)}, {num_heads}, seq_lens, chunk, heads.chunks(), rank, group_name,
          tokens_first));
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
  m.impl("attention_of_chunk", attention_of_chunk);
  m.impl("check_attention", check_attention_op);
}

}  // namespace deepsp
