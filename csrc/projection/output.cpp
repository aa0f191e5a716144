// A linear layer behind the exchange, the same for CPU and CUDA.

#include "../common/product_sum.h"
#include "linear.h"

namespace deepsp {
namespace {

SymBlockLayout check_output(
    at::TensorList buffers,
    const at::Tensor& weight,
    const OptionalTensor& bias,
    const c10::SymInt& num_heads,
    const c10::SymInt& batch,
    c10::SymIntArrayRef seq_lens,
    int64_t rank) {
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
  return check_wait(
      buffers, num_heads, weight.sym_size(1) / num_heads, batch, seq_lens, 0,
      static_cast<int64_t>(buffers.size()), rank);
}

at::Tensor heads_to_output_wait(
    at::TensorList buffers,
    const at::Tensor& weight,
    const OptionalTensor& bias,
    c10::SymInt num_heads,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view /*group_name*/) {
  const SymBlockLayout shapes =
      check_output(buffers, weight, bias, num_heads, batch, seq_lens, rank);
  if (weight.is_meta()) {
    return at::empty_symint({batch, seq_lens[rank], weight.sym_size(0)}, weight.options());
  }
  const Layout layout = concrete(shapes);
  const at::Tensor by_head = weight.t();  // [H·D, features]
  ProductSum sum({layout.seq_lens[rank] * layout.batch, weight.size(0)}, buffers[0]);
  const Tensors arriving = dense(buffers);
  if (arrive_together(arriving, layout)) {
    sum.add_product(merge_to_rows(arriving, layout), by_head);
  } else {
    Landing arrivals(arriving, layout, false);
    arrivals.in_order([&](int64_t chunk, int64_t p) {
      sum.add_product(
          arrivals[chunk].block(p), rows_for(by_head, layout, 0, layout.heads.range(0, p, chunk)));
    });
  }
  at::Tensor y = sum.total();
  if (bias.has_value()) {
    y.add_(*bias);
  }
  return batches_of(y, layout);
}

at::Tensor heads_to_output_weight_grad(
    const at::Tensor& grad,
    at::TensorList buffers,
    c10::SymInt num_heads,
    c10::SymInt head_dim,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view /*group_name*/) {
  check_buffers(buffers);
  check_tokens(grad, "grad", seq_lens, rank);
  check_like(grad, "grad", buffers[0], "buffers[0]", kAutocast);
  const SymBlockLayout shapes = check_wait(
      buffers, num_heads, head_dim, grad.sym_size(0), seq_lens, 0,
      static_cast<int64_t>(buffers.size()), rank);
  if (grad.is_meta()) {
    return at::empty_symint({grad.sym_size(2), num_heads * head_dim}, grad.options());
  }
  const Layout layout = concrete(shapes);
  const at::Tensor rows = rows_of(grad);
  const Tensors arrived = dense(buffers);
  const int64_t dim = layout.head_dims[0];
  const at::Tensor result = empty_buffer({grad.size(2), layout.heads.num_heads(0) * dim}, grad);
  const bool together = arrive_together(arrived, layout);
  for (int64_t chunk = 0; chunk < layout.heads.chunks(); ++chunk) {
    // A graph that computes the forward again has no use for its output, nor a wait.
    ensure_landed(arrived[chunk], layout, chunk);
  }
  if (together) {
    at::Tensor out = result;
    at::mm_out(out, rows.t(), merge_to_rows(arrived, layout, /*landed=*/true));
    return result;
  }
  for (int64_t chunk = 0; chunk < layout.heads.chunks(); ++chunk) {
    for (int64_t p = 0; p < layout.parts(); ++p) {
      const Range heads = layout.heads.range(0, p, chunk);
      at::Tensor out = result.narrow(1, heads.begin * dim, heads.size() * dim);
      at::mm_out(out, rows.t(), landed_block(arrived[chunk], layout, chunk, p));
    }
  }
  return result;
}

}  // namespace

DEEPSP_KERNELS(m) {
  m.impl("heads_to_output_wait", heads_to_output_wait);
  m.impl("heads_to_output_weight_grad", heads_to_output_weight_grad);
}

}  // namespace deepsp
