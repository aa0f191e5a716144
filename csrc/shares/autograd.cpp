// The exchange differentiated: the backward of a start is a wait, that of a wait is a start. Every
// backward is made of ops again, so it traces and can be differentiated.

#include "ops.h"

namespace deepsp {
namespace {

// Of a start's inputs [B, S_rank, H_i, D_i].
void keep_shapes(Call& call) {
  SymInts heads, dims;
  for (const at::Tensor& x : call.inputs()) {
    heads.push_back(x.sym_size(2));
    dims.push_back(x.sym_size(3));
  }
  call.keep("heads", heads);
  call.keep("dims", dims);
  call.keep("batch", call.inputs()[0].sym_size(0));
}

Tensors seq_to_shares_start_backward(const Call& call, const Tensors& buffers) {
  return shares_to_seq_wait(
      buffers, call["heads"], call["dims"], call["batch"], call["query_parts"], call["seq_lens"],
      call["rank"], call["group_name"]);
}

Tensors seq_to_shares_wait_backward(const Call& call, const Tensors& gradients) {
  return {shares_to_seq_start(
      gradients, call["num_heads"], call["query_parts"], call["seq_lens"], call["chunk"],
      call["chunks"], call["rank"], call["group_name"])};
}

// Of the cells' queries, and of the tensors behind them.
void keep_head_dims(Call& call) {
  const at::TensorList inputs = call.inputs();
  const auto tensors =
      static_cast<size_t>(static_cast<c10::SymIntArrayRef>(call["num_heads"]).size());
  SymInts dims{inputs[0].sym_size(3)};
  const bool others = static_cast<int64_t>(call["chunk"]) == 0;
  for (size_t i = 1; i < tensors; ++i) {
    dims.push_back(others ? inputs[inputs.size() - tensors + i].sym_size(3) : c10::SymInt(0));
  }
  call.keep("dims", dims);
  call.keep("batch", inputs[0].sym_size(0));
}

Tensors shares_to_seq_start_backward(const Call& call, const Tensors& buffers) {
  return seq_to_shares_wait(
      buffers[0], call["num_heads"], call["dims"], call["batch"], call["query_parts"],
      call["seq_lens"], call["chunk"], call["chunks"], call["rank"], call["group_name"]);
}

Tensors shares_to_seq_wait_backward(const Call& call, const Tensors& gradients) {
  // The last chunk first: autograd asks for it first.
  return seq_to_shares_start(
      gradients, call["query_parts"], call["seq_lens"], static_cast<int64_t>(call.count()),
      /*last_first=*/true, call["rank"], call["group_name"]);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  differentiable(m, "seq_to_shares_start", seq_to_shares_start_backward, keep_shapes);
  differentiable(m, "seq_to_shares_wait", seq_to_shares_wait_backward);
  differentiable(m, "shares_to_seq_start", shares_to_seq_start_backward, keep_head_dims);
  differentiable(m, "shares_to_seq_wait", shares_to_seq_wait_backward);
}

}  // namespace deepsp
