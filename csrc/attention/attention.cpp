// Attention over a sharded sequence: an exchange there, any attention on full
// sequences, an exchange back. Composite: no kernel and no backward of its own.

#include "../common/checks.h"
#include "../exchange/ops.h"
#include "../transport/group.h"
#include "by_keys.h"
#include "cell.h"

#include <ATen/ops/cat.h>

namespace deepsp {
namespace {

constexpr const char* kNames[] = {"q", "k", "v"};

// Where [B, S, H, D] stand among the dimensions of a layout.
struct DimOrder {
  int64_t dims[4];
  const char* names;
};

DimOrder order_of(std::string_view layout) {
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

// Cells that attend to the same documents: heads dealt out among the ranks of a level.
struct LevelCells {
  HeadLayout heads;
  int64_t rank;  // among the level's ranks
  Asked asked;
};

// What is exchanged, and what attends to it.
struct Exchanged {
  Tensors inputs;  // q, k and v [B, S_rank, H_i, D_i]
  std::vector<int64_t> num_heads;
  std::vector<LevelCells> levels;
  int64_t chunks;
  bool tokens_first;
  std::vector<With> arguments = {};  // of the exchange, where the op's own aren't meant
};

// The loop over the parts of a plan: q, k and v of a chunk are received, each cell attends, and the
// outputs are sent. While attention works on a chunk, the others are in flight. `meanwhile` is
// called when all starts have been made.
template <class Meanwhile>
Attention attend(const Exchanged& parts, const Given& given, const Meanwhile& meanwhile) {
  const auto call = [&](const Op& op, std::vector<With> arguments) {
    arguments.insert(arguments.end(), parts.arguments.begin(), parts.arguments.end());
    return op(given, arguments);
  };
  SymInts dims;
  for (const at::Tensor& x : parts.inputs) {
    dims.push_back(x.sym_size(3));
  }
  const std::vector<int64_t> heads_of_q{parts.num_heads[0]};
  const With batch{"batch", parts.inputs[0].sym_size(0)};
  const With tokens_first{"tokens_first", parts.tokens_first}, chunks{"chunks", parts.chunks};
  const Tensors starts =
      call(seq_to_heads_start, {{"inputs", parts.inputs}, {"last_first", false}});
  meanwhile();
  std::vector<Tensors> ks(parts.levels.size()), vs(parts.levels.size());
  Tensors returning;
  c10::SymInt features;  // of an output
  const bool with_log_sum = parts.levels[0].asked.return_log_sum;
  for (int64_t chunk = 0; chunk < parts.chunks; ++chunk) {
    const Tensors received = call(
        seq_to_heads_wait, {{"buffer", starts[chunk]},
                            {"num_heads", parts.num_heads},
                            {"head_dims", dims},
                            batch,
                            {"chunk", chunk},
                            chunks,
                            tokens_first});
    Tensors outputs;
    size_t next = 0;  // of the level
    for (size_t n = 0; n < parts.levels.size(); ++n) {
      const auto& [heads, rank, asked] = parts.levels[n];
      const size_t cells = heads.cells(rank, chunk).size();
      if (received.size() > next + cells) {
        ks[n].push_back(received[next + cells]);
        vs[n].push_back(received[next + cells + 1]);
      }
      for (size_t c = 0; c < cells; ++c) {
        const CellOf cell{heads, rank, chunk, static_cast<int64_t>(c)};
        outputs.push_back(joined(attention_of_cell(
            received[next + c], kv_of_cell(ks[n], cell), kv_of_cell(vs[n], cell), asked, cell)));
      }
      next += cells + 2;
    }
    const bool stacks = parts.arguments.empty() && !parts.levels[0].heads.cuts_queries();
    if (parts.chunks == 1 && stacks) {
      const Tensors out =
          call(heads_to_seq, {{"inputs", outputs}, {"num_heads", heads_of_q}, tokens_first});
      return parted(out[0], with_log_sum);
    }
    features = outputs[0].sym_size(3);
    returning.push_back(call(
        heads_to_seq_start,
        {{"inputs", outputs}, {"num_heads", heads_of_q}, {"chunk", chunk}, chunks, tokens_first}));
  }
  const Tensors out = call(
      heads_to_seq_wait, {{"buffers", returning},
                          {"num_heads", heads_of_q},
                          {"head_dims", SymInts{features}},
                          batch,
                          tokens_first});
  return parted(out[0], with_log_sum);
}

// Attention of a rank that nobody shares tokens with.
Attention attend_alone(const Tensors& inputs, int64_t heads, int64_t kv_heads, const Asked& asked) {
  const CellOf cell{head_layout({heads, kv_heads}, 1, 1, 1, kNames), 0, 0, 0};
  return attention_of_cell(
      inputs[0], kv_of_cell({inputs[1]}, cell), kv_of_cell({inputs[2]}, cell), asked, cell);
}

// Attention to documents that blocks of ranks share, or that one rank has alone: while it works on
// the latter, the others are in flight.
Attention attend_dealt(
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
  // The level of these ranks, from `first` on; `tokens`: their tokens of the level.
  const auto level = [&](size_t n, int64_t first, int64_t width, const c10::SymInt& tokens) {
    const Asked here(asked, dealt[n]);
    check_pattern(here.pattern(), 1, tokens, heads);
    const int64_t parts = heads < width ? HeadLayout::kAuto : 1;
    return LevelCells{head_layout({heads, kv_heads}, width, 1, parts, kNames), rank - first, here};
  };
  const c10::SymInt& own = lens[rank];
  Tensors alone, shared;
  for (const at::Tensor& x : inputs) {
    alone.push_back(x.narrow_symint(1, 0, own));
    shared.push_back(x.narrow_symint(1, own, x.sym_size(1) - own));
  }
  const LevelCells of_one = level(0, rank, 1, own);
  if (ranks == 1) {
    return attend_alone(alone, heads, kv_heads, of_one.asked);
  }
  std::vector<LevelCells> levels;
  const std::vector<int64_t> widths = level_widths(ranks);
  for (size_t n = 0; n < widths.size(); ++n) {
    const int64_t width = widths[n];
    if (const auto first = block_of(rank, width, ranks)) {
      c10::SymInt tokens = 0;
      for (int64_t p = *first; p < *first + width; ++p) {
        tokens = tokens + lens[(n + 1) * ranks + p];
      }
      levels.push_back(level(n + 1, *first, width, tokens));
    }
  }
  // With one level, which all ranks share, queries are cut as anywhere else; with several, only
  // where a level needs it.
  const bool cut = count == 2 && heads < ranks;
  Attention here;
  const Attention back = attend(
      {shared,
       {heads, kv_heads, kv_heads},
       levels,
       1,
       false,
       {{"seq_lens", lens.slice(ranks).vec()},
        {"levels", count - 1},
        {"query_parts", cut ? HeadLayout::kAuto : 1}}},
      given, [&] { here = attend_alone(alone, heads, kv_heads, of_one.asked); });
  return {
      at::cat({here.out, back.out}, 1),
      asked.return_log_sum ? at::cat({here.log_sum, back.log_sum}, 1) : at::Tensor()};
}

// [B, S_rank, Hq, Dv] and [B, S_rank, Hq].
Attention attend_sharded(const Given& given, const Asked& asked, const DimOrder& order) {
  Tensors inputs;  // [B, S_rank, H_i, D_i]
  for (const char* name : kNames) {
    const at::Tensor x = given[name];
    check_four(x, name, order.names);
    inputs.push_back(x.permute(order.dims));
  }
  const std::string_view exchange = given["exchange"];
  TORCH_CHECK_VALUE(
      exchange == "heads" || exchange == "keys", "expected exchange to be 'heads' or 'keys', got '",
      exchange, "'");
  const bool by_keys = exchange == "keys";
  if (by_keys) {
    check_by_keys(asked, given);
  }
  if (const auto dealt = given.optional<std::vector<at::Tensor>>("dealt")) {
    check_heads(inputs[0], inputs[1], inputs[2], given["enable_gqa"]);
    return attend_dealt(inputs, *dealt, asked, given);
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
  // In memory as a merge of blocks leaves it.
  const auto returned = [&](const Attention& x) {
    return Attention{tokens_first ? in_order(x.out) : x.out.contiguous(), x.log_sum};
  };
  const std::optional<int64_t> kv_chunk = given["kv_chunk"];
  if (!kv_chunk.has_value() && plan.heads.ranks() == 1 && !sends_to_itself()) {
    return returned(attend_alone(inputs, plan.heads.num_heads(0), plan.heads.num_heads(1), asked));
  }
  if (by_keys) {
    return returned(attend_by_keys(inputs, plan, asked, given));
  }
  if (!kv_chunk.has_value()) {
    const Exchanged parts{
        inputs,
        plan.heads.num_heads(),
        {{plan.heads, plan.rank, asked}},
        plan.chunks(),
        tokens_first};
    return attend(parts, given, [] {});
  }
  check_only_pattern(asked.attn_mask, asked.dropout_p);
  const int64_t chunks = given["chunks"];
  TORCH_CHECK_VALUE(
      chunks == 1, "expected chunks to be 1 with kv_chunk, got ", chunks,
      "; keys and values come in parts of tokens then, not of heads");
  const Tensors found = streamed_attention(
      given,
      {{"q", inputs[0]}, {"k", inputs[1]}, {"v", inputs[2]}, {"return_lse", asked.return_log_sum}});
  return returned(parted(found[0], asked.return_log_sum));
}

c10::IValue distributed_attention(const Given& given) {
  const DimOrder order = order_of(given["layout"]);  // its own inverse
  return attend_sharded(given, Asked(given), order).out.permute(order.dims);
}

c10::IValue distributed_attention_with_lse(const Given& given) {
  const DimOrder order = order_of(given["layout"]);
  const Asked asked(given, /*return_log_sum=*/true);
  check_only_pattern(asked.attn_mask, asked.dropout_p);
  const auto [out, log_sum] = attend_sharded(given, asked, order);
  return Tensors{
      out.permute(order.dims), log_sum.permute(at::IntArrayRef(order.dims, 3)).contiguous()};
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  implement<distributed_attention>(m, "distributed_attention");
  implement<distributed_attention_with_lse>(m, "distributed_attention_with_lse");
}

}  // namespace deepsp
