// A linear layer behind the exchange, the same for CPU and CUDA.

#include "product_sum.h"
#include "linear.h"

namespace deepsp {
namespace {

SymPlan check_output(const Given& given) {
  const at::TensorList buffers = given["buffers"];
  const at::Tensor weight = given["weight"];
  const OptionalTensor bias = given["bias"];
  const c10::SymInt num_heads = given["num_heads"];
  check_buffers(buffers);
  TORCH_CHECK_VALUE(num_heads > 0, "expected num_heads >= 1, got ", num_heads);
  TORCH_CHECK_VALUE(
      weight.dim() == 2 && weight.sym_size(1) % num_heads == 0,
      "expected weight to have shape [features, num_heads * head_dim] with num_heads = ", num_heads,
      ", got ", weight.sym_sizes());
  check_like(weight, "weight", buffers[0], "buffers[0]", kAutocast);
  if (bias.has_value()) {
    check_like(*bias, "bias", buffers[0], "buffers[0]", kAutocast);
    check_bias(*bias, "bias", weight, "weight");
  }
  return plan_of_wait(
      buffers, num_heads, weight.sym_size(1) / num_heads, given["batch"], given, 0,
      static_cast<int64_t>(buffers.size()));
}

c10::IValue heads_to_output_wait(const Given& given) {
  const SymPlan shapes = check_output(given);
  const at::TensorList buffers = given["buffers"];
  const at::Tensor weight = given["weight"];
  const OptionalTensor bias = given["bias"];
  if (weight.is_meta()) {
    return at::empty_symint({shapes.batch, shapes.tokens(), weight.sym_size(0)}, weight.options());
  }
  const Layout plan = concrete(shapes);
  const at::Tensor by_head = weight.t();  // [H·D, features]
  ProductSum sum({plan.tokens() * plan.batch, weight.size(0)}, buffers[0]);
  const Tensors dense_buffers = dense(buffers);
  if (plan.cuts_queries()) {
    sum.add_product(merge_to_rows_again(dense_buffers, plan), by_head);
  } else if (are_merged(dense_buffers, plan)) {
    sum.add_product(merge_to_rows(dense_buffers, plan), by_head);
  } else {
    ReceivedChunks received(dense_buffers, plan, false);
    received.in_order([&](int64_t chunk, int64_t p) {
      sum.add_product(
          received[chunk].block(p), rows_for(by_head, plan, 0, plan.heads.range(0, p, chunk)));
    });
  }
  at::Tensor y = sum.total();
  if (bias.has_value()) {
    y.add_(*bias);
  }
  return batches_of(y, plan);
}

c10::IValue heads_to_output_weight_grad(const Given& given) {
  const at::TensorList buffers = given["buffers"];
  const at::Tensor grad = given["grad"];
  const c10::SymInt num_heads = given["num_heads"], head_dim = given["head_dim"];
  check_buffers(buffers);
  check_tokens(grad, "grad", given["seq_lens"], given["rank"]);
  check_like(grad, "grad", buffers[0], "buffers[0]", kAutocast);
  const SymPlan shapes = plan_of_wait(
      buffers, num_heads, head_dim, grad.sym_size(0), given, 0,
      static_cast<int64_t>(buffers.size()));
  if (grad.is_meta()) {
    return at::empty_symint({grad.sym_size(2), num_heads * head_dim}, grad.options());
  }
  const Layout plan = concrete(shapes);
  const at::Tensor rows = rows_of(grad);
  const Tensors dense_buffers = dense(buffers);
  const int64_t dim = plan.head_dims[0];
  at::Tensor result = empty_buffer({grad.size(2), plan.heads.num_heads(0) * dim}, grad);
  // A graph that computes the forward again has no use for its output, nor a wait.
  if (are_merged(dense_buffers, plan)) {
    at::mm_out(result, rows.t(), merge_to_rows_again(dense_buffers, plan));
    return result;
  }
  for (int64_t chunk = 0; chunk < plan.chunks(); ++chunk) {
    ensure_waited(dense_buffers[chunk], plan, chunk);
    for (int64_t p = 0; p < plan.ranks(); ++p) {
      const Range heads = plan.heads.range(0, p, chunk);
      at::Tensor out = result.narrow(1, heads.begin * dim, heads.size() * dim);
      at::mm_out(out, rows.t(), received_block(dense_buffers[chunk], plan, chunk, p));
    }
  }
  return result;
}

}  // namespace

DEEPSP_KERNELS(m) {
  implement<heads_to_output_wait>(m, "_heads_to_output_wait");
  implement<heads_to_output_weight_grad>(m, "_heads_to_output_weight_grad");
}

}  // namespace deepsp
