// The losses: forward computes the gradients of the sum, backward scales them. Log-probabilities:
// backward computes a chunk's logits again.

#include "../op.h"

#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

namespace deepsp {
namespace {

// A loss. Its op returns `sums` sums over tokens, then the gradients of the first.
struct Loss {
  const char* name;
  Op op;
  size_t sums;
  const char* instead;  // has a second derivative
};
constexpr Loss kCrossEntropy{
    "linear_cross_entropy", Op("_linear_cross_entropy_gradients"), 1, "linear and cross_entropy"};
constexpr Loss kDivergence{"linear_kl", Op("_linear_kl_gradients"), 2, "linear and log_softmax"};

template <const Loss& loss>
c10::IValue sums_over_tokens(const Given& given) {
  std::vector<int64_t> wanted;
  for (const char* name : {"hidden", "weight", "bias"}) {
    const OptionalTensor x = given.optional<at::Tensor>(name);
    wanted.push_back(at::GradMode::is_enabled() && x.has_value() && x->requires_grad());
  }
  std::vector<With> arguments{{"wanted", wanted}};
  for (const char* name : {"teacher_hidden", "teacher_weight", "teacher_bias"}) {
    if (const auto x = given.find(name); x.has_value() && x->isTensor()) {
      arguments.emplace_back(name, x->toTensor().detach());
    }
  }
  const at::Tensor labels = given["labels"];
  OptionalTensor token_weights = given.optional<at::Tensor>("token_weights");
  at::Tensor unit;
  if (token_weights.has_value() && token_weights->is_floating_point() &&
      token_weights->sym_sizes() == labels.sym_sizes()) {
    TORCH_CHECK_VALUE(
        !token_weights->requires_grad(),
        "expected token_weights not to require a gradient, which isn't computed; detach them");
    // The largest is made 1, so that 16-bit gradients of small or large ones keep their digits.
    const at::Tensor weights =
        token_weights->to(at::kDouble)
            .where(labels.ne(static_cast<int64_t>(given["ignore_index"])), 0);
    unit = at::cat({weights.abs().flatten(), weights.new_zeros({1})}).amax();
    unit = unit.where(unit.gt(0), 1);
    token_weights = weights.div(unit);
  }
  arguments.emplace_back("token_weights", token_weights);
  Tensors results = loss.op(given, arguments);
  results.resize(loss.sums);
  for (at::Tensor& sum : results) {
    sum = unit.defined() ? sum.mul(unit) : sum;
  }
  if (loss.sums == 1) {
    return results[0];
  }
  return Tensors{results[0], results[1].detach()};
}

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
  implement<sums_over_tokens<kCrossEntropy>>(m, "linear_cross_entropy");
  implement<sums_over_tokens<kDivergence>>(m, "linear_kl");
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
