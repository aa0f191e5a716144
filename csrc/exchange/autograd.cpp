// The exchange differentiated: seq_to_heads and heads_to_seq are each other's
// adjoint; the backward of a start is a wait, that of a wait is a start. Every
// backward is made of ops again, so it traces and can be differentiated.

#include "checks.h"
#include "ops.h"

namespace deepsp {
namespace {

// Whether x [B, S_rank, H, D] lies in memory as [S_rank, B, H, D]: its gradient does, too.
bool lies_tokens_first(const at::Tensor& x) {
  return TORCH_GUARD_OR_FALSE(x.sym_size(0).sym_ne(1)) &&
         TORCH_GUARD_OR_FALSE(x.sym_stride(0).sym_lt(x.sym_stride(1)));
}

// The size of every tensor in one dimension.
SymInts sizes_of(at::TensorList tensors, int64_t dim) {
  SymInts sizes;
  for (const at::Tensor& x : tensors) {
    sizes.push_back(x.sym_size(dim));
  }
  return sizes;
}

Tensors heads_to_seq_backward(const Call& call, const Tensors& gradients) {
  return seq_to_heads(call, {{"inputs", gradients}});
}

void keep_shapes(Call& call) {
  call.keep("num_heads", sizes_of(call.inputs(), 2));
  call.keep("head_dims", sizes_of(call.inputs(), 3));
  call.keep("batch", call.inputs()[0].sym_size(0));
  call.keep("tokens_first", lies_tokens_first(call.inputs()[0]));
}

// Keeps the shapes of inputs by heads: queries, one tensor a cell, then the other tensors, if they
// are sent at all.
void keep_local_shapes(Call& call) {
  const at::TensorList inputs = call.inputs();
  const auto tensors =
      static_cast<size_t>(static_cast<c10::SymIntArrayRef>(call["num_heads"]).size());
  SymInts dims = sizes_of(inputs.slice(0, 1), 3);
  const bool cut = static_cast<int64_t>(call["query_parts"]) != 1;
  if (!cut || static_cast<int64_t>(call["chunk"]) == 0) {
    const SymInts others = sizes_of(inputs.slice(inputs.size() - tensors + 1), 3);
    dims.insert(dims.end(), others.begin(), others.end());
  }
  dims.resize(tensors, 0);
  call.keep("head_dims", dims);
  call.keep("batch", inputs[0].sym_size(0));
}

Tensors seq_to_heads_start_backward(const Call& call, const Tensors& buffers) {
  return heads_to_seq_wait(call, {{"buffers", buffers}});
}

Tensors seq_to_heads_wait_backward(const Call& call, const Tensors& gradients) {
  return {heads_to_seq_start(call, {{"inputs", gradients}})};
}

Tensors heads_to_seq_start_backward(const Call& call, const Tensors& buffers) {
  return seq_to_heads_wait(call, {{"buffer", buffers[0]}});
}

Tensors heads_to_seq_wait_backward(const Call& call, const Tensors& gradients) {
  // The last chunk first: autograd asks for it first.
  return seq_to_heads_start(
      call, {{"inputs", gradients},
             {"chunks", static_cast<int64_t>(call.count())},
             {"last_first", true}});
}

// Not an op of its own below autograd: its outputs share a buffer, and only a
// wait's schema can say so.
c10::IValue seq_to_heads_composite(const Given& given) {
  const at::TensorList inputs = given["inputs"];
  check_inputs(inputs);
  const Tensors buffers = seq_to_heads_start(given, {{"chunks", 1}, {"last_first", false}});
  // The start has checked them.
  return seq_to_heads_wait(
             given, {{"buffer", buffers[0]},
                     {"num_heads", sizes_of(inputs, 2)},
                     {"head_dims", sizes_of(inputs, 3)},
                     {"batch", inputs[0].sym_size(0)},
                     {"chunk", 0},
                     {"chunks", 1},
                     {"tokens_first", false}})
      .value();
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  implement<seq_to_heads_composite>(m, "seq_to_heads");
}

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  differentiable(m, "heads_to_seq", heads_to_seq_backward);
  differentiable(m, "seq_to_heads_start", seq_to_heads_start_backward, keep_shapes);
  differentiable(m, "seq_to_heads_wait", seq_to_heads_wait_backward);
  differentiable(m, "heads_to_seq_start", heads_to_seq_start_backward, keep_local_shapes);
  differentiable(m, "heads_to_seq_wait", heads_to_seq_wait_backward);
}

}  // namespace deepsp
