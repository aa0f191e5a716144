#pragma once
// Attention's output with the log-sum-exp of each query's scores.

#include "../op.h"

namespace deepsp {

struct Attention {
  at::Tensor out;      // [B, n, h, Dv]
  at::Tensor log_sum;  // [B, n, h]; undefined where nobody asked for it
};

// As one tensor, which exchanges as out does: join_log_sum; just out where there is no log-sum-exp.
at::Tensor joined(const Attention& attention);
Attention parted(const at::Tensor& x, bool with_log_sum);

// How many more features a joined tensor has than the output.
int64_t features_of_log_sum(at::ScalarType dtype);

// Backward of a log-sum-exp by kernels that know only an output's gradient. The derivative of a
// score is weight * (grad * v - sum(grad * out) + grad_log_sum). Further features, zeros of q, k
// and v, say what is to be added to the sum: the output has grad_log_sum there, in parts that its
// dtype holds, and grad has -1.
class LogSumGradient {
 public:
  // grad [B, h, n]. None: all below return what they are given.
  LogSumGradient(const at::Tensor& output, const OptionalTensor& grad);

  at::Tensor output(const at::Tensor& output) const;
  at::Tensor grad(const at::Tensor& grad) const;
  // q, k or v.
  at::Tensor widened(const at::Tensor& x) const;
  // The gradient of one.
  at::Tensor narrowed(const at::Tensor& gradient) const;

 private:
  int64_t features() const { return parts_.defined() ? parts_.size(3) : 0; }

  at::Tensor parts_;  // [B, n, h, features]
};

}  // namespace deepsp
