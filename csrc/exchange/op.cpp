// The exchange's kernels, the same for CPU and CUDA, and for meta tensors as far as results have
// shapes and strides.

#include "../op.h"
#include "checks.h"
#include "engine.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

namespace deepsp {
namespace {

Tensors meta_by_tokens(const SymBlockLayout& layout, const at::Tensor& like, bool tokens_first) {
  const c10::SymInt& tokens = layout.seq_lens[layout.rank];
  Tensors outputs;
  for (size_t i = 0; i < layout.heads.tensors(); ++i) {
    const c10::SymInt heads = layout.heads.num_heads(i);
    const c10::SymInt& dim = layout.head_dims[i];
    outputs.push_back(
        tokens_first
            ? at::empty_symint({tokens, layout.batch, heads, dim}, like.options()).transpose(0, 1)
            : at::empty_symint({layout.batch, tokens, heads, dim}, like.options()));
  }
  return outputs;
}

// That of results which lie in memory as [S_rank, B, H, D], or as [B, S_rank, H, D].
Order order_for(bool tokens_first) {
  return tokens_first ? Order::rows : Order::batches;
}

Tensors heads_to_seq_kernel(
    at::TensorList inputs,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name,
    bool tokens_first) {
  const SymBlockLayout shapes = check_by_heads(inputs, num_heads, seq_lens, 0, 1, rank);
  if (inputs[0].is_meta()) {
    return meta_by_tokens(shapes, inputs[0], tokens_first);
  }
  const Layout layout = concrete(shapes);
  const auto group = group_of("heads_to_seq", group_name, layout, inputs[0]);
  Departure departure = departure_of(group.get(), layout, 0, inputs[0], order_for(tokens_first));
  if (group == nullptr && inputs[0].is_cpu()) {
    // Straight from the inputs to the outputs.
    auto flight = std::make_unique<Flight>();
    flight->own = inputs.vec();
    launch_into(departure.buffer(), std::move(flight));
  } else {
    launch_to_seq(
        inputs, layout, 0, group.get(), departure, order_for(tokens_first), /*is_expected=*/true);
  }
  return merge_by_tokens({departure.buffer()}, layout, tokens_first);
}

Tensors seq_to_heads_start_kernel(
    at::TensorList inputs,
    c10::SymIntArrayRef seq_lens,
    int64_t chunks,
    bool last_first,
    int64_t rank,
    std::string_view group_name) {
  const SymBlockLayout shapes = check_by_tokens(inputs, seq_lens, chunks, rank);
  if (inputs[0].is_meta()) {
    return meta_buffers(shapes, inputs[0]);
  }
  const Layout layout = concrete(shapes);
  const auto group = group_of("seq_to_heads", group_name, layout, inputs[0]);
  const int64_t count = layout.heads.chunks();
  Tensors buffers(count);
  for (int64_t n = 0; n < count; ++n) {
    const int64_t chunk = last_first ? count - 1 - n : n;
    Departure departure = departure_of(group.get(), layout, chunk, inputs[0]);
    buffers[chunk] = departure.buffer();
    RECORD_FUNCTION("deepsp::pack", {});
    const auto make = [&](c10::ArrayRef<Place> places) {
      pack_by_tokens(inputs, layout, chunk, places);
    };
    make(launch_to_heads(make, inputs, layout, chunk, group.get(), departure));
    settle_if_watched(buffers[chunk], layout, chunk);
  }
  return buffers;
}

Tensors seq_to_heads_wait_kernel(
    const at::Tensor& buffer,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank,
    std::string_view /*group_name*/,
    std::optional<bool> /*tokens_first*/) {
  const SymBlockLayout layout =
      check_wait(buffer, num_heads, head_dims, batch, seq_lens, chunk, chunks, rank);
  if (!buffer.is_meta()) {
    land(buffer);
  }
  return views_by_heads(buffer, layout, chunk);
}

at::Tensor heads_to_seq_start_kernel(
    at::TensorList inputs,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank,
    std::string_view group_name,
    std::optional<bool> tokens_first) {
  const SymBlockLayout shapes = check_by_heads(inputs, num_heads, seq_lens, chunk, chunks, rank);
  if (inputs[0].is_meta()) {
    return meta_buffer(shapes, chunk, inputs[0]);
  }
  const Layout layout = concrete(shapes);
  const auto group = group_of("heads_to_seq", group_name, layout, inputs[0], chunk);
  // Unless heads_to_seq_wait follows, one tensor's buffer may be kept for backward
  // (heads_to_output), which may find a copy of it: nobody knows the order of that.
  const Order order = tokens_first.has_value() ? order_for(*tokens_first)
                      : inputs.size() == 1     ? Order::packed
                                               : Order::rows;
  Departure departure = departure_of(group.get(), layout, chunk, inputs[0], order);
  launch_to_seq(inputs, layout, chunk, group.get(), departure, order, tokens_first.has_value());
  settle_if_watched(departure.buffer(), layout, chunk);
  return departure.buffer();
}

Tensors heads_to_seq_wait_kernel(
    at::TensorList buffers,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view /*group_name*/,
    bool tokens_first) {
  const SymBlockLayout shapes = check_wait(
      buffers, num_heads, head_dims, batch, seq_lens, 0, static_cast<int64_t>(buffers.size()),
      rank);
  if (buffers[0].is_meta()) {
    return meta_by_tokens(shapes, buffers[0], tokens_first);
  }
  return merge_by_tokens(dense(buffers), concrete(shapes), tokens_first);
}

}  // namespace

DEEPSP_KERNELS(m) {
  m.impl("heads_to_seq", heads_to_seq_kernel);
  m.impl("seq_to_heads_start", seq_to_heads_start_kernel);
  m.impl("seq_to_heads_wait", seq_to_heads_wait_kernel);
  m.impl("heads_to_seq_start", heads_to_seq_start_kernel);
  m.impl("heads_to_seq_wait", heads_to_seq_wait_kernel);
}

TORCH_LIBRARY_IMPL(deepsp, Functionalize, m) {
  cuts_alias(m, "seq_to_heads_wait");
}

}  // namespace deepsp
