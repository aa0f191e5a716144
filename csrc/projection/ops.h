#pragma once
// Linear layers around the exchange, as C++ calls through the dispatcher; and
// what a wrong call is told.

#include "../exchange/checks.h"

#include <string_view>

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
    std::string_view group_name);

std::vector<at::Tensor> project_to_heads_backward(
    at::TensorList buffers,
    const std::optional<at::Tensor>& x,
    at::TensorList weights,
    c10::SymIntArrayRef num_heads,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    at::IntArrayRef wanted,
    int64_t rank,
    std::string_view group_name);

at::Tensor heads_to_output_wait(
    at::TensorList buffers,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::SymInt num_heads,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name);

at::Tensor heads_to_output_weight_grad(
    const at::Tensor& grad,
    at::TensorList buffers,
    c10::SymInt num_heads,
    c10::SymInt head_dim,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name);

// ---- checks: ValueError, or the layout of the exchange

SymBlockLayout check_project(
    const at::Tensor& x,
    at::TensorList weights,
    at::TensorList biases,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t chunks,
    int64_t rank);

SymBlockLayout check_project_backward(
    at::TensorList buffers,
    const std::optional<at::Tensor>& x,
    at::TensorList weights,
    c10::SymIntArrayRef num_heads,
    const c10::SymInt& batch,
    c10::SymIntArrayRef seq_lens,
    at::IntArrayRef wanted,
    int64_t rank);

SymBlockLayout check_output(
    at::TensorList buffers,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    const c10::SymInt& num_heads,
    const c10::SymInt& batch,
    c10::SymIntArrayRef seq_lens,
    int64_t rank);

SymBlockLayout check_output_weight_grad(
    const at::Tensor& grad,
    at::TensorList buffers,
    const c10::SymInt& num_heads,
    const c10::SymInt& head_dim,
    c10::SymIntArrayRef seq_lens,
    int64_t rank);

}  // namespace deepsp
