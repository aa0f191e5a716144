// Forward finds the gradients of the sum, backward scales them.

#include "../op.h"

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
    at::IntArrayRef wanted)>
    linear_cross_entropy_gradients("linear_cross_entropy_gradients");

at::Tensor linear_cross_entropy(
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const OptionalTensor& bias,
    const at::Tensor& labels,
    int64_t ignore_index,
    double label_smoothing,
    std::optional<int64_t> chunk_tokens) {
  const auto wants = [](const at::Tensor& x) {
    return at::GradMode::is_enabled() && x.requires_grad();
  };
  return linear_cross_entropy_gradients(
      hidden, weight, bias, labels, ignore_index, label_smoothing, chunk_tokens,
      {wants(hidden), wants(weight), bias.has_value() && wants(*bias)})[0];
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

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  m.impl("linear_cross_entropy", linear_cross_entropy);
}

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  differentiable(m, "linear_cross_entropy_gradients", scaled_gradients, keep_gradients);
}

}  // namespace deepsp
