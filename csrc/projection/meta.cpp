// Shapes of the projections' ops, without data or a process group.

#include "ops.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace deepsp {
namespace {

std::vector<at::Tensor> project_to_heads_start_meta(
    const at::Tensor& x,
    at::TensorList weights,
    at::TensorList biases,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t chunks,
    bool /*last_first*/,
    int64_t rank,
    std::string_view /*group_name*/) {
  const SymBlockLayout layout =
      check_project(x, weights, biases, num_heads, seq_lens, chunks, rank);
  std::vector<at::Tensor> buffers;
  for (int64_t chunk = 0; chunk < layout.heads.chunks(); ++chunk) {
    buffers.push_back(at::empty_symint({buffer_elements(layout, chunk)}, x.options()));
  }
  return buffers;
}

std::vector<at::Tensor> project_to_heads_backward_meta(
    at::TensorList buffers,
    const std::optional<at::Tensor>& x,
    at::TensorList weights,
    c10::SymIntArrayRef num_heads,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    at::IntArrayRef wanted,
    int64_t rank,
    std::string_view /*group_name*/) {
  check_project_backward(buffers, x, weights, num_heads, batch, seq_lens, wanted, rank);
  std::vector<at::Tensor> results;
  if (wanted[0]) {
    results.push_back(
        at::empty_symint({batch, seq_lens[rank], weights[0].sym_size(1)}, buffers[0].options()));
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    if (wanted[1 + i]) {
      results.push_back(at::empty_symint(weights[i].sym_sizes(), weights[i].options()));
    }
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    if (wanted[1 + weights.size() + i]) {
      results.push_back(at::empty_symint({weights[i].sym_size(0)}, weights[i].options()));
    }
  }
  return results;
}

at::Tensor heads_to_output_wait_meta(
    at::TensorList buffers,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::SymInt num_heads,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view /*group_name*/) {
  check_output(buffers, weight, bias, num_heads, batch, seq_lens, rank);
  return at::empty_symint({batch, seq_lens[rank], weight.sym_size(0)}, buffers[0].options());
}

at::Tensor heads_to_output_weight_grad_meta(
    const at::Tensor& grad,
    at::TensorList buffers,
    c10::SymInt num_heads,
    c10::SymInt head_dim,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view /*group_name*/) {
  check_output_weight_grad(grad, buffers, num_heads, head_dim, seq_lens, rank);
  return at::empty_symint({grad.sym_size(2), num_heads * head_dim}, grad.options());
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, Meta, m) {
  m.impl("project_to_heads_start", project_to_heads_start_meta);
  m.impl("project_to_heads_backward", project_to_heads_backward_meta);
  m.impl("heads_to_output_wait", heads_to_output_wait_meta);
  m.impl("heads_to_output_weight_grad", heads_to_output_weight_grad_meta);
}

}  // namespace deepsp
