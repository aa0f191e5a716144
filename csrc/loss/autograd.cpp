// The loss: forward finds the gradients of the sum, backward scales them. Log-probabilities:
// backward computes a chunk's logits again.

#include "../op.h"

#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

namespace deepsp {
namespace {

const Op<Tensors(
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const OptionalTensor& bias,
    const at::Tensor& labels,
    int64_t ignore_index,
    double label_smoothing,
    std::optional<int64_t> chunk_tokens,
    at::IntArrayRef wanted,
    std::optional<double> softcap,
    double scale,
    double z_loss,
    const OptionalTensor& token_weights)>
    linear_cross_entropy_gradients("linear_cross_entropy_gradients");

const Op<Tensors(
    at::TensorList grads,
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const OptionalTensor& bias,
    const at::Tensor& ids,
    const at::Tensor& logsumexp,
    const OptionalTensor& entropy,
    int64_t ignore_index,
    std::optional<int64_t> chunk_tokens,
    std::optional<double> softcap,
    double scale,
    double temperature,
    at::IntArrayRef wanted)>
    token_log_probs_backward("token_log_probs_backward");

at::Tensor linear_cross_entropy(
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const OptionalTensor& bias,
    const at::Tensor& labels,
    int64_t ignore_index,
    double label_smoothing,
    std::optional<int64_t> chunk_tokens,
    std::optional<double> softcap,
    double scale,
    double z_loss,
    const OptionalTensor& token_weights) {
  const auto wants = [](const at::Tensor& x) {
    return at::GradMode::is_enabled() && x.requires_grad();
  };
  const auto loss = [&](const OptionalTensor& weights) {
    return linear_cross_entropy_gradients(
        hidden, weight, bias, labels, ignore_index, label_smoothing, chunk_tokens,
        {wants(hidden), wants(weight), bias.has_value() && wants(*bias)}, softcap, scale, z_loss,
        weights)[0];
  };
  if (!token_weights.has_value() || !token_weights->is_floating_point() ||
      token_weights->sym_sizes() != labels.sym_sizes()) {
    return loss(token_weights);
  }
  TORCH_CHECK_VALUE(
      !token_weights->requires_grad(),
      "expected token_weights not to require a gradient, which isn't computed; detach them");
  // The largest is made 1, so that 16-bit gradients of small or large ones keep their digits.
  const at::Tensor weights = token_weights->to(at::kDouble).where(labels.ne(ignore_index), 0);
  at::Tensor unit = at::cat({weights.abs().flatten(), weights.new_zeros({1})}).amax();
  unit = unit.where(unit.gt(0), 1);
  return loss(weights.div(unit)).mul(unit);
}

void keep_gradients(Call& call) {
  const Tensors found = call.outputs().slice(1).vec();
  call.keep("dtype", c10::IValue(call.inputs()[0].scalar_type()));
  call.keep_tensors(found);
  call.leave_undefined();
}

Tensors scaled_gradients(const Call& call, const Tensors& gradients) {
  for (size_t i = 1; i < gradients.size(); ++i) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !gradients[i].defined(),
        "linear_cross_entropy_gradients: the gradients that it returns have no derivative");
  }
  if (!gradients[0].defined()) {
    return {};
  }
  const Argument given = call["wanted"];
  const at::IntArrayRef wanted = given;
  for (size_t i = 0; i < wanted.size(); ++i) {
    TORCH_CHECK(
        wanted[i] || !call.wants(i),
        "linear_cross_entropy_gradients: a gradient is asked of input ", i,
        ", but wasn't wanted in forward");
  }
  const OptionalDtype dtype = call["dtype"];
  Tensors found;
  for (const at::Tensor& kept : call.kept_tensors()) {
    const at::Tensor gradient = kept.detach();  // it was an output, which autograd knows
    // Scaled before it is rounded.
    found.push_back(gradient.mul(gradients[0].to(gradient.device())).to(*dtype));
  }
  if (at::GradMode::is_enabled()) {
    // What they depend on isn't in the graph: a second derivative would miss it in silence.
    for (at::Tensor& gradient : found) {
      gradient = gradient.detach().requires_grad_();
    }
    const int64_t count = static_cast<int64_t>(found.size());
    found = torch::autograd::DelayedError(
        "linear_cross_entropy has no second derivative; take linear and cross_entropy for it",
        count)(std::move(found));
  }
  return call.placed(found, wanted);
}

void keep_log_probs(Call& call) {
  const at::TensorList given = call.inputs();  // hidden, weight, bias if there is one, ids
  const bool has_bias = call.count("bias") > 0;
  const at::TensorList outputs = call.outputs();
  call.keep_tensors(
      {given[0], given[1], has_bias ? given[2] : at::Tensor(), given[2 + has_bias], outputs[1],
       outputs.size() > 2 ? outputs[2] : at::Tensor()});
}

Tensors log_probs_gradients(const Call& call, const Tensors& gradients) {
  const Tensors kept = call.kept_tensors();
  const auto optional = [](const at::Tensor& x) {
    return x.defined() ? OptionalTensor(x) : std::nullopt;
  };
  auto wanted = call.wanted(3);
  wanted[2] &= kept[2].defined();
  return call.placed(
      token_log_probs_backward(
          gradients, kept[0], kept[1], optional(kept[2]), kept[3], kept[4], optional(kept[5]),
          call["ignore_index"], call["chunk_tokens"], call["softcap"], call["scale"],
          call["temperature"], wanted),
      wanted);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  m.impl("linear_cross_entropy", linear_cross_entropy);
}

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  differentiable(m, "linear_cross_entropy_gradients", scaled_gradients, keep_gradients);
  differentiable(m, "token_log_probs", log_probs_gradients, keep_log_probs);
  not_differentiable(m, "token_log_probs_backward");
}

}  // namespace deepsp
