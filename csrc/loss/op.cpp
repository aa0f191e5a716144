// One walk over chunks of tokens gives the loss and its gradients: the loss is a sum that is
// scaled by one number later, and so are they. Backward would have to multiply for the logits
// again: 4 products instead of 3 (4096 x 256 x 32000, one thread: 3.5 s against 2.6 s), to save
// what backward allocates a moment later anyway.

#include "logits.h"

namespace deepsp {
namespace {

c10::IValue linear_cross_entropy_gradients(const Given& given) {
  const LogitsArguments logits_of(given);
  const at::Tensor& hidden = logits_of.hidden;
  const at::Tensor labels = given["labels"];
  const OptionalTensor token_weights = given.optional<at::Tensor>("token_weights");
  const double label_smoothing = given["label_smoothing"], z_loss = given["z_loss"];
  const at::IntArrayRef wanted = given["wanted"];
  check_logits(logits_of, labels, "labels", wanted);
  TORCH_CHECK_VALUE(
      label_smoothing >= 0 && label_smoothing <= 1, "expected 0 <= label_smoothing <= 1, got ",
      label_smoothing);
  TORCH_CHECK_VALUE(
      z_loss >= 0 && std::isfinite(z_loss), "expected z_loss to be a finite number >= 0, got ",
      z_loss);
  check_token_weights(token_weights, labels, hidden);
  const at::Tensor loss = at::zeros({}, hidden.options().dtype(at::kDouble));
  LogitsGradients gradients(logits_of, wanted);
  Tensors found{loss};
  found.insert(found.end(), gradients.all.begin(), gradients.all.end());
  if (hidden.is_meta()) {
    return found;
  }
  const at::ScalarType wide = wide_dtype(hidden.scalar_type());
  const Classes label(labels, logits_of.weight.size(0), given["ignore_index"]);
  const at::Tensor counts = token_counts(token_weights, label.valid, wide);
  Logits head(logits_of, label.of.size(0), gradients);
  head.walk([&](int64_t begin, int64_t size, const at::Tensor& logits) {
    const at::Tensor label_part = label.of.narrow(0, begin, size);
    const at::Tensor count = counts.narrow(0, begin, size);
    // Less their maximum, so that no exponential overflows.
    const at::Tensor most = logits.amax(at::IntArrayRef{1}, /*keepdim=*/true);
    logits.sub_(most);
    at::Tensor aim = logits.gather(1, label_part).mul_(1 - label_smoothing);
    if (label_smoothing > 0) {
      aim.add_(logits.mean(at::OptionalIntArrayRef{1}, /*keepdim=*/true), label_smoothing);
    }
    logits.exp_();
    const at::Tensor sum = logits.sum(at::OptionalIntArrayRef{1}, /*keepdim=*/true);
    const at::Tensor log_sum = sum.log();
    at::Tensor each = log_sum.sub(aim);
    at::Tensor share = count.div(sum);  // what a softmax counts
    if (z_loss > 0) {
      const at::Tensor log_sum_exp = log_sum.add_(most);
      each.add_(log_sum_exp.square(), z_loss);
      share.mul_(log_sum_exp.mul(2 * z_loss).add_(1));
    }
    loss.add_(each.mul_(count).masked_fill_(count.eq(0), 0).sum(at::kDouble));
    if (gradients.all.empty()) {
      return;
    }
    // The logits' gradient: their softmax less what the label asks for.
    logits.mul_(share);
    if (label_smoothing > 0) {
      logits.sub_(count, label_smoothing / static_cast<double>(head.classes));
    }
    logits.scatter_add_(1, label_part, count.mul(label_smoothing - 1));
    head.add_gradients(begin, size, logits);
  });
  return found;
}

}  // namespace

DEEPSP_KERNELS(m) {
  implement<linear_cross_entropy_gradients>(m, "_linear_cross_entropy_gradients");
}

}  // namespace deepsp
