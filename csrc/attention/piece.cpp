#include "piece.h"

#include "../transport/flight.h"

#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/env.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <tuple>

namespace deepsp {
namespace {

constexpr int64_t kMostHeadDim = 256;

// A causal document of so many tokens is faster by a dense call of cuDNN's than among others by
// flash attention: on an H200 in bfloat16, with 8 heads of 128, 543 TFLOP/s instead of 336 at
// 16,384 tokens. Where the two are equal wasn't measured yet; `make gpu-test` prints it.
constexpr int64_t kDenseTokens = 4096;

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

// Whether SDPA would take cuDNN's kernel: the GPU has one, the user hasn't turned it off or put
// another first. With TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1, log-sum-exps have another layout.
bool takes_cudnn(const at::Tensor& q, const at::Tensor& v, double scale) {
  if (q.size(1) < kDenseTokens || v.size(1) == 0 ||
      c10::utils::check_env("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") == true) {
    return false;
  }
  const at::Tensor keys = v.transpose(1, 2);
  return at::_fused_sdp_choice(
             q.transpose(1, 2), keys, keys, std::nullopt, 0.0, false, scale,
             q.size(2) != v.size(2)) == static_cast<int64_t>(at::SDPBackend::cudnn_attention);
}

// Borders of documents on a GPU. The layers of a model, forward and backward, ask for the same ones
// one after another: the last few are kept.
at::Tensor on_device(const std::vector<int32_t>& borders, c10::Device device) {
  struct Copied {
    std::vector<int32_t> borders;
    c10::Device device;
    int64_t stream;
    at::Tensor copy;
  };
  constexpr size_t kKept = 16;
  static auto* const mutex = new std::mutex;
  static auto* const kept = new std::deque<Copied>;  // outlives the GPU's runtime
  const int64_t stream = current_stream(device);
  {
    const std::lock_guard<std::mutex> lock(*mutex);
    for (const Copied& one : *kept) {
      if (one.device == device && one.stream == stream && one.borders == borders) {
        return one.copy;
      }
    }
  }
  // The driver copies pageable memory before it returns.
  at::Tensor copy =
      at::from_blob(
          const_cast<int32_t*>(borders.data()), static_cast<int64_t>(borders.size()), at::kInt)
          .to(device, at::kInt, /*non_blocking=*/true);
  const std::lock_guard<std::mutex> lock(*mutex);
  kept->push_front({borders, device, stream, copy});
  if (kept->size() > kKept) {
    kept->pop_back();
  }
  return copy;
}

// What flash attention takes for a call: x [1, n, h, D] of several documents as [n, h, D], with
// their borders on the device; x of one as it is.
struct Packed {
  at::Tensor borders;  // undefined: of one document
  int64_t longest_q, longest_k;
  // A window that is causal and no more is said so: implementations that users activate in place of
  // PyTorch's may take no other.
  bool is_causal;
  std::optional<int64_t> left, right;

  Packed(const PieceCall& call, const at::Tensor& q, const at::Tensor& k)
      : longest_q(q.size(1)),
        longest_k(k.size(1)),
        is_causal(call.window.left == kUnlimited && call.window.right == 0) {
    if (!call.borders.empty()) {
      borders = on_device(call.borders, q.device());
      longest_q = longest_k = call.longest;
    }
    if (!is_causal && call.window.left != kUnlimited) {
      left = call.window.left;
    }
    if (!is_causal && call.window.right != kUnlimited) {
      right = call.window.right;
    }
  }
  at::Tensor pack(const at::Tensor& x) const { return borders.defined() ? x.squeeze(0) : x; }
  at::Tensor unpack(const at::Tensor& x) const { return borders.defined() ? x.unsqueeze(0) : x; }
};

// What a dense call takes: x [1, N * n, h, D] of N documents as [N, h, n, D]; x [R, n, h, D] of a
// piece as [R, h, n, D].
struct Dense {
  int64_t documents;
  bool is_causal;

  explicit Dense(const PieceCall& call)
      : documents(call.dense), is_causal(call.piece.sight == Sight::kCausal) {}

