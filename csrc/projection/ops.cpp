#include "ops.h"

#include "../dispatch.h"

namespace deepsp {

std::vector<at::Tensor> project_to_heads_start(
    const at::Tensor& x,
    at::TensorList weights,
    at::TensorList biases,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t chunks,
    bool last_first,
    int64_t rank,
    std::string_view group_name) {
  static const auto op =
      find_op<decltype(project_to_heads_start)>("deepsp::project_to_heads_start");
  return op.call(x, weights, biases, num_heads, seq_lens, chunks, last_first, rank, group_name);
}

std::vector<at::Tensor> project_to_heads_backward(
    at::TensorList buffers,
    const std::optional<at::Tensor>& x,
    at::TensorList weights,
    c10::SymIntArrayRef num_heads,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    at::IntArrayRef wanted,
    int64_t rank,
    std::string_view group_name) {
  static const auto op =
      find_op<decltype(project_to_heads_backward)>("deepsp::project_to_heads_backward");
  return op.call(
      buffers, x, weights, num_heads, std::move(batch), seq_lens, wanted, rank, group_name);
}

at::Tensor heads_to_output_wait(
    at::TensorList buffers,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::SymInt num_heads,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name) {
  static const auto op = find_op<decltype(heads_to_output_wait)>("deepsp::heads_to_output_wait");
  return op.call(
      buffers, weight, bias, std::move(num_heads), std::move(batch), seq_lens, rank, group_name);
}

at::Tensor heads_to_output_weight_grad(
    const at::Tensor& grad,
    at::TensorList buffers,
    c10::SymInt num_heads,
    c10::SymInt head_dim,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name) {
  static const auto op =
      find_op<decltype(heads_to_output_weight_grad)>("deepsp::heads_to_output_weight_grad");
  return op.call(
      grad, buffers, std::move(num_heads), std::move(head_dim), seq_lens, rank, group_name);
}

}  // namespace deepsp
