// Attention over a sharded sequence: an exchange there, any attention on whole
// sequences, an exchange back. Composite: no kernel and no backward of its own.

#include "../dispatch.h"
#include "../exchange/checks.h"
#include "../exchange/ops.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/library.h>

namespace deepsp {
namespace {

constexpr const char* kNames[] = {"q", "k", "v"};

void check_mask(
    const at::Tensor& mask,
    const c10::SymInt& batch,
    const c10::SymInt& heads,
    const c10::SymInt& tokens) {
  const c10::SymInt whole[] = {batch, heads, tokens, tokens};
  constexpr const char* dims[] = {"batch", "heads", "sequence (queries)", "sequence (keys)"};
  TORCH_CHECK_VALUE(
      mask.dim() >= 2 && mask.dim() <= 4, "attn_mask has ", mask.dim(),
      " dimensions; 2 to 4 are right: [[batch,] heads,] S, S");
  for (int64_t d = 0; d < mask.dim(); ++d) {
    const int64_t at = 4 - mask.dim() + d;
    TORCH_CHECK_VALUE(
        mask.sym_size(d) == 1 || mask.sym_size(d) == whole[at], "attn_mask has size ",
        mask.sym_size(d), " in dimension ", d, " (", dims[at],
        "); masks are global, as without sharding: 1 or ", whole[at], " is right");
  }
}

// The rows of a global mask that belong to these query heads.
at::Tensor mask_of(const at::Tensor& mask, const Range& heads) {
  return mask.dim() >= 3 && mask.sym_size(-3) != 1 ? mask.narrow(-3, heads.begin, heads.size())
                                                   : mask;
}

// k or v with one head for each query head, where this rank's query heads don't
// read its kv heads in equal numbers (which is what attention functions assume);
// else as it is.
at::Tensor expand_kv_heads(
    const at::Tensor& x,
    int64_t num_heads,
    int64_t num_kv_heads,
    int64_t chunk,
    int64_t chunks,
    int64_t rank,
    int64_t parts) {
  check_num_heads({num_heads, num_kv_heads}, parts, kNames);
  const HeadLayout layout({num_heads, num_kv_heads}, parts, chunks);
  const Range q = layout.range(0, rank, chunk);
  const Range kv = layout.range(1, rank, chunk);
  TORCH_CHECK_VALUE(
      x.dim() == 4 && x.sym_size(2) == kv.size(), "x has shape ", x.sym_sizes(), ", but rank ",
      rank, " of ", parts, " reads ", kv.size(), " kv heads; [batch, sequence, ", kv.size(),
      ", head_dim] is right");
  const int64_t readers = num_heads / num_kv_heads;
  std::vector<int64_t> repeats;
  for (int64_t head = kv.begin; head < kv.end; ++head) {
    repeats.push_back(std::min(q.end, (head + 1) * readers) - std::max(q.begin, head * readers));
  }
  if (std::all_of(
          repeats.begin(), repeats.end(), [&](int64_t n) { return n == repeats.front(); })) {
    return x;
  }
  // Not an index tensor: that would be a constant in a traced graph, and a copy
  // to the device.
  const std::vector<at::Tensor> heads = x.unbind(2);
  std::vector<at::Tensor> repeated;
  for (size_t i = 0; i < heads.size(); ++i) {
    repeated.push_back(
        heads[i].unsqueeze(2).expand_symint(
            {x.sym_size(0), x.sym_size(1), c10::SymInt(repeats[i]), x.sym_size(3)}));
  }
  return at::cat(repeated, 2);
}

struct Attention {
  const std::optional<at::Tensor>& mask;
  double dropout_p;
  bool is_causal;
  std::optional<double> scale;

