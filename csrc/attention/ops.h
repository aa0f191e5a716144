#pragma once
// What attention's files share.

#include "../op.h"

namespace deepsp {

// Who attends to whom and how, where scaled_dot_product_attention has no argument for it.
struct Pattern {
  const OptionalTensor& documents;
  at::IntArrayRef window_size;
  std::optional<double> softcap;
  const OptionalTensor& sinks;
  bool is_causal;

  bool given() const {
    return documents.has_value() || !window_size.empty() || softcap.has_value() ||
           sinks.has_value();
  }
};

inline const Op blockwise_attention("_blockwise_attention");
inline const Op streamed_attention("_streamed_attention");
inline const Op dropout_seed("_dropout_seed");
inline const Op attention_with_dropout("_attention_with_dropout");

// What scaled_dot_product_attention's arguments must be, besides q, k and v. `queries`: where they
// are fewer than all tokens.
void check_attention(
    const OptionalTensor& attn_mask,
    double dropout_p,
    bool is_causal,
    at::ScalarType dtype,
    const c10::SymInt& batch,
    const c10::SymInt& num_heads,
    const c10::SymInt& tokens,
    const std::optional<c10::SymInt>& queries = std::nullopt);

// q [B, S, h, D], k and v [B, S, h_kv, D] of the full sequence; or q of `queries`, begin and end of
// ascending ranges of its tokens.
void check_full(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    c10::SymIntArrayRef queries = {});
// `heads`: how many the sinks are for.
void check_pattern(
    const Pattern& pattern, const c10::SymInt& batch, const c10::SymInt& tokens, int64_t heads);

}  // namespace deepsp