  // Plans are kept by strides: that of one row, whatever it is, would tell a plan from another.
  at::Tensor pack(const at::Tensor& x) const {
    const at::Tensor rows = x.size(0) > 1 ? x : x.squeeze(0).unflatten(0, {documents, -1});
    return rows.transpose(1, 2);
  }
  at::Tensor unpack(const at::Tensor& x) const {
    const at::Tensor by_token = x.transpose(1, 2);
    return documents == 1 ? by_token : by_token.flatten(0, 1).unsqueeze(0);
  }
  // Log-sum-exps [R, h, n], as cuDNN has them [R, h, n, 1].
  at::Tensor pack_sums(const at::Tensor& x) const {
    return (documents == 1 ? x : x.squeeze(0).unflatten(1, {documents, -1}).transpose(0, 1))
        .contiguous()
        .unsqueeze(3);
  }
  at::Tensor unpack_sums(const at::Tensor& x) const {
    const at::Tensor sums = x.squeeze(3);
    return documents == 1 ? sums : sums.transpose(0, 1).flatten(1, 2).unsqueeze(0);
  }
};

// cuDNN's plans are kept by the strides of q, k and v, and expect an output and its gradient as the
// forward call made it: in the order of q.
at::Tensor in_order_of(const at::Tensor& q, const at::Tensor& x) {
  const at::Tensor like = at::empty_like(q);
  return like.strides() == x.strides() ? x : like.copy_(x);
}

// In how many calls a token is at most.
int64_t most_calls(const std::vector<PieceCall>& calls, Range Piece::* tokens) {
  std::vector<std::tuple<int64_t, int64_t, int64_t>> borders;  // row, token, +1 or -1
  for (const PieceCall& call : calls) {
    const Range range = call.piece.*tokens;
    borders.emplace_back(call.piece.rows.begin, range.begin, 1);
    borders.emplace_back(call.piece.rows.begin, range.end, -1);
  }
  std::sort(borders.begin(), borders.end());
  int64_t now = 0, most = 0;
  for (const auto& [row, token, change] : borders) {
    now += change;
    most = std::max(most, now);
  }
  return most;
}

c10::IValue dense_tokens(const Given&) {
  return kDenseTokens;
}

}  // namespace

PieceCalls calls_of(Range keys, const at::Tensor& q, const at::Tensor& v, const Attending& how) {
  const std::vector<Piece> pieces = pieces_of(how.documents, how.band, keys, how.queries);
  const bool taken = takes(q, v, how);
  PieceCalls result;
  if (taken && q.is_cuda()) {
    DenseRule dense;
    if (takes_cudnn(q, v, how.scale)) {
      dense = {kDenseTokens, how.lengths_recur};
    }
    // A graph would copy borders from memory that is gone.
    for (KernelCall& call : kernel_calls(pieces, how.band, dense, !capturing(q.device()))) {
      result.calls.push_back({std::move(call), true});
    }
  } else {
    for (const Piece& piece : pieces) {
      const bool by_kernel = taken && piece.sight != Sight::kBand;
      result.calls.push_back({{piece, {}, 0, {}, 0}, by_kernel});
      result.by_kernels &= by_kernel;
    }
  }
  result.per_query = most_calls(result.calls, &Piece::queries);
  result.per_key = most_calls(result.calls, &Piece::keys);
  return result;
}

std::pair<at::Tensor, at::Tensor> attention_of_piece(
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
  if (call.dense > 0) {
    const Dense as(call);
    const auto found = at::_scaled_dot_product_cudnn_attention(
        as.pack(q), as.pack(k), as.pack(v), std::nullopt, /*compute_log_sumexp=*/true, 0.0,
        as.is_causal, /*return_debug_mask=*/false, scale);
    return {as.unpack(std::get<0>(found)), as.unpack_sums(std::get<1>(found))};
  }
  const Packed as(call, q, k);
  const OptionalTensor borders = as.borders.defined() ? OptionalTensor(as.borders) : std::nullopt;
  const auto found = at::_flash_attention_forward(
      as.pack(q), as.pack(k), as.pack(v), borders, borders, as.longest_q, as.longest_k, 0.0,
      as.is_causal, /*return_debug_mask=*/false, scale, as.left, as.right);
  return {as.unpack(std::get<0>(found)), as.unpack(std::get<1>(found))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_of_piece_backward(
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
  // For dropout.
  const at::Tensor unused =
      at::empty({0}, q.options().dtype(call.dense > 0 ? at::kLong : at::kUInt64));
  if (call.dense > 0) {
    const Dense as(call);
    const at::Tensor queries = as.pack(q);
    const auto [of_q, of_k, of_v] = at::_scaled_dot_product_cudnn_attention_backward(
        in_order_of(queries, as.pack(grad)), queries, as.pack(k), as.pack(v),
        in_order_of(queries, as.pack(out)), as.pack_sums(log_sum), unused, unused, {}, {}, {},
        queries.size(2), as.pack(k).size(2), 0.0, as.is_causal, scale);
    return {as.unpack(of_q), as.unpack(of_k), as.unpack(of_v)};
  }
  const Packed as(call, q, k);
  // The kernel takes the log-sum-exp by its address.
  const auto [of_q, of_k, of_v] = at::_flash_attention_backward(
      as.pack(grad), as.pack(q), as.pack(k), as.pack(v), as.pack(out),
      as.pack(log_sum).contiguous(), as.borders, as.borders, as.longest_q, as.longest_k, 0.0,
      as.is_causal, unused, unused, scale, as.left, as.right);
  return {as.unpack(of_q), as.unpack(of_k), as.unpack(of_v)};
}

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  implement<dense_tokens>(m, "_dense_tokens");
}

}  // namespace deepsp
