// Attention's output with the log-sum-exp of each query's scores: one tensor that is exchanged, and
// what was computed apart, merged.

#include "log_sum.h"

#include "../common/checks.h"
#include "../common/wide.h"
#include "blocks.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <limits>

namespace deepsp {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kBytes = 4;  // of a float32

const Op join_log_sum("_join_log_sum"), split_log_sum("_split_log_sum");

bool is_wide(at::ScalarType dtype) {
  return wide_dtype(dtype) == dtype;
}

void check_log_sum(const at::Tensor& out, const at::Tensor& log_sum, const std::string& name) {
  const auto shape = out.sym_sizes().slice(0, out.dim() - 1);
  const at::ScalarType wide = wide_dtype(out.scalar_type());
  TORCH_CHECK_VALUE(
      log_sum.sym_sizes() == shape && log_sum.scalar_type() == wide, "expected ", name,
      " to have shape ", shape, ", a number for each query and head of its output, and dtype ",
      dtype_name(wide), ", got ", dtype_name(log_sum.scalar_type()), " ", log_sum.sym_sizes());
}

// One more feature of a wide output. 16-bit numbers take the bytes of a float32 as numbers from 0
// to 255: its bits as two of them wouldn't outlive a compiler that computes copies in float32.
c10::IValue join_kernel(const Given& given) {
  const at::Tensor out = given["out"], log_sum = given["log_sum"];
  TORCH_CHECK_VALUE(
      out.dim() == 4 && out.is_floating_point(),
      "expected out to be floating point, [batch, sequence, heads, head_dim], got ",
      dtype_name(out.scalar_type()), " ", out.sym_sizes());
  check_log_sum(out, log_sum, "log_sum");
  const at::Tensor by_token = log_sum.transpose(0, 1).unsqueeze(3).contiguous();
  return at::cat(
             {out.transpose(0, 1), is_wide(out.scalar_type())
                                       ? by_token
                                       : by_token.view(at::kByte).to(out.scalar_type())},
             3)
      .transpose(0, 1);
}

c10::IValue split_kernel(const Given& given) {
  const at::Tensor joined = given["joined"];
  const at::ScalarType dtype = joined.scalar_type();
  const int64_t more = features_of_log_sum(dtype);
  TORCH_CHECK_VALUE(
      joined.dim() == 4 && joined.is_floating_point() && joined.sym_size(3) >= more,
      "expected joined to be what _join_log_sum returns, got ", dtype_name(dtype), " ",
      joined.sym_sizes());
  const c10::SymInt features = joined.sym_size(3) - more;
  const at::Tensor last = joined.narrow_symint(3, features, more);
  return Tensors{
      joined.narrow_symint(3, 0, features).clone(),
      is_wide(dtype) ? last.squeeze(3).contiguous()
                     : last.to(at::kByte).contiguous().view(at::kFloat).squeeze(3)};
}

Tensors join_backward(const Call&, const Tensors& gradients) {
  return split_log_sum({{"joined", gradients[0]}});
}

Tensors split_backward(const Call&, const Tensors& gradients) {
  return {join_log_sum({{"out", gradients[0]}, {"log_sum", gradients[1]}})};
}

// ------------------------------------------------------------------- merging

// [..., 1]: what each part weighs in the whole, where log_sum is that of all.
at::Tensor weight_of(const at::Tensor& part, const at::Tensor& log_sum) {
  return part.sub(log_sum.masked_fill(log_sum.eq(-kInfinity), 0)).exp_().unsqueeze(-1);
}

// In the wide dtype. What a part says where it has no key counts for nothing, even NaN.
at::Tensor output_of(const at::Tensor& out, const at::Tensor& log_sum) {
  return out.to(log_sum.scalar_type()).masked_fill(log_sum.eq(-kInfinity).unsqueeze(-1), 0);
}

c10::IValue merge_kernel(const Given& given) {
  const at::TensorList outs = given["outs"], log_sums = given["log_sums"];
  TORCH_CHECK_VALUE(
      outs.size() == log_sums.size(), "expected a log-sum-exp for each of the ", outs.size(),
      " outputs, got ", log_sums.size());
  for (size_t n = 0; n < outs.size(); ++n) {
    const at::Tensor& out = outs[n];
    TORCH_CHECK_VALUE(
        out.dim() > 0 && out.is_floating_point() && out.sym_sizes() == outs[0].sym_sizes() &&
            out.scalar_type() == outs[0].scalar_type(),
        "expected outs to be floating point, of one shape and dtype, got ",
        dtype_name(outs[0].scalar_type()), " ", outs[0].sym_sizes(), " as number 0 and ",
        dtype_name(out.scalar_type()), " ", out.sym_sizes(), " as number ", n);
    check_log_sum(out, log_sums[n], "log_sums[" + std::to_string(n) + "]");
  }
  const at::Tensor log_sum = at::logsumexp(at::stack(log_sums), {0});
  at::Tensor merged = at::zeros_symint(outs[0].sym_sizes(), log_sum.options());
  for (size_t n = 0; n < outs.size(); ++n) {
    merged.addcmul_(output_of(outs[n], log_sums[n]), weight_of(log_sums[n], log_sum));
  }
  return Tensors{merged.to(outs[0].scalar_type()), log_sum};
}

void save_merged(Call& call) {
  Tensors kept = call.inputs().vec();
  kept.push_back(call.outputs()[1]);
  call.keep_tensors(std::move(kept));
}

Tensors merge_backward(const Call& call, const Tensors& gradients) {
  const Tensors kept = call.kept_tensors();
  const at::Tensor& log_sum = kept.back();
  const size_t count = kept.size() / 2;
  const at::Tensor grad = gradients[0].to(log_sum.scalar_type());
  Tensors weights, along;  // of each part: the gradient times its output
  at::Tensor along_all = gradients[1].neg();
  for (size_t n = 0; n < count; ++n) {
    weights.push_back(weight_of(kept[count + n], log_sum));
    along.push_back(output_of(kept[n], kept[count + n]).mul(grad).sum(-1));
    along_all = along_all.add(weights[n].squeeze(-1).mul(along[n]));
  }
  Tensors of_inputs(2 * count);
  for (size_t n = 0; n < count; ++n) {
    of_inputs[n] = weights[n].mul(grad).to(kept[n].scalar_type());
    of_inputs[count + n] = along[n].sub(along_all).mul(weights[n].squeeze(-1));
  }
  return of_inputs;
}

}  // namespace

