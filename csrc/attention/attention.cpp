// Attention over a sharded sequence: an exchange there, any attention on full
// sequences, an exchange back. Composite: no kernel and no backward of its own.

#include "../common/checks.h"
#include "../exchange/ops.h"
#include "cell.h"

#include <ATen/ops/cat.h>

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

// Attention to documents that blocks of ranks share, or that one rank has alone: while it works on
// the latter, the others are on their way.
at::Tensor attend_dealt(
    const Tensors& inputs,
    const std::vector<at::Tensor>& dealt,
    const Asked& asked,
    const Given& given) {
  const c10::SymIntArrayRef lens = given["seq_lens"];
  const int64_t rank = given["rank"], count = static_cast<int64_t>(dealt.size());
  TORCH_CHECK_VALUE(
      count > 0 && lens.size() % count == 0,
      "expected seq_lens to have the tokens of each rank, its own and those of each level, one "
      "entry of dealt for each, got ",
      lens.size(), " entries for ", count, " of dealt");
  const int64_t ranks = static_cast<int64_t>(lens.size()) / count;
  check_rank(rank, ranks, " in seq_lens");
  TORCH_CHECK_VALUE(
      inputs[0].sym_size(0) == 1, "expected a batch of one row with dealt, got ",
      inputs[0].sym_size(0), " rows; put all documents into one");
  TORCH_CHECK_VALUE(
      !asked.documents.has_value(),
      "expected no documents with dealt, got some; dealt has them for each level");
  const int64_t chunks = given["chunks"];
  TORCH_CHECK_VALUE(chunks == 1, "expected chunks to be 1 with dealt, got ", chunks);
  check_only_pattern(asked.attn_mask, asked.dropout_p);
  // Not size(), which makes all sizes constants.
  const auto heads_of = [](const at::Tensor& x) {
    return x.sym_size(2).guard_int(__FILE__, __LINE__);
  };
  const int64_t heads = heads_of(inputs[0]), kv_heads = heads_of(inputs[1]);
  const auto attend_to = [&](at::TensorList kv, const at::Tensor& q, const CellOf& cell,
                             size_t level) {
    const Asked here(asked, dealt[level]);
    check_pattern(here.pattern(), 1, kv[0].sym_size(1), heads);
    return attention_of_cell(q, kv_of_cell({kv[0]}, cell), kv_of_cell({kv[1]}, cell), here, cell);
  };

  const c10::SymInt& own = lens[rank];
  Tensors alone;
  for (const at::Tensor& x : inputs) {
    alone.push_back(x.narrow_symint(1, 0, own));
  }
  const CellOf all{head_layout({heads, kv_heads}, 1, 1, 1, kNames), 0, 0, 0};
  if (ranks == 1) {
    return attend_to({alone[1], alone[2]}, alone[0], all, 0);
  }
  Tensors shared;
  for (const at::Tensor& x : inputs) {
    shared.push_back(x.narrow_symint(1, own, x.sym_size(1) - own));
  }
  const SymInts rest = lens.slice(ranks).vec();
  // Of one level, all ranks', queries are cut as anywhere; of several, where a level needs it.
  const bool cut = count == 2 && heads < ranks;
  const auto how = [&](std::vector<With> more) {
    more.insert(
        more.end(),
        {{"seq_lens", rest}, {"levels", count - 1}, {"query_parts", cut ? HeadLayout::kAuto : 1}});
    return more;
  };
  const Tensors arriving =
      seq_to_heads_start(given, how({{"inputs", shared}, {"last_first", false}}));
  const at::Tensor out = attend_to({alone[1], alone[2]}, alone[0], all, 0);
  SymInts dims, sizes;
  for (const at::Tensor& x : shared) {
    dims.push_back(x.sym_size(3));
    sizes.push_back(x.sym_size(2));
  }
  const Tensors arrived = seq_to_heads_wait(
      given, how(
                 {{"buffer", arriving[0]},
                  {"num_heads", sizes},
                  {"head_dims", dims},
                  {"batch", 1},
                  {"chunk", 0}}));
  Tensors outputs;
  size_t next = 0;
  const std::vector<int64_t> widths = level_widths(ranks);
  for (size_t n = 0; n < widths.size(); ++n) {
    const int64_t width = widths[n], first = rank / width * width;
    if (first + width > ranks) {
      continue;  // in no block of this level
    }
    const HeadLayout layout =
        head_layout({heads, kv_heads}, width, 1, heads < width ? HeadLayout::kAuto : 1, kNames);
    const size_t cells = layout.cells(rank - first).size();
    for (size_t c = 0; c < cells; ++c) {
      outputs.push_back(attend_to(
          {arrived[next + cells], arrived[next + cells + 1]}, arrived[next + c],
          {layout, rank - first, 0, static_cast<int64_t>(c)}, n + 1));
    }
    next += cells + 2;
  }
  const std::vector<int64_t> of_q{heads};
  const at::Tensor leaving =
      heads_to_seq_start(given, how({{"inputs", outputs}, {"num_heads", of_q}, {"chunk", 0}}));
  const Tensors back = heads_to_seq_wait(
      given, how(
                 {{"buffers", Tensors{leaving}},
                  {"num_heads", of_q},
                  {"head_dims", SymInts{dims[2]}},
                  {"batch", 1},
                  {"tokens_first", false}}));
  return at::cat({out, back[0]}, 1);
}

c10::IValue distributed_attention(const Given& given) {
  const Order order = order_of(given["layout"]);
  Tensors inputs;  // [B, S_rank, H_i, D_i]
  for (const char* name : kNames) {
    const at::Tensor x = given[name];
    check_four(x, name, order.names);
    inputs.push_back(x.permute(order.dims));
  }
  const Asked asked(given);
  if (const auto dealt = given.optional<std::vector<at::Tensor>>("dealt")) {
    check_heads(inputs[0], inputs[1], inputs[2], given["enable_gqa"]);
    return attend_dealt(inputs, *dealt, asked, given).permute(order.dims);
  }
  const SymPlan plan = plan_by_tokens(inputs, given, kNames);
  check_heads(inputs[0], inputs[1], inputs[2], given["enable_gqa"]);
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
