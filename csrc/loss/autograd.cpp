// Forward finds the gradients of the sum, backward scales them.

#include "../dispatch.h"
#include "ops.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/library.h>

namespace deepsp {

at::Tensor linear_cross_entropy(
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    const at::Tensor& labels,
    int64_t ignore_index,
    double label_smoothing,
    std::optional<int64_t> chunk_tokens) {
  static const auto op = find_op<decltype(linear_cross_entropy)>("deepsp::linear_cross_entropy");
  return op.call(hidden, weight, bias, labels, ignore_index, label_smoothing, chunk_tokens);
}

std::vector<at::Tensor> linear_cross_entropy_gradients(
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    const at::Tensor& labels,
    int64_t ignore_index,
    double label_smoothing,
    std::optional<int64_t> chunk_tokens,
    at::IntArrayRef wanted) {
  static const auto op =
      find_op<decltype(linear_cross_entropy_gradients)>("deepsp::linear_cross_entropy_gradients");
  return op.call(hidden, weight, bias, labels, ignore_index, label_smoothing, chunk_tokens, wanted);
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

struct LinearCrossEntropy : Function<LinearCrossEntropy> {
  static Variable forward(
      AutogradContext* ctx,
      const at::Tensor& hidden,
      const at::Tensor& weight,
      const std::optional<at::Tensor>& bias,
      const at::Tensor& labels,
      int64_t ignore_index,
      double label_smoothing,
      std::optional<int64_t> chunk_tokens) {
    const std::vector<int64_t> wanted{
        hidden.requires_grad(), weight.requires_grad(), bias.has_value() && bias->requires_grad()};
    at::AutoDispatchBelowADInplaceOrView guard;
    const variable_list found = linear_cross_entropy_gradients(
        hidden, weight, bias, labels, ignore_index, label_smoothing, chunk_tokens, wanted);
    ctx->save_for_backward(variable_list(found.begin() + 1, found.end()));
    ctx->saved_data["wanted"] = wanted;
    ctx->saved_data["dtype"] = hidden.scalar_type();
    return found[0];
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto wanted = ctx->saved_data["wanted"].toIntVector();
    const auto dtype = ctx->saved_data["dtype"].toScalarType();
    variable_list found;
    for (const at::Tensor& gradient : ctx->get_saved_variables()) {
      // Scaled before it is rounded.
      found.push_back(gradient.mul(grads[0].to(gradient.device())).to(dtype));
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
    variable_list gradients(7);
    size_t next = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (wanted[i]) {
        gradients[i] = found[next++];
      }
    }
    return gradients;
  }
};

at::Tensor linear_cross_entropy_without_gradients(
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    const at::Tensor& labels,
    int64_t ignore_index,
    double label_smoothing,
    std::optional<int64_t> chunk_tokens) {
  return linear_cross_entropy_gradients(
      hidden, weight, bias, labels, ignore_index, label_smoothing, chunk_tokens, {0, 0, 0})[0];
}

at::Tensor linear_cross_entropy_autograd(
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    const at::Tensor& labels,
    int64_t ignore_index,
    double label_smoothing,
    std::optional<int64_t> chunk_tokens) {
  if (!at::GradMode::is_enabled()) {  // which is off inside forward, whatever it is here
    at::AutoDispatchBelowADInplaceOrView guard;
    return linear_cross_entropy_without_gradients(
        hidden, weight, bias, labels, ignore_index, label_smoothing, chunk_tokens);
  }
  return LinearCrossEntropy::apply(
      hidden, weight, bias, labels, ignore_index, label_smoothing, chunk_tokens);
}

template <c10::DeviceType device>
at::Tensor linear_cross_entropy_autocast(
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    const at::Tensor& labels,
    int64_t ignore_index,
    double label_smoothing,
    std::optional<int64_t> chunk_tokens) {
  const c10::impl::ExcludeDispatchKeyGuard guard{
      c10::DispatchKeySet(at::autocast::get_autocast_dispatch_key_from_device_type(device))};
  const auto dtype = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const at::Tensor& t) {
    return at::autocast::cached_cast(dtype, t, device);
  };
  std::optional<at::Tensor> cast_bias;
  if (bias.has_value()) {
    cast_bias = cast(*bias);
  }
  return linear_cross_entropy(
      cast(hidden), cast(weight), cast_bias, labels, ignore_index, label_smoothing, chunk_tokens);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeExplicitAutograd, m) {
  m.impl("linear_cross_entropy", linear_cross_entropy_without_gradients);
}

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  m.impl("linear_cross_entropy", linear_cross_entropy_autograd);
  m.impl("linear_cross_entropy_gradients", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(deepsp, AutocastCPU, m) {
  m.impl("linear_cross_entropy", linear_cross_entropy_autocast<at::kCPU>);
}

TORCH_LIBRARY_IMPL(deepsp, AutocastCUDA, m) {
  m.impl("linear_cross_entropy", linear_cross_entropy_autocast<at::kCUDA>);
}

}  // namespace deepsp
