#include "../common/checks.h"

#include "ops.h"

namespace deepsp {

void check_attention(
    const OptionalTensor& attn_mask,
    double dropout_p,
    bool is_causal,
    at::ScalarType dtype,
    const c10::SymInt& batch,
    const c10::SymInt& num_heads,
    const c10::SymInt& tokens,
    const std::optional<c10::SymInt>& queries) {
  TORCH_CHECK_VALUE(
      dropout_p >= 0 && dropout_p <= 1, "expected 0 <= dropout_p <= 1, got ", dropout_p);
  if (!attn_mask.has_value()) {
    return;
  }
  const at::Tensor& mask = *attn_mask;
  TORCH_CHECK_VALUE(
      !is_causal,
      "expected attn_mask or is_causal=True, got both; put the causal part into the "
      "mask");
  TORCH_CHECK_VALUE(
      mask.scalar_type() == at::kBool || mask.scalar_type() == dtype,
      "expected attn_mask to be bool or to have the dtype of q (", dtype_name(dtype), "), got ",
      dtype_name(mask.scalar_type()));
  TORCH_CHECK_VALUE(
      mask.dim() >= 2 && mask.dim() <= 4,
      "expected attn_mask to have 2 to 4 dimensions ([[batch,] heads,] S, S), got ", mask.dim());
  const c10::SymInt full[] = {batch, num_heads, queries.value_or(tokens), tokens};
  constexpr const char* dims[] = {"batch", "heads", "sequence (queries)", "sequence (keys)"};
  const auto is_padding = [&] {
    return mask.dim() == 2 && mask.sym_size(0) == batch && mask.sym_size(1) == tokens;
  };
  for (int64_t d = 0; d < mask.dim(); ++d) {
    const int64_t at = 4 - mask.dim() + d;
    TORCH_CHECK_VALUE(
        mask.sym_size(d) == 1 || mask.sym_size(d) == full[at], "expected attn_mask to have size ",
        full[at], " or 1 in dimension ", d, " (", dims[at], "), as for the full sequence, got ",
        mask.sym_size(d),
        is_padding() ? "; pass a padding mask [batch, sequence] as mask[:, None, None, :]" : "");
  }
}

void check_full(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, c10::SymIntArrayRef queries) {
  TORCH_CHECK_VALUE(
      q.dim() == 4 && k.dim() == 4 && v.dim() == 4,
      "expected q, k and v of shape [batch, sequence, heads, head_dim], got ", q.sym_sizes(), ", ",
      k.sym_sizes(), " and ", v.sym_sizes());
  TORCH_CHECK_VALUE(
      queries.size() % 2 == 0, "expected queries to have the begin and end of each range, got ",
      queries.size(), " numbers");
  c10::SymInt count = queries.empty() ? k.sym_size(1) : c10::SymInt(0), last = 0;
  for (size_t n = 0; n < queries.size(); n += 2) {
    TORCH_CHECK_VALUE(
        queries[n] >= last && queries[n + 1] >= queries[n] && queries[n + 1] <= k.sym_size(1),
        "expected queries to be ascending ranges of the ", k.sym_size(1), " tokens of k, got ",
        queries);
    last = queries[n + 1];
    count = count + (queries[n + 1] - queries[n]);
  }
  TORCH_CHECK_VALUE(
      k.sym_size(0) == q.sym_size(0) && v.sym_size(0) == q.sym_size(0) && q.sym_size(1) == count &&
          v.sym_size(1) == k.sym_size(1) && k.sym_size(2) == v.sym_size(2) &&
          k.sym_size(3) == q.sym_size(3),
      "expected q, k and v with the same batch size and sequence length, k and v with the same "
      "number of heads, and k with the head_dim of q, got shapes ",
      q.sym_sizes(), ", ", k.sym_sizes(), " and ", v.sym_sizes());
  TORCH_CHECK_VALUE(
      k.sym_size(2) > 0 && q.sym_size(2) % k.sym_size(2) == 0,
      "expected the number of heads of k to divide that of q (", q.sym_size(2), "), got ",
      k.sym_size(2));
  TORCH_CHECK_VALUE(
      q.is_floating_point() && k.scalar_type() == q.scalar_type() &&
          v.scalar_type() == q.scalar_type(),
      "expected q, k and v to have the same floating-point dtype, got ",
      dtype_name(q.scalar_type()), ", ", dtype_name(k.scalar_type()), " and ",
      dtype_name(v.scalar_type()));
}

void check_pattern(
    const Pattern& pattern, const c10::SymInt& batch, const c10::SymInt& tokens, int64_t heads) {
  if (pattern.documents.has_value()) {
    const at::Tensor& documents = *pattern.documents;
    TORCH_CHECK_VALUE(
        documents.dim() == 2 && (documents.sym_size(1) == 2 || documents.sym_size(1) == 3) &&
            at::isIntegralType(documents.scalar_type(), /*includeBool=*/false),
        "expected documents to be integers of shape [N, 2], where each document begins and ends "
        "among the ",
        batch * tokens, " tokens of the batch, or [N, 3], with its parent, got ",
        dtype_name(documents.scalar_type()), " ", documents.sym_sizes());
    TORCH_CHECK_VALUE(
        pattern.is_causal || documents.sym_size(1) == 2,
        "expected is_causal=True with documents that have parents, whose tokens come before");
  }
  const at::IntArrayRef window = pattern.window_size;
  TORCH_CHECK_VALUE(
      window.empty() || (window.size() == 2 && window[0] >= -1 && window[1] >= -1),
      "expected window_size to be (left, right), the number of tokens that are seen on each side, "
      "or -1 for all, got ",
      window);
  TORCH_CHECK_VALUE(
      !pattern.softcap.has_value() || *pattern.softcap > 0, "expected softcap > 0, got ",
      pattern.softcap.value_or(0), "; leave it out for none");
  if (pattern.sinks.has_value()) {
    const at::Tensor& sinks = *pattern.sinks;
    TORCH_CHECK_VALUE(
        sinks.dim() == 1 && sinks.sym_size(0) == heads && sinks.is_floating_point(),
        "expected sinks to be floating point, of shape [", heads,
        "], one for each query head, got ", dtype_name(sinks.scalar_type()), " ",
        sinks.sym_sizes());
  }
}

}  // namespace deepsp
