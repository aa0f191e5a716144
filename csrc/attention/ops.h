#pragma once
// What attention's files share.

#include "../op.h"

namespace deepsp {

inline const Op<std::tuple<at::Tensor, at::Tensor>(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const OptionalTensor& attn_mask,
    double dropout_p,
    bool is_causal,
    std::optional<double> scale,
    int64_t rank)>
    attention_with_dropout("attention_with_dropout");

// What scaled_dot_product_attention's arguments must be, besides q, k and v.
void check_attention(
    const OptionalTensor& attn_mask,
    double dropout_p,
    bool is_causal,
    at::ScalarType dtype,
    c10::SymInt batch,
    c10::SymInt num_heads,
    c10::SymInt tokens);

}  // namespace deepsp
