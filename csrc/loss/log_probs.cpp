// Backward multiplies for the logits again: every token has a gradient of its own, so there is
// nothing that forward could have summed.

#include "logits.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/xlogy.h>

namespace deepsp {
namespace {

c10::IValue token_log_probs(const Given& given) {
  const LogitsArguments logits_of(given, given["temperature"]);
  const at::Tensor& hidden = logits_of.hidden;
  const at::Tensor ids = given["ids"];
  const bool entropy = given["entropy"];
  check_logits(logits_of, ids, "ids", {0, 0, 0});
  const auto wide = hidden.options().dtype(wide_dtype(hidden.scalar_type()));
  Tensors found;
  for (int i = 0; i < 2 + entropy; ++i) {
    found.push_back(at::empty_symint(ids.sym_sizes(), wide));
  }
  if (hidden.is_meta()) {
    return found;
  }
  const Classes id(ids, logits_of.weight.size(0), given["ignore_index"]);
  const LogitsGradients none(logits_of, {0, 0, 0});
  Logits head(logits_of, id.of.size(0), none);
  head.walk([&](int64_t begin, int64_t size, const at::Tensor& logits) {
    const auto part = [&](const at::Tensor& x) { return x.view({-1, 1}).narrow(0, begin, size); };
    const at::Tensor ignored = id.valid.narrow(0, begin, size).logical_not();
    const at::Tensor most = logits.amax(at::IntArrayRef{1}, /*keepdim=*/true);
    logits.sub_(most);
    const at::Tensor chosen = logits.gather(1, id.of.narrow(0, begin, size));
    logits.exp_();
    const at::Tensor sum = logits.sum(at::OptionalIntArrayRef{1}, /*keepdim=*/true);
    const at::Tensor log_sum = sum.log();
    part(found[0]).copy_(chosen.sub_(log_sum).masked_fill_(ignored, 0));
    part(found[1]).copy_(most.add_(log_sum));
    if (entropy) {
      // The mean of the logits; 0 where a probability is 0, whose logit may be infinite.
      const at::Tensor mean =
          logits.xlogy_(logits).sum(at::OptionalIntArrayRef{1}, /*keepdim=*/true).div_(sum);
      part(found[2]).copy_(log_sum.sub(mean).masked_fill_(ignored, 0));
    }
  });
  return found;
}

c10::IValue token_log_probs_backward(const Given& given) {
  const LogitsArguments logits_of(given, given["temperature"]);
  const at::Tensor& hidden = logits_of.hidden;
  const at::TensorList grads = given["grads"];
  const at::Tensor ids = given["ids"], logsumexp = given["logsumexp"];
  const OptionalTensor entropy = given.optional<at::Tensor>("entropy");
  const at::IntArrayRef wanted = given["wanted"];
  check_logits(logits_of, ids, "ids", wanted);
  TORCH_CHECK_VALUE(
      grads.size() == size_t(2 + entropy.has_value()), "expected grads to have ",
      2 + entropy.has_value(), " entries, one for each output, got ", grads.size());
  const auto check_each = [&](const at::Tensor& x, const char* name) {
    TORCH_CHECK_VALUE(
        x.sym_sizes() == ids.sym_sizes() && x.is_floating_point(), "expected ", name,
        " to be floating point, of the shape of ids ", ids.sym_sizes(), ", got ",
        dtype_name(x.scalar_type()), " ", x.sym_sizes());
    check_device(x, name, hidden, "hidden");
  };
  for (const at::Tensor& grad : grads) {
    check_each(grad, "each of grads");
  }
  check_each(logsumexp, "logsumexp");
  if (entropy.has_value()) {
    check_each(*entropy, "entropy");
  }
  LogitsGradients gradients(logits_of, wanted);
  Tensors found = gradients.all;
  for (at::Tensor& x : found) {
    if (hidden.is_meta() && x.scalar_type() != hidden.scalar_type()) {
      x = at::empty_symint(x.sym_sizes(), hidden.options());
    }
  }
  if (hidden.is_meta()) {
    return found;
  }
  const at::ScalarType wide = wide_dtype(hidden.scalar_type());
  const Classes id(ids, logits_of.weight.size(0), given["ignore_index"]);
  const int64_t tokens = id.of.size(0);
  Tensors each;  // of log_probs, logsumexp, entropy
  for (const at::Tensor& grad : grads) {
    each.push_back(grad.reshape({tokens, 1}).to(wide));
  }
  // An ignored token's log-probability and entropy are constants.
  each[0] = each[0].where(id.valid, 0);
  if (entropy.has_value()) {
    each[2] = each[2].where(id.valid, 0);
  }
  // A mean over many tokens has gradients that float16 rounds to 0: the largest is made 1.
  at::Tensor unit;
  if (hidden.scalar_type() == at::kHalf && tokens > 0) {
    for (const at::Tensor& grad : each) {
      const at::Tensor most = grad.abs().amax();
      unit = unit.defined() ? unit.maximum(most) : most;
    }
    unit.masked_fill_(unit.eq(0), 1);
    for (at::Tensor& grad : each) {
      grad = grad.div(unit);
    }
  }
  const at::Tensor log_sum_exp = logsumexp.reshape({tokens, 1}).to(wide);
  at::Tensor entropies;
  if (entropy.has_value()) {
    entropies = entropy->reshape({tokens, 1}).to(wide);
  }
  Logits head(logits_of, tokens, gradients);
  at::Tensor surprises;  // p log p
  head.walk([&](int64_t begin, int64_t size, const at::Tensor& logits) {
    const auto part = [&](const at::Tensor& x) { return x.narrow(0, begin, size); };
    const at::Tensor of_chosen = part(each[0]);
    at::Tensor share = part(each[1]).sub(of_chosen);  // times the softmax
    logits.sub_(part(log_sum_exp)).exp_();
    if (entropy.has_value()) {
      // -p (log p + entropy)
      if (!surprises.defined()) {
        surprises = at::empty_like(logits);
      }
      at::Tensor surprise = surprises.narrow(0, 0, size);
      at::xlogy_out(surprise, logits, logits);
      const at::Tensor of_entropy = part(each[2]);
      share.addcmul_(of_entropy, part(entropies), -1);
      logits.mul_(share).sub_(surprise.mul_(of_entropy));
    } else {
      logits.mul_(share);
    }
    logits.scatter_add_(1, id.of.narrow(0, begin, size), of_chosen);
    head.add_gradients(begin, size, logits, unit);
  });
  if (unit.defined()) {
    for (const at::Tensor& x : {gradients.weight, gradients.bias}) {
      if (x.defined()) {
        x.mul_(unit);
      }
    }
  }
  for (at::Tensor& x : found) {
    x = x.to(hidden.scalar_type());
  }
  return found;
}

}  // namespace

DEEPSP_KERNELS(m) {
  implement<token_log_probs>(m, "token_log_probs");
  implement<token_log_probs_backward>(m, "_token_log_probs_backward");
}

}  // namespace deepsp
