// The losses: forward computes the gradients of the sum, backward scales them. Log-probabilities:
// backward computes a chunk's logits again.

#include "../op.h"

#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

namespace deepsp {
namespace {

const Op cross_entropy_gradients("_linear_cross_entropy_gradients");
const Op kl_gradients("_linear_kl_gradients");

// The arguments that have a gradient, for `wanted`.
std::vector<int64_t> wanted_gradients(const Given& given) {
  std::vector<int64_t> wanted;
  for (const char* name : {"hidden", "weight", "bias"}) {
    const OptionalTensor x = given.optional<at::Tensor>(name);
    wanted.push_back(at::GradMode::is_enabled() && x.has_value() && x->requires_grad());
  }
  return wanted;
}

// Calls sums(token_weights), which returns sums over tokens. The largest weight is made 1, so that
// 16-bit gradients of small or large ones keep their digits.
template <class Sums>
Tensors by_weights(const Given& given, const Sums& sums) {
  const at::Tensor labels = given["labels"];
  const OptionalTensor token_weights = given.optional<at::Tensor>("token_weights");
  if (!token_weights.has_value() || !token_weights->is_floating_point() ||
      token_weights->sym_sizes() != labels.sym_sizes()) {
    return sums(token_weights);
  }
  TORCH_CHECK_VALUE(
      !token_weights->requires_grad(),
      "expected token_weights not to require a gradient, which isn't computed; detach them");
  const at::Tensor weights = token_weights->to(at::kDouble)
                                 .where(labels.ne(static_cast<int64_t>(given["ignore_index"])), 0);
  at::Tensor unit = at::cat({weights.abs().flatten(), weights.new_zeros({1})}).amax();
  unit = unit.where(unit.gt(0), 1);
  Tensors results = sums(weights.div(unit));
  for (at::Tensor& result : results) {
    result = result.mul(unit);
  }
  return results;
}

c10::IValue linear_cross_entropy(const Given& given) {
  const Tensors sums = by_weights(given, [&](const OptionalTensor& weights) {
    const Tensors results = cross_entropy_gradients(
        given, {{"wanted", wanted_gradients(given)}, {"token_weights", weights}});
    return Tensors{results[0]};
  });
  return sums[0];
}

c10::IValue linear_kl(const Given& given) {
  // The teacher's tensors are constants.
  const auto constant = [&](const char* name) {
    const OptionalTensor x = given.optional<at::Tensor>(name);
    return With(name, x.has_value() ? c10::IValue(x->detach()) : c10::IValue());
  };
  return by_weights(given, [&](const OptionalTensor& weights) {
    const Tensors results = kl_gradients(
        given, {{"wanted", wanted_gradients(given)},
                {"token_weights", weights},
                constant("teacher_hidden"),
                constant("teacher_weight"),
                constant("teacher_bias")});
    return Tensors{results[0], results[1].detach()};
  });
}

// A loss whose op returns the gradients of its first output after `sums` sums.
struct Loss {
  const char* name;
  size_t sums;
  const char* instead;  // has a second derivative
};
constexpr Loss kCrossEntropy{"linear_cross_entropy", 1, "linear and cross_entropy"};
constexpr Loss kDivergence{"linear_kl", 2, "linear and log_softmax"};

template <const Loss& loss>
void keep_gradients(Call& call) {
  call.keep("dtype", c10::IValue(call.inputs()[0].scalar_type()));
  call.keep_tensors(call.outputs().slice(loss.sums).vec());
  call.leave_undefined();
}

template <const Loss& loss>
Tensors scaled_gradients(const Call& call, const Tensors& gradients) {
  for (size_t i = 1; i < gradients.size(); ++i) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !gradients[i].defined(), loss.name,
        "_gradients: the results after its first have no derivative");
  }
  if (!gradients[0].defined()) {
    return {};
  }
  const Argument given = call["wanted"];
  const at::IntArrayRef wanted = given;
  for (size_t i = 0; i < wanted.size(); ++i) {
    TORCH_CHECK(
        wanted[i] || !call.wants(i), loss.name, "_gradients: a gradient is asked of input ", i,
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
        c10::str(loss.name, " has no second derivative; take ", loss.instead, " for it"),
        count)(std::move(found));
  }
  return call.placed(found, wanted);
}

const BackwardOp kLogProbsBackward{
    Op("_token_log_probs_backward"),
    /*inputs=*/{"hidden", "weight", "bias", "ids"},
    /*results=*/{"log_probs", "logsumexp", "entropy"},
    /*saved=*/{"hidden", "weight", "bias", "ids", "logsumexp", "entropy"},
    /*gradients=*/{"hidden", "weight", "bias"}};

void save_log_probs(Call& call) {
  save_for(kLogProbsBackward, call);
}

Tensors log_probs_gradients(const Call& call, const Tensors& gradients) {
  return call_backward(kLogProbsBackward, call, {{"grads", gradients}});
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  implement<linear_cross_entropy>(m, "linear_cross_entropy");
  implement<linear_kl>(m, "linear_kl");
}

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  differentiable(
      m, "_linear_cross_entropy_gradients", scaled_gradients<kCrossEntropy>,
      keep_gradients<kCrossEntropy>);
  differentiable(
      m, "_linear_kl_gradients", scaled_gradients<kDivergence>, keep_gradients<kDivergence>);
  differentiable(m, "token_log_probs", log_probs_gradients, save_log_probs);
  not_differentiable(m, "_token_log_probs_backward");
}

}  // namespace deepsp
