#include "flash.h"

#include "../transport/flight.h"

#include <ATen/Context.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

namespace deepsp {
namespace {

constexpr int64_t kMostHeadDim = 256;

// Whether a kernel takes such tensors: on a CPU it is 1.2 to 1.4 times as fast as tiles in float32,
// faster still in 16 bits.
bool takes(const at::Tensor& q, const at::Tensor& v, const Attending& how) {
  if (how.softcap.has_value() || q.size(3) != v.size(3) || q.stride(3) != 1 || v.stride(3) != 1) {
    return false;
  }
  return q.is_cpu() ||
         (q.is_cuda() && (q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf) &&
          q.size(3) % 8 == 0 && q.size(3) <= kMostHeadDim &&
          at::globalContext().userEnabledFlashSDP());
}

// What the GPU's kernel takes for a call: x [1, n, h, D] of several documents as [n, h, D], with
// their borders on the device; x of one as it is.
struct Packed {
  at::Tensor borders;  // undefined: of one document
  int64_t longest_q, longest_k;

  Packed(const PieceCall& call, const at::Tensor& q, const at::Tensor& k)
      : longest_q(q.size(1)), longest_k(k.size(1)) {
    if (!call.borders.empty()) {
      // The driver copies pageable memory before it returns.
      borders = at::from_blob(
                    const_cast<int32_t*>(call.borders.data()),
                    static_cast<int64_t>(call.borders.size()), at::kInt)
                    .to(q.device(), at::kInt, /*non_blocking=*/true);
      longest_q = longest_k = call.longest;
    }
  }
  at::Tensor pack(const at::Tensor& x) const { return borders.defined() ? x.squeeze(0) : x; }
  at::Tensor unpack(const at::Tensor& x) const { return borders.defined() ? x.unsqueeze(0) : x; }
};

std::optional<int64_t> limit(int64_t reach) {
  return reach == kUnlimited ? std::nullopt : std::optional<int64_t>(reach);
}

}  // namespace

std::vector<PieceCall> calls_of(
    const std::vector<Piece>& pieces,
    const at::Tensor& q,
    const at::Tensor& v,
    const Attending& how) {
  const bool taken = takes(q, v, how);
  std::vector<PieceCall> calls;
  if (!taken || q.is_cpu()) {
    for (const Piece& piece : pieces) {
      calls.push_back({{piece, {}, 0, {}}, taken && piece.sight != Sight::kBand});
    }
    return calls;
  }
  const auto add = [&](const std::vector<Piece>& some) {
    for (FlashCall& call : flash_calls(some, how.band)) {
      calls.push_back({std::move(call), true});
    }
  };
  if (!capturing(q.device())) {
    add(pieces);
    return calls;
  }
  for (const Piece& piece : pieces) {  // a graph would copy borders from memory that is gone
    add({piece});
  }
  return calls;
}

std::pair<at::Tensor, at::Tensor> flash_attention(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const PieceCall& call,
    double scale) {
  if (q.is_cpu()) {
    auto [out, log_sum] = at::_scaled_dot_product_flash_attention_for_cpu(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0,
        call.piece.sight == Sight::kCausal, std::nullopt, scale);
    return {out.transpose(1, 2), log_sum};
  }
  const Packed as(call, q, k);
  const OptionalTensor borders = as.borders.defined() ? OptionalTensor(as.borders) : std::nullopt;
  const auto found = at::_flash_attention_forward(
      as.pack(q), as.pack(k), as.pack(v), borders, borders, as.longest_q, as.longest_k, 0.0,
      /*is_causal=*/false, /*return_debug_mask=*/false, scale, limit(call.window.left),
      limit(call.window.right));
  return {as.unpack(std::get<0>(found)), as.unpack(std::get<1>(found))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_attention_backward(
    const at::Tensor& grad,
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const at::Tensor& out,
    const at::Tensor& log_sum,
    const PieceCall& call,
    double scale) {
  if (q.is_cpu()) {
    auto [of_q, of_k, of_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        grad.transpose(1, 2), q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        out.transpose(1, 2), log_sum, 0.0, call.piece.sight == Sight::kCausal, std::nullopt, scale);
    return {of_q.transpose(1, 2), of_k.transpose(1, 2), of_v.transpose(1, 2)};
  }
  const Packed as(call, q, k);
  const at::Tensor unused = at::empty({0}, q.options().dtype(at::kUInt64));  // for dropout
  // The kernel takes the log-sum-exp by its address.
  const auto [of_q, of_k, of_v] = at::_flash_attention_backward(
      as.pack(grad), as.pack(q), as.pack(k), as.pack(v), as.pack(out),
      as.pack(log_sum).contiguous(), as.borders, as.borders, as.longest_q, as.longest_k, 0.0,
      /*is_causal=*/false, unused, unused, scale, limit(call.window.left),
      limit(call.window.right));
  return {as.unpack(of_q), as.unpack(of_k), as.unpack(of_v)};
}

}  // namespace deepsp
