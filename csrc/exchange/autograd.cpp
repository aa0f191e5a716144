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

// Of inputs [B, S, H_i, D_i].
struct HeadShapes {
  SymInts heads;
  SymInts dims;

  explicit HeadShapes(at::TensorList inputs) {
    for (const at::Tensor& x : inputs) {
      heads.push_back(x.sym_size(2));
      dims.push_back(x.sym_size(3));
    }
  }
};

Tensors heads_to_seq_backward(const Call& call, const Tensors& gradients) {
  return seq_to_heads(gradients, call["seq_lens"], call["rank"], call["group_name"]);
}

HeadShapes kept_shapes(Call& call) {
  const HeadShapes shapes(call.inputs());
  call.keep("dims", shapes.dims);
  call.keep("batch", call.inputs()[0].sym_size(0));
  return shapes;
}

void keep_local_shapes(Call& call) {
  kept_shapes(call);
}

void keep_shapes(Call& call) {
  call.keep("heads", kept_shapes(call).heads);
  call.keep("tokens_first", lies_tokens_first(call.inputs()[0]));
}

Tensors seq_to_heads_start_backward(const Call& call, const Tensors& buffers) {
  return heads_to_seq_wait(
      buffers, call["heads"], call["dims"], call["batch"], call["seq_lens"], call["rank"],
      call["group_name"], call["tokens_first"]);
}

Tensors seq_to_heads_wait_backward(const Call& call, const Tensors& gradients) {
  return {heads_to_seq_start(
      gradients, call["num_heads"], call["seq_lens"], call["chunk"], call["chunks"], call["rank"],
      call["group_name"], call["tokens_first"])};
}

Tensors heads_to_seq_start_backward(const Call& call, const Tensors& buffers) {
  return seq_to_heads_wait(
      buffers[0], call["num_heads"], call["dims"], call["batch"], call["seq_lens"], call["chunk"],
      call["chunks"], call["rank"], call["group_name"], call["tokens_first"]);
}

Tensors heads_to_seq_wait_backward(const Call& call, const Tensors& gradients) {
  // The last chunk first: autograd asks for it first.
  return seq_to_heads_start(
      gradients, call["seq_lens"], static_cast<int64_t>(call.count()), /*last_first=*/true,
      call["rank"], call["group_name"]);
}

// Not an op of its own below autograd: its outputs share a buffer, and only a
// wait's schema can say so.
Tensors seq_to_heads_composite(
    at::TensorList inputs,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name) {
  check_inputs(inputs);
  const Tensors buffers =
      seq_to_heads_start(inputs, seq_lens, /*chunks=*/1, /*last_first=*/false, rank, group_name);
  const HeadShapes shapes(inputs);  // the start has checked them
  return seq_to_heads_wait(
      buffers[0], shapes.heads, shapes.dims, inputs[0].sym_size(0), seq_lens, 0, 1, rank,
      group_name, /*tokens_first=*/false);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  m.impl("seq_to_heads", seq_to_heads_composite);
}

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  differentiable(m, "heads_to_seq", heads_to_seq_backward);
  differentiable(m, "seq_to_heads_start", seq_to_heads_start_backward, keep_shapes);
  differentiable(m, "seq_to_heads_wait", seq_to_heads_wait_backward);
  differentiable(m, "heads_to_seq_start", heads_to_seq_start_backward, keep_local_shapes);
  differentiable(m, "heads_to_seq_wait", heads_to_seq_wait_backward);
}

}  // namespace deepsp
