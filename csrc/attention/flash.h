#pragma once
// PyTorch's flash attention of a piece: the CPU's kernel, or the GPU's.

#include "blocks.h"

#include <tuple>

namespace deepsp {

// What is computed at once: by flash attention, or, if that can't, by tiles.
struct PieceCall : FlashCall {
  bool by_flash = false;
};

// In as few calls as possible.
std::vector<PieceCall> calls_of(
    const std::vector<Piece>& pieces,
    const at::Tensor& q,
    const at::Tensor& v,
    const Attending& how);

// Returns attention's output [R, n, h, D] of a piece's queries [R, n, h, D] and keys, and the
// log-sum-exp [R, h, n] of each query's scores.
std::pair<at::Tensor, at::Tensor> flash_attention(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const PieceCall& call,
    double scale);

// The gradients of q, k and v through a piece, where out and log_sum are those of all keys.
std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_attention_backward(
    const at::Tensor& grad,
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const at::Tensor& out,
    const at::Tensor& log_sum,
    const PieceCall& call,
    double scale);

}  // namespace deepsp