  // All tokens, some heads: [B, S, h, D] in and out.
  at::Tensor operator()(
      const std::vector<at::Tensor>& qkv,
      const HeadLayout& layout,
      int64_t chunk,
      int64_t rank) const {
    const auto expand = [&](const at::Tensor& x) {
      return expand_kv_heads(
                 x, layout.num_heads(0), layout.num_heads(1), chunk, layout.chunks(), rank,
                 layout.parts())
          .transpose(1, 2);
    };
    const at::Tensor q = qkv[0].transpose(1, 2);
    const at::Tensor k = expand(qkv[1]);
    const at::Tensor v = expand(qkv[2]);
    std::optional<at::Tensor> mine;
    if (mask.has_value()) {
      mine = mask_of(*mask, layout.range(0, rank, chunk));
    }
    const bool grouped = q.sym_size(1) != k.sym_size(1);
    return at::scaled_dot_product_attention(q, k, v, mine, dropout_p, is_causal, scale, grouped)
        .transpose(1, 2);
  }
};

at::Tensor distributed_attention(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const std::optional<at::Tensor>& attn_mask,
    double dropout_p,
    bool is_causal,
    std::optional<double> scale,
    bool enable_gqa,
    int64_t chunks,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name) {
  const SymBlockLayout layout = check_by_tokens({q, k, v}, seq_lens, chunks, 1, rank, kNames);
  const HeadLayout& heads = layout.heads;
  TORCH_CHECK_VALUE(
      heads.num_heads(1) == heads.num_heads(2), "k has ", heads.num_heads(1), " heads, but v has ",
      heads.num_heads(2), "; they must be the same");
  TORCH_CHECK_VALUE(
      enable_gqa || heads.num_heads(0) == heads.num_heads(1), "q has ", heads.num_heads(0),
      " heads, but k and v have ", heads.num_heads(1),
      "; pass enable_gqa=True if several query heads are meant to read one kv head");
  TORCH_CHECK_VALUE(
      q.sym_size(3) == k.sym_size(3), "q has head_dim ", q.sym_size(3), ", but k has ",
      k.sym_size(3), "; they must be the same");
  TORCH_CHECK_VALUE(
      q.is_floating_point(), "q is ", q.scalar_type(), "; attention needs a floating-point dtype");
  TORCH_CHECK_VALUE(
      dropout_p >= 0 && dropout_p <= 1, "dropout_p is ", dropout_p,
      "; a probability from 0 to 1 is right");
  const c10::SymInt tokens = layout.token(layout.parts());
  if (attn_mask.has_value()) {
    TORCH_CHECK_VALUE(
        !is_causal, "attn_mask is given and is_causal is True; only one of them can be");
    TORCH_CHECK_VALUE(
        attn_mask->scalar_type() == at::kBool || attn_mask->scalar_type() == q.scalar_type(),
        "attn_mask is ", attn_mask->scalar_type(), "; bool or q's dtype, ", q.scalar_type(),
        ", is right");
    TORCH_CHECK_VALUE(
        attn_mask->device() == q.device(), "attn_mask is on ", attn_mask->device(),
        ", but q is on ", q.device(), "; they must be on the same device");
    check_mask(*attn_mask, layout.batch, q.sym_size(2), tokens);
  }

  const Attention attend{attn_mask, dropout_p, is_causal, scale};
  const c10::SymInt num_heads = q.sym_size(2);
  if (heads.chunks() == 1) {
    const at::Tensor out =
        attend(seq_to_heads({q, k, v}, seq_lens, rank, group_name), heads, 0, rank);
    return heads_to_seq({out}, {num_heads}, seq_lens, rank, group_name)[0];
  }
  const c10::SymInt qkv_heads[] = {num_heads, k.sym_size(2), v.sym_size(2)};
  const std::vector<at::Tensor> arriving =
      seq_to_heads_start({q, k, v}, seq_lens, heads.chunks(), 1, rank, group_name);
  // The output is cut where k and v are.
  const int64_t unit = heads.num_heads(0) / heads.num_heads(1);
  std::vector<at::Tensor> leaving;
  for (int64_t chunk = 0; chunk < heads.chunks(); ++chunk) {
    const std::vector<at::Tensor> qkv = seq_to_heads_wait(
        arriving[chunk], qkv_heads, layout.head_dims, layout.batch, seq_lens, chunk, heads.chunks(),
        1, rank, group_name);
    leaving.push_back(heads_to_seq_start(
        {attend(qkv, heads, chunk, rank)}, {num_heads}, seq_lens, chunk, heads.chunks(), unit, rank,
        group_name));
  }
  return heads_to_seq_wait(
      leaving, {num_heads}, {v.sym_size(3)}, layout.batch, seq_lens, unit, rank, group_name)[0];
}

// Under autocast attention computes in the lower precision: cast before the
// exchange, not after it, and half the bytes travel.
template <c10::DeviceType device>
at::Tensor distributed_attention_autocast(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const std::optional<at::Tensor>& attn_mask,
    double dropout_p,
    bool is_causal,
    std::optional<double> scale,
    bool enable_gqa,
    int64_t chunks,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name) {
  c10::impl::ExcludeDispatchKeyGuard guard(
      c10::DispatchKeySet(at::autocast::get_autocast_dispatch_key_from_device_type(device)));
  const auto dtype = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const at::Tensor& x) {
    return at::autocast::cached_cast(dtype, x, device);
  };
  std::optional<at::Tensor> mask = attn_mask;
  if (mask.has_value() && mask->is_floating_point()) {
    mask = cast(*mask);
  }
  static const auto op = find_op<decltype(distributed_attention)>("deepsp::distributed_attention");
  return op.call(
      cast(q), cast(k), cast(v), mask, dropout_p, is_causal, scale, enable_gqa, chunks, seq_lens,
      rank, group_name);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  m.impl("distributed_attention", distributed_attention);
  m.impl("expand_kv_heads", expand_kv_heads);
}

TORCH_LIBRARY_IMPL(deepsp, AutocastCPU, m) {
  m.impl("distributed_attention", distributed_attention_autocast<at::kCPU>);
}

TORCH_LIBRARY_IMPL(deepsp, AutocastCUDA, m) {
  m.impl("distributed_attention", distributed_attention_autocast<at::kCUDA>);
}

}  // namespace deepsp
