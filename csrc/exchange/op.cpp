// The exchange's kernels, the same for CPU and CUDA, and for meta tensors as far as results have
// shapes and strides.

#include "../common/checks.h"
#include "checks.h"
#include "engine.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

namespace deepsp {
namespace {

Tensors meta_by_tokens(const SymPlan& plan, const at::Tensor& like, bool tokens_first) {
  Tensors outputs;
  for (size_t i = 0; i < plan.heads.tensors(); ++i) {
    const c10::SymInt heads = plan.heads.num_heads(i);
    const c10::SymInt& dim = plan.head_dims[i];
    outputs.push_back(
        tokens_first ? at::empty_symint({plan.tokens(), plan.batch, heads, dim}, like.options())
                           .transpose(0, 1)
                     : at::empty_symint({plan.batch, plan.tokens(), heads, dim}, like.options()));
  }
  return outputs;
}

// That of results which lie in memory as [S_rank, B, H, D], or as [B, S_rank, H, D]. Blocks of
// several sections are merged in any case.
BlockOrder order_for(const Layout& plan, bool tokens_first) {
  return !plan.stacks() ? BlockOrder::packed
         : tokens_first ? BlockOrder::rows
                        : BlockOrder::batches;
}

c10::IValue heads_to_seq(const Given& given) {
  const at::TensorList inputs = given["inputs"];
  const SymPlan shapes = plan_by_heads(inputs, given);
  const bool tokens_first = given["tokens_first"];
  if (inputs[0].is_meta()) {
    return meta_by_tokens(shapes, inputs[0], tokens_first);
  }
  const Layout plan = concrete(shapes);
  const Group group = group_of("heads_to_seq", given["group_name"], plan, inputs[0]);
  const BlockOrder order = order_for(plan, tokens_first);
  Transfer transfer = transfer_of(group, plan, 0, inputs[0], order);
  if (group.alone && inputs[0].is_cpu()) {
    // Straight from the inputs to the outputs.
    auto flight = std::make_unique<Flight>();
    flight->own = inputs.vec();
    attach(transfer.buffer(), std::move(flight));
  } else {
    launch_to_seq(inputs, plan, 0, transfer, order, /*is_expected=*/true);
  }
  return merge_by_tokens({transfer.buffer()}, plan, tokens_first);
}

c10::IValue seq_to_heads_start(const Given& given) {
  const at::TensorList inputs = given["inputs"];
  const SymPlan shapes = plan_by_tokens(inputs, given);
  if (inputs[0].is_meta()) {
    return meta_buffers(shapes, inputs[0]);
  }
  const Layout plan = concrete(shapes);
  const Group group = group_of("seq_to_heads", given["group_name"], plan, inputs[0]);
  const int64_t count = plan.chunks();
  const bool last_first = given["last_first"];
  Tensors buffers(count);
  for (int64_t n = 0; n < count; ++n) {
    const int64_t chunk = last_first ? count - 1 - n : n;
    Transfer transfer = transfer_of(group, plan, chunk, inputs[0]);
    buffers[chunk] = transfer.buffer();
    RECORD_FUNCTION("deepsp::pack", {});
    const auto make = [&](c10::ArrayRef<PackedBlock> places) {
      pack_by_tokens(inputs, plan, chunk, places);
    };
    make(launch_to_heads(make, inputs, plan, chunk, transfer));
    settle_if_watched(buffers[chunk], plan, chunk);
  }
  return buffers;
}

c10::IValue seq_to_heads_wait(const Given& given) {
  const at::Tensor buffer = given["buffer"];
  const int64_t chunk = given["chunk"];
  const SymPlan plan = plan_of_wait(buffer, given, chunk, given["chunks"]);
  if (!buffer.is_meta()) {
    wait_and_take(buffer);
  }
  return receive_by_heads(buffer, plan, chunk);
}

c10::IValue heads_to_seq_start(const Given& given) {
  const at::TensorList inputs = given["inputs"];
  const int64_t chunk = given["chunk"];
  const SymPlan shapes = plan_by_heads(inputs, given);
  if (inputs[0].is_meta()) {
    return at::empty_symint({shapes.buffer_elements(chunk)}, inputs[0].options());
  }
  const Layout plan = concrete(shapes);
  const Group group = group_of("heads_to_seq", given["group_name"], plan, inputs[0], chunk);
  // Unless heads_to_seq_wait follows, one tensor's buffer may be kept for backward
  // (heads_to_output); autograd may save a copy, and a copy doesn't record its order.
  const std::optional<bool> tokens_first = given["tokens_first"];
  const BlockOrder order = tokens_first.has_value() ? order_for(plan, *tokens_first)
                           : inputs.size() == 1     ? BlockOrder::packed
                                                    : order_for(plan, true);
  Transfer transfer = transfer_of(group, plan, chunk, inputs[0], order);
  launch_to_seq(inputs, plan, chunk, transfer, order, tokens_first.has_value());
  settle_if_watched(transfer.buffer(), plan, chunk);
  return transfer.buffer();
}

// padded: each buffer has the difference in size between the two ways behind this rank's own block.
template <bool padded>
c10::IValue heads_to_seq_wait(const Given& given) {
  const at::TensorList buffers = given["buffers"];
  check_buffers(buffers);
  const SymPlan plan = plan_of_wait(buffers, given, 0, static_cast<int64_t>(buffers.size()));
  if (buffers[0].is_meta()) {
    return meta_by_tokens(plan, buffers[0], given["tokens_first"]);
  }
  std::vector<int64_t> paddings;
  for (int64_t chunk = 0; padded && chunk < plan.chunks(); ++chunk) {
    paddings.push_back(plan.padding(chunk, false).guard_int(__FILE__, __LINE__));
  }
  return merge_by_tokens(dense(buffers), concrete(plan), given["tokens_first"], paddings);
}

// ------------------------------------------------------------------- Inductor's

// Where lengths are symbols, so is what of each range lies on which rank, and Inductor takes
// minutes for the graph of all those slices: kernels make the blocks of a plan that cuts queries,
// and merge them. The difference in size between the two ways is sent from this rank to itself,
// behind its own block.

c10::IValue pack_blocks(const Given& given) {
  const at::TensorList inputs = given["inputs"];
  const bool to_heads = given["to_heads"];
  const int64_t chunk = given["chunk"];
  const SymPlan shapes = to_heads ? plan_by_tokens(inputs, given) : plan_by_heads(inputs, given);
  const c10::SymInt padding = shapes.padding(chunk, to_heads);
  SymInts counts = to_heads ? shapes.counts_by_tokens(chunk) : shapes.counts_by_heads(chunk);
  counts[shapes.rank] = counts[shapes.rank] + padding;
  if (inputs[0].is_meta()) {
    c10::SymInt size = 0;
    for (const c10::SymInt& count : counts) {
      size = size + count;
    }
    return at::empty_symint({size}, inputs[0].options());
  }
  const Layout plan = concrete(shapes);
  const auto at = prefix_sums(ints(counts));
  const at::Tensor sent = empty_buffer({at.back()}, inputs[0]);
  std::vector<PackedBlock> places;
  for (int64_t p = 0; p < plan.ranks(); ++p) {
    places.push_back({p, data_of(sent) + at[p] * item_of(sent)});
  }
  (to_heads ? pack_by_tokens : pack_by_heads)(inputs, plan, chunk, places);
  return sent;
}

c10::IValue merge_to_heads(const Given& given) {
  const at::Tensor buffer = given["buffer"];
  const int64_t chunk = given["chunk"];
  const SymPlan plan = plan_of_wait(buffer, given, chunk, given["chunks"]);
  return receive_by_heads(
      buffer, plan, chunk,
      buffer.is_meta() ? 0 : plan.padding(chunk, true).guard_int(__FILE__, __LINE__));
}

}  // namespace

DEEPSP_KERNELS(m) {
  implement<heads_to_seq>(m, "heads_to_seq");
  implement<seq_to_heads_start>(m, "seq_to_heads_start");
  implement<seq_to_heads_wait>(m, "seq_to_heads_wait");
  implement<heads_to_seq_start>(m, "heads_to_seq_start");
  implement<heads_to_seq_wait<false>>(m, "heads_to_seq_wait");
}

DEEPSP_KERNELS_IN(deepsp_inductor, m) {
  implement<pack_blocks>(m, "pack_blocks");
  implement<merge_to_heads>(m, "merge_to_heads");
  implement<heads_to_seq_wait<true>>(m, "merge_to_seq");
}

TORCH_LIBRARY_IMPL(deepsp, Functionalize, m) {
  cuts_alias(m, "seq_to_heads_wait");
}

}  // namespace deepsp