int64_t features_of_log_sum(at::ScalarType dtype) {
  return is_wide(dtype) ? 1 : kBytes;
}

at::Tensor joined(const Attention& attention) {
  return attention.log_sum.defined()
             ? at::Tensor(join_log_sum({{"out", attention.out}, {"log_sum", attention.log_sum}}))
             : attention.out;
}

Attention parted(const at::Tensor& x, bool with_log_sum) {
  if (!with_log_sum) {
    return {x, {}};
  }
  const Tensors both = split_log_sum({{"joined", x}});
  return {both[0], both[1]};
}

LogSumGradient::LogSumGradient(const at::Tensor& output, const OptionalTensor& grad) {
  if (!grad.has_value()) {
    return;
  }
  const at::ScalarType dtype = output.scalar_type();
  constexpr int64_t kAligned = 8;  // features that a GPU's kernels take
  at::Tensor rest = grad->transpose(1, 2).unsqueeze(3);
  Tensors parts;
  for (int64_t n = 0; n < (is_wide(dtype) ? 1 : 3); ++n) {
    parts.push_back(rest.to(dtype));
    rest = rest.sub(parts.back());
  }
  parts_ = at::cat(parts, 3);
  if (output.is_cuda()) {
    parts_ = at::constant_pad_nd(parts_, {0, kAligned - parts_.size(3)});
  }
}

at::Tensor LogSumGradient::output(const at::Tensor& output) const {
  return parts_.defined() ? at::cat({output, parts_}, 3) : output;
}

at::Tensor LogSumGradient::grad(const at::Tensor& grad) const {
  return parts_.defined() ? at::constant_pad_nd(grad, {0, features()}, -1) : grad;
}

at::Tensor LogSumGradient::widened(const at::Tensor& x) const {
  return parts_.defined() ? at::constant_pad_nd(x, {0, features()}) : x;
}

at::Tensor LogSumGradient::narrowed(const at::Tensor& gradient) const {
  return parts_.defined() ? in_order(gradient.narrow(3, 0, gradient.size(3) - features()))
                          : gradient;
}

DEEPSP_KERNELS(m) {
  implement<join_kernel>(m, "_join_log_sum");
  implement<split_kernel>(m, "_split_log_sum");
  implement<merge_kernel>(m, "merge_attention");
}

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  differentiable(m, "_join_log_sum", join_backward);
  differentiable(m, "_split_log_sum", split_backward);
  differentiable(m, "merge_attention", merge_backward, save_merged);
}

}  // namespace deepsp
