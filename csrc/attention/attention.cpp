// Attention over a sharded sequence: an exchange there, any attention on full
// sequences, an exchange back. Composite: no kernel and no backward of its own.

#include "../common/checks.h"
#include "../exchange/ops.h"
#include "cell.h"

namespace deepsp {
namespace {

constexpr const char* kNames[] = {"q", "k", "v"};

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

// The loop over the parts of a plan: what arrives with a chunk, attention of each cell, and what
// leaves. While attention works on a chunk, the others are on their way.
at::Tensor attend(
    const Tensors& inputs,
    const SymPlan& plan,
    const Asked& asked,
    bool tokens_first,
    const Given& given) {
  const HeadLayout& heads = plan.heads;
  const std::vector<int64_t>& num_heads = heads.num_heads();
  const Tensors arriving = seq_to_heads_start(given, {{"inputs", inputs}, {"last_first", false}});
  Tensors ks, vs, leaving;
  for (int64_t chunk = 0; chunk < plan.chunks(); ++chunk) {
    const Tensors arrived = seq_to_heads_wait(
        given, {{"buffer", arriving[chunk]},
                {"num_heads", num_heads},
                {"head_dims", plan.head_dims},
                {"batch", plan.batch},
                {"chunk", chunk},
                {"chunks", plan.chunks()},
                {"tokens_first", tokens_first}});
    const size_t cells = heads.cells(plan.rank, chunk).size();
    if (arrived.size() > cells) {
      ks.push_back(arrived[cells]);
      vs.push_back(arrived[cells + 1]);
    }
    Tensors outputs;
    for (size_t n = 0; n < cells; ++n) {
      const CellOf cell{heads, plan.rank, chunk, static_cast<int64_t>(n)};
      outputs.push_back(
          attention_of_cell(arrived[n], kv_of_cell(ks, cell), kv_of_cell(vs, cell), asked, cell));
    }
    if (plan.chunks() == 1 && !plan.cuts_queries()) {
      const Tensors out = heads_to_seq(
          given, {{"inputs", outputs},
                  {"num_heads", std::vector<int64_t>{num_heads[0]}},
                  {"tokens_first", tokens_first}});
      return out[0];
    }
    leaving.push_back(heads_to_seq_start(
        given, {{"inputs", outputs},
                {"num_heads", std::vector<int64_t>{num_heads[0]}},
                {"chunk", chunk},
                {"chunks", plan.chunks()},
                {"tokens_first", tokens_first}}));
  }
  const Tensors out = heads_to_seq_wait(
      given, {{"buffers", leaving},
              {"num_heads", std::vector<int64_t>{num_heads[0]}},
              {"head_dims", SymInts{plan.head_dims[2]}},
              {"batch", plan.batch},
              {"tokens_first", tokens_first}});
  return out[0];
}

c10::IValue distributed_attention(const Given& given) {
  const Order order = order_of(given["layout"]);
  Tensors inputs;  // [B, S_rank, H_i, D_i]
  for (const char* name : kNames) {
    const at::Tensor x = given[name];
    check_four(x, name, order.names);
    inputs.push_back(x.permute(order.dims));
  }
  const SymPlan plan = plan_by_tokens(inputs, given, kNames);
  check_heads(inputs[0], inputs[1], inputs[2], given["enable_gqa"]);
  const Asked asked(given);
  check_asked(
      asked.attn_mask, asked.dropout_p, asked.is_causal, asked.pattern(), inputs[0].scalar_type(),
      plan.batch, plan.heads.num_heads(0), plan.total());
  if (asked.attn_mask.has_value()) {
    check_device(*asked.attn_mask, "attn_mask", inputs[0], "q");
  }
  // "bhsd" returns what SDPA does: a transposed view of memory with the tokens first, so that the
  // caller joins the heads without a copy.
  const bool tokens_first = static_cast<std::string_view>(given["layout"]) == "sbhd";
  const std::optional<int64_t> kv_chunk = given["kv_chunk"];
  if (!kv_chunk.has_value()) {
    return attend(inputs, plan, asked, tokens_first, given).permute(order.dims);
  }
  check_only_pattern(asked.attn_mask, asked.dropout_p);
  const int64_t chunks = given["chunks"];
  TORCH_CHECK_VALUE(
      chunks == 1, "expected chunks to be 1 with kv_chunk, got ", chunks,
      "; keys and values come in parts of tokens then, not of heads");
  const Tensors found =
      streamed_attention(given, {{"q", inputs[0]}, {"k", inputs[1]}, {"v", inputs[2]}});
  const at::Tensor& out = found[0];
  return (tokens_first ? out.transpose(0, 1).contiguous().transpose(0, 1) : out)
      .permute(order.dims);  // each order is its own inverse
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  implement<distributed_attention>(m, "distributed_attention");
}

}  // namespace deepsp
