#pragma once
// PyTorch's kernels for a piece: flash attention of the CPU or of the GPU, and cuDNN's.

#include "blocks.h"

#include <tuple>

namespace deepsp {

// What is computed at once: by a kernel of PyTorch's, or, if none takes it, by tiles.
struct PieceCall : KernelCall {
  bool by_kernel = false;
};

struct PieceCalls {
  std::vector<PieceCall> calls;
  // In how many of them a query, or a key, is at most.
  int64_t per_query = 0, per_key = 0;
  bool by_kernels = true;  // all of them

  // In what to add the results of so many calls: two are added in their own dtype as well as in a
  // wider one, with half of the traffic.
  at::ScalarType sum_dtype(int64_t calls, at::ScalarType own, at::ScalarType wide) const {
    return by_kernels && calls <= 2 ? own : wide;
  }
};

// In as few calls as possible.
PieceCalls calls_of(Range keys, const at::Tensor& q, const at::Tensor& v, const Attending& how);

// Returns attention's output [R, n, h, D] of a piece's queries [R, n, h, D] and keys, and the
// log-sum-exp [R, h, n] of each query's scores.
std::pair<at::Tensor, at::Tensor> attention_of_piece(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const PieceCall& call,
    double scale);

// The gradients of q, k and v through a piece, where out and log_sum are those of all keys.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_of_piece_backward(
    const at::Tensor& grad,
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const at::Tensor& out,
    const at::Tensor& log_sum,
    const PieceCall& call,
    double scale);

}  // namespace deepsp
