// The exchange: what the eager kernels pack, send and merge, in terms of aten.

#include "exchange.h"

#include "../common/wide.h"
#include "../exchange/engine.h"
#include "../exchange/ops.h"

#include <ATen/ops/cat.h>

namespace deepsp::inductor {

at::Tensor send(Tensors blocks, const Way& way, std::string_view group_name) {
  SymInts gets = way.gets, gives = way.gives;
  gets[way.rank] = gets[way.rank] + way.padding;
  gives[way.rank] = gives[way.rank] + way.padding;
  if (!way.is_padded && !is_zero(way.padding)) {
    if (blocks.size() == 1) {
      blocks = blocks[0].split_with_sizes_symint(way.gives);
    }
    blocks.insert(blocks.begin() + way.rank + 1, blocks[way.rank].new_zeros_symint(way.padding));
  }
  return launch("all_to_all_single", way.parts(), joined(blocks), {gets, gives}, group_name);
}

namespace {

// What was received, without the padding.
at::Tensor receive(const at::Tensor& buffer, const Way& way) {
  const at::Tensor full = waited(buffer, way.parts());
  if (is_zero(way.padding)) {
    return full;
  }
  const auto behind = way.gets.begin() + way.rank + 1;
  const c10::SymInt end = std::accumulate(way.gets.begin(), behind, c10::SymInt(0));
  const c10::SymInt rest = std::accumulate(behind, way.gets.end(), c10::SymInt(0));
  return at::cat({full.narrow_symint(0, 0, end), full.narrow_symint(0, end + way.padding, rest)});
}

// A run of tensor i's heads: [S_rank·B, h·D_i], the sum of what its ranks sent.
at::Tensor heads_of(
    const std::vector<Tensors>& blocks, const SymPlan& plan, size_t i, const HeadSegment& segment) {
  Tensors parts;
  for (size_t r = 0; r < segment.readers.size(); ++r) {
    const int64_t p = segment.readers[r], chunk = segment.chunks[r];
    const int64_t first = plan.heads.range(i, p, chunk).begin;
    const c10::SymInt& dim = plan.head_dims[i];
    parts.push_back(
        blocks[chunk][p].narrow_symint(
            1, plan.column(i, p, chunk) + dim * (segment.heads.begin - first),
            dim * segment.heads.size()));
  }
  return parts.size() == 1 ? parts[0] : sum_in_order(parts, {}, parts[0].scalar_type());
}

}  // namespace

std::vector<Tensors> blocks_by_tokens(at::TensorList buffers, const SymPlan& plan) {
  std::vector<Tensors> blocks;
  for (size_t chunk = 0; chunk < buffers.size(); ++chunk) {
    const Way way(plan, chunk, /*to_heads=*/false);
    blocks.push_back(receive(buffers[chunk], way).split_with_sizes_symint(way.gets));
    for (int64_t p = 0; p < plan.ranks(); ++p) {
      at::Tensor& block = blocks.back()[p];
      block = block.view_symint({plan.tokens() * plan.batch, plan.columns(p, chunk)});
    }
  }
  return blocks;
}

at::Tensor all_heads_of(
    const std::vector<Tensors>& blocks, const SymPlan& plan, size_t first, size_t last) {
  Tensors columns;
  for (size_t i = first; i < last; ++i) {
    for (const HeadSegment& segment : plan.heads.segments(i)) {
      columns.push_back(heads_of(blocks, plan, i, segment));
    }
  }
  return at::cat(columns, 1);
}

namespace {

// How many ranks read each head of a tensor, if all ranks read equally many.
int64_t readers_of(const SymPlan& plan, size_t i) {
  return std::max<int64_t>(1, plan.ranks() / plan.heads.num_heads(i));
}

// Whether every rank has as many heads of each tensor, and all at once: the graph then needs no
// node for each rank.
bool is_even(const SymPlan& plan) {
  const int64_t ranks = plan.ranks();
  bool even = plan.chunks() == 1 && plan.heads.num_heads(0) % ranks == 0;
  for (size_t i = 1; i < plan.heads.tensors(); ++i) {
    const int64_t heads = plan.heads.num_heads(i);
    even = even && (heads % ranks == 0 || ranks % heads == 0);
  }
  return even;
}

// One flat block [S_rank, B, X_p] for every rank p, of inputs [B, S_rank, H_i, D_i]; all in one
// where they are made at once.
Tensors pack_by_tokens(at::TensorList inputs, const SymPlan& plan, int64_t chunk) {
  const int64_t parts = plan.ranks();
  const c10::SymInt& tokens = plan.tokens();
  Tensors blocks;
  if (is_even(plan)) {
    // All at once: [B, S_rank, P, h, D] -> [P, S_rank, B, X].
    for (size_t i = 0; i < inputs.size(); ++i) {
      const int64_t heads = plan.heads.num_heads(i), readers = readers_of(plan, i);
      const c10::SymInt& dim = plan.head_dims[i];
      blocks.push_back(
          inputs[i]
              .unsqueeze(3)
              .expand_symint({plan.batch, tokens, heads, readers, dim})
              .reshape_symint({plan.batch, tokens, parts, heads * readers / parts, dim})
              .permute({2, 1, 0, 3, 4})
              .flatten(3));
    }
    return {joined(blocks, 3).reshape(-1)};
  }
  for (int64_t p = 0; p < parts; ++p) {
    Tensors columns;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Range heads = plan.heads.range(i, p, chunk);
      columns.push_back(
          inputs[i].narrow(2, heads.begin, heads.size()).permute({1, 0, 2, 3}).flatten(2));
    }
    blocks.push_back(at::cat(columns, 2).reshape(-1));
  }
  return blocks;
}

// Tensor i of what was received from all ranks, [P, S_rank, B, X]: [S_rank, B, heads, D]. Heads
// that several ranks have read are summed.
at::Tensor heads_of(const at::Tensor& all, const SymPlan& plan, size_t i) {
  const int64_t heads = plan.heads.num_heads(i), readers = readers_of(plan, i);
  const int64_t each = heads * readers / plan.ranks();
  const c10::SymInt& dim = plan.head_dims[i];
  const at::Tensor blocks = all.narrow_symint(3, plan.column(i, 0, 0), dim * each)
                                .unflatten_symint(3, {each, dim})
                                .permute({1, 2, 0, 3, 4});
  if (readers == 1) {
    return blocks;
  }
  return blocks.unflatten(2, {heads, readers})
      .sum({3}, /*keepdim=*/false, wide_dtype(all.scalar_type()))
      .to(all.scalar_type());
}

const Op pack_blocks("pack_blocks", kNamespace);
const Op merge_to_heads("merge_to_heads", kNamespace);
const Op merge_to_seq("merge_to_seq", kNamespace);

c10::IValue seq_to_heads_start(const Given& given) {
  const at::TensorList inputs = given["inputs"];
  const SymPlan plan = plan_by_tokens(inputs, given);
  return start_chunks(given, plan, [&](int64_t chunk) -> Tensors {
    if (!plan.stacks()) {
      return {pack_blocks(
          given, {{"num_heads", SymInts()},
                  {"chunk", chunk},
                  {"chunks", plan.chunks()},
                  {"to_heads", true}})};
    }
    return pack_by_tokens(inputs, plan, chunk);
  });
}

c10::IValue seq_to_heads_wait(const Given& given) {
  const int64_t chunk = given["chunk"];
  const SymPlan plan = plan_of_wait({}, given, 0, given["chunks"]);
  const at::Tensor buffer = given["buffer"];
  // Several sections are copied: where this rank holds none of a chunk's, the padding is in
  // front of all that is received, and Inductor makes what is behind it a view. Views of that by
  // as_strided, as of whole heads, would begin at the padding.
  if (!plan.stacks()) {
    return merge_to_heads(given, {{"buffer", waited(buffer, plan.ranks())}}).value();
  }
  return receive_by_heads(receive(buffer, Way(plan, chunk, /*to_heads=*/true)), plan, chunk);
}

c10::IValue heads_to_seq_start(const Given& given) {
  const at::TensorList inputs = given["inputs"];
  const int64_t chunk = given["chunk"];
  const SymPlan plan = plan_by_heads(inputs, given);
  const Way way(plan, chunk, /*to_heads=*/false);
  if (!plan.stacks()) {
    return send({pack_blocks(given, {{"to_heads", false}})}, way, given["group_name"]);
  }
  // The flat blocks [S_p, B, X_rank] for every rank p, one after another.
  Tensors columns;
  for (const at::Tensor& x : inputs) {
    columns.push_back(x.transpose(0, 1).flatten(2));
  }
  return send({joined(columns, 2).reshape(-1)}, way, given["group_name"]);
}

c10::IValue heads_to_seq_wait(const Given& given) {
  const at::TensorList buffers = given["buffers"];
  const SymPlan plan = plan_of_wait({}, given, 0, static_cast<int64_t>(buffers.size()));
  Tensors outputs;
  if (!plan.stacks()) {
    Tensors received;
    for (const at::Tensor& buffer : buffers) {
      received.push_back(waited(buffer, plan.ranks()));
    }
    return merge_to_seq(given, {{"buffers", received}}).value();
  }
  const bool even = is_even(plan);
  std::vector<Tensors> blocks;
  at::Tensor all;  // [P, S_rank, B, X]
  if (even) {
    all = receive(buffers[0], Way(plan, 0, /*to_heads=*/false))
              .view_symint({plan.ranks(), plan.tokens(), plan.batch, plan.columns(0, 0)});
  } else {
    blocks = blocks_by_tokens(buffers, plan);
  }
  for (size_t i = 0; i < plan.heads.tensors(); ++i) {
    const int64_t heads = plan.heads.num_heads(i);
    const c10::SymInt& dim = plan.head_dims[i];
    const at::Tensor rows = even ? heads_of(all, plan, i) : all_heads_of(blocks, plan, i, i + 1);
    const at::Tensor output =
        rows.reshape_symint({plan.tokens(), plan.batch, heads, dim}).transpose(0, 1);
    outputs.push_back(given["tokens_first"] ? output : output.contiguous());
  }
  return outputs;
}

c10::IValue heads_to_seq(const Given& given) {
  const at::TensorList inputs = given["inputs"];
  SymInts dims;
  for (const at::Tensor& x : inputs) {
    dims.push_back(x.sym_size(3));
  }
  const at::Tensor buffer =
      deepsp::heads_to_seq_start(given, {{"chunk", 0}, {"chunks", 1}, {"tokens_first", {}}});
  return deepsp::heads_to_seq_wait(
             given,
             {{"buffers", Tensors{buffer}}, {"head_dims", dims}, {"batch", inputs[0].sym_size(0)}})
      .value();
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp_inductor, CompositeImplicitAutograd, m) {
  implement<heads_to_seq>(m, "heads_to_seq");
  implement<seq_to_heads_start>(m, "seq_to_heads_start");
  implement<seq_to_heads_wait>(m, "seq_to_heads_wait");
  implement<heads_to_seq_start>(m, "heads_to_seq_start");
  implement<heads_to_seq_wait>(m, "heads_to_seq_wait");
}

}  // namespace deepsp::inductor
