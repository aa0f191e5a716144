#pragma once
// What attention's files share. C++ calls through the dispatcher.

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace deepsp {

std::tuple<at::Tensor, at::Tensor> attention_with_dropout(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const std::optional<at::Tensor>& attn_mask,
    double dropout_p,
    bool is_causal,
    std::optional<double> scale,
    int64_t rank);

// What scaled_dot_product_attention's arguments must be, besides q, k and v.
void check_attention(
    const std::optional<at::Tensor>& attn_mask,
    double dropout_p,
    bool is_causal,
    at::ScalarType dtype,
    c10::SymInt batch,
    c10::SymInt num_heads,
    c10::SymInt tokens);

}  // namespace deepsp
