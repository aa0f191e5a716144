#pragma once
// The loss of a linear layer's output that is never whole. C++ calls through the dispatcher.

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace deepsp {

at::Tensor linear_cross_entropy(
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    const at::Tensor& labels,
    int64_t ignore_index,
    double label_smoothing,
    std::optional<int64_t> chunk_tokens);

std::vector<at::Tensor> linear_cross_entropy_gradients(
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    const at::Tensor& labels,
    int64_t ignore_index,
    double label_smoothing,
    std::optional<int64_t> chunk_tokens,
    at::IntArrayRef wanted);

// Shared by the kernels.

// What logits are computed with, and gradients summed in: float32, float64 for float64.
at::ScalarType wide_dtype(at::ScalarType dtype);
// ValueErrors.
void check_linear_cross_entropy(
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    const at::Tensor& labels,
    double label_smoothing,
    std::optional<int64_t> chunk_tokens,
    at::IntArrayRef wanted);

}  // namespace deepsp
