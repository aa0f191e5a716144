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

// Where the documents of a call begin, on the device; undefined: there is one.
at::Tensor borders_of(const PieceCall& call, const at::Tensor& q) {
  if (call.borders.empty()) {
    return {};
  }
  // The driver copies pageable memory before it returns.
  return at::from_blob(
             const_cast<int32_t*>(call.borders.data()), static_cast<int64_t>(call.borders.size()),
             at::kInt)
      .to(q.device(), at::kInt, /*non_blocking=*/true);
}

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
  // A graph that is captured would copy from memory that is gone when it runs.
  if (taken && !q.is_cpu() && !capturing(q.device())) {
    for (FlashCall& call : flash_calls(pieces, how.band)) {
      calls.push_back({std::move(call), true});
    }
    return calls;
  }
  for (const Piece& piece : pieces) {
    if (taken && !q.is_cpu()) {
      for (FlashCall& call : flash_calls({piece}, how.band)) {
        calls.push_back({std::move(call), true});
      }
    } else {
      calls.push_back({{piece, {}, 0, {}}, taken && piece.sight != Sight::kBand});
    }
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
  const at::Tensor borders = borders_of(call, q);
  const bool several = borders.defined();
  const auto row = [&](const at::Tensor& x) { return several ? x.squeeze(0) : x; };
  const int64_t longest_q = several ? call.longest : q.size(1);
  const int64_t longest_k = several ? call.longest : k.size(1);
  const auto found = at::_flash_attention_forward(
      row(q), row(k), row(v), several ? OptionalTensor(borders) : std::nullopt,
      several ? OptionalTensor(borders) : std::nullopt, longest_q, longest_k, 0.0,
      /*is_causal=*/false, /*return_debug_mask=*/false, scale, limit(call.window.left),
      limit(call.window.right));
  const at::Tensor& out = std::get<0>(found);
  const at::Tensor& log_sum = std::get<1>(found);
  return several ? std::pair(out.unsqueeze(0), log_sum.unsqueeze(0)) : std::pair(out, log_sum);
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
  const at::Tensor borders = borders_of(call, q);
  const bool several = borders.defined();
  const auto row = [&](const at::Tensor& x) { return several ? x.squeeze(0) : x; };
  const at::Tensor unused = at::empty({0}, q.options().dtype(at::kUInt64));  // for dropout
  // The kernel takes the log-sum-exp by its address.
  auto [of_q, of_k, of_v] = at::_flash_attention_backward(
      row(grad), row(q), row(k), row(v), row(out), row(log_sum).contiguous(), borders, borders,
      several ? call.longest : q.size(1), several ? call.longest : k.size(1), 0.0,
      /*is_causal=*/false, unused, unused, scale, limit(call.window.left),
      limit(call.window.right));
  return several ? std::tuple(of_q.unsqueeze(0), of_k.unsqueeze(0), of_v.unsqueeze(0))
                 : std::tuple(of_q, of_k, of_v);
}

}  // namespace deepsp
