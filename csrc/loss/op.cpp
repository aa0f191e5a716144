// One walk over chunks of tokens gives the loss and its gradients: the loss is a sum that is
// scaled by one number later, and so are they. Backward would have to multiply for the logits
// again: 4 products instead of 3 (4096 x 256 x 32000, one thread: 3.5 s against 2.6 s), to save
// what backward allocates a moment later anyway.

#include "../common/checks.h"
#include "../op.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace deepsp {
namespace {

// What logits are computed with, and gradients summed in: float32, float64 for float64.
at::ScalarType wide_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

void check_linear_cross_entropy(
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const OptionalTensor& bias,
    const at::Tensor& labels,
    double label_smoothing,
    std::optional<int64_t> chunk_tokens,
    at::IntArrayRef wanted) {
  const at::ScalarType dtype = hidden.scalar_type();
  TORCH_CHECK_VALUE(
      dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf,
      "expected hidden to be float64, float32, bfloat16 or float16, got ", dtype_name(dtype));
  TORCH_CHECK_VALUE(
      hidden.dim() >= 1,
      "expected hidden to have shape [..., E], with the features of each token "
      "in the last dimension, got a scalar");
  const c10::SymInt features = hidden.sym_size(-1);
  TORCH_CHECK_VALUE(
      weight.dim() == 2 && weight.sym_size(0) > 0 && weight.sym_size(1) == features,
      "expected weight to have shape [C, ", features,
      "], one row of hidden's features for each of at least one class, got ", weight.sym_sizes());
  check_like(weight, "weight", hidden, "hidden", kAutocast);
  if (bias.has_value()) {
    check_bias(*bias, "bias", weight, "weight");
    check_like(*bias, "bias", hidden, "hidden", kAutocast);
  }
  check_device(labels, "labels", hidden, "hidden");
  TORCH_CHECK_VALUE(
      at::isIntegralType(labels.scalar_type(), /*includeBool=*/false),
      "expected labels to have an integer dtype, got ", dtype_name(labels.scalar_type()));
  const c10::SymIntArrayRef tokens = hidden.sym_sizes().slice(0, hidden.dim() - 1);
  TORCH_CHECK_VALUE(
      labels.sym_sizes() == tokens, "expected labels to have shape ", tokens,
      ", one for each token of hidden ", hidden.sym_sizes(), ", got ", labels.sym_sizes());
  TORCH_CHECK_VALUE(
      label_smoothing >= 0 && label_smoothing <= 1, "expected 0 <= label_smoothing <= 1, got ",
      label_smoothing);
  check_at_least(chunk_tokens.value_or(1), 1, "chunk_tokens");
  check_wanted(wanted, 3, "hidden, weight and bias");
  TORCH_CHECK_VALUE(
      !wanted[2] || bias.has_value(), "wanted asks for the gradient of bias, which is None");
}

// What the logits of a chunk take where chunk_tokens isn't given. Smaller chunks cost speed, as
// each adds to the full gradient of the weight; larger ones gain next to none.
constexpr int64_t kChunkBytes = int64_t(32) << 20;

// A sum over as many tokens of what is at most 1 times hidden would leave float16's range.
constexpr int64_t kHalfTokens = 512;

// As PyTorch's own; on a GPU gather asserts it.
void check_labels(
    const at::Tensor& labels, const at::Tensor& valid, int64_t classes, int64_t ignore_index) {
  if (!labels.is_cpu()) {
    return;
  }
  const at::Tensor outside = valid.logical_and(labels.lt(0).logical_or_(labels.ge(classes)));
  if (outside.any().item<bool>()) {
    TORCH_CHECK_INDEX(
        false, "Target ", labels.masked_select(outside)[0].item<int64_t>(),
        " is out of bounds: expected labels from 0 to ", classes - 1, ", or ignore_index (",
        ignore_index, ")");
  }
}

Tensors linear_cross_entropy_gradients(
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const OptionalTensor& bias,
    const at::Tensor& labels,
    int64_t ignore_index,
    double label_smoothing,
    std::optional<int64_t> chunk_tokens,
    at::IntArrayRef wanted) {
  check_linear_cross_entropy(hidden, weight, bias, labels, label_smoothing, chunk_tokens, wanted);
  const at::ScalarType wide = wide_dtype(hidden.scalar_type());
  const auto wide_options = hidden.options().dtype(wide);
  const at::Tensor loss = at::zeros({}, hidden.options().dtype(at::kDouble));
  at::Tensor hidden_grad, weight_grad, bias_grad;
  Tensors found{loss};
  if (wanted[0]) {
    hidden_grad = found.emplace_back(at::empty_symint(hidden.sym_sizes(), hidden.options()));
  }
  if (wanted[1]) {
    weight_grad = found.emplace_back(at::zeros_symint(weight.sym_sizes(), wide_options));
  }
  if (wanted[2]) {
    bias_grad = found.emplace_back(at::zeros_symint(bias->sym_sizes(), wide_options));
  }
  if (hidden.is_meta()) {
    return found;
  }
  const bool backward = found.size() > 1;
  const bool narrow = wide != hidden.scalar_type();
  const int64_t tokens = labels.numel(), classes = weight.size(0), features = weight.size(1);
  const at::Tensor x = hidden.reshape({tokens, features});
  at::Tensor label = labels.reshape({tokens, 1}).to(at::kLong);
  const at::Tensor valid = label.ne(ignore_index);
  check_labels(label, valid, classes, ignore_index);
  label = label.masked_fill(valid.logical_not(), 0);

  const bool half = hidden.scalar_type() == at::kHalf;
  const int64_t row_bytes = classes * static_cast<int64_t>(c10::elementSize(wide));
  int64_t chunk = chunk_tokens.value_or(std::max<int64_t>(1, kChunkBytes / row_bytes));
  chunk = std::max<int64_t>(1, std::min({tokens, chunk, half ? kHalfTokens : chunk}));
  // Used by each chunk in turn: a fresh one each time would cost its page faults.
  const at::Tensor wide_buffer = at::empty({chunk, classes}, wide_options);
  const at::Tensor narrow_buffer =
      narrow ? at::empty({chunk, classes}, hidden.options()) : wide_buffer;
  at::Tensor weight_part;
  if (wanted[0]) {
    hidden_grad = hidden_grad.view({tokens, features});
  }
  if (wanted[1] && narrow) {
    weight_part = at::empty({classes, features}, hidden.options());
  }
  for (int64_t begin = 0; begin < tokens; begin += chunk) {
    const int64_t count = std::min(chunk, tokens - begin);
    const at::Tensor x_part = x.narrow(0, begin, count);
    const at::Tensor label_part = label.narrow(0, begin, count);
    const at::Tensor counts = valid.narrow(0, begin, count).to(wide);
    const at::Tensor logits = wide_buffer.narrow(0, 0, count);
    at::Tensor product = narrow_buffer.narrow(0, 0, count);
    at::mm_out(product, x_part, weight.t());
    if (narrow) {
      logits.copy_(product);
    }
    if (bias.has_value()) {
      logits.add_(*bias);
    }
    // Less their maximum, so that no exponential overflows.
    logits.sub_(logits.amax(at::IntArrayRef{1}, /*keepdim=*/true));
    at::Tensor aim = logits.gather(1, label_part).mul_(1 - label_smoothing);
    if (label_smoothing > 0) {
      aim.add_(logits.mean(at::OptionalIntArrayRef{1}, /*keepdim=*/true), label_smoothing);
    }
    logits.exp_();
    const at::Tensor sum = logits.sum(at::OptionalIntArrayRef{1}, /*keepdim=*/true);
    loss.add_(sum.log().sub_(aim).masked_fill_(counts.eq(0), 0).sum(at::kDouble));
    if (!backward) {
      continue;
    }
    // The logits' gradient: their softmax less what the label asks for.
    logits.mul_(counts.div(sum));
    if (label_smoothing > 0) {
      logits.sub_(counts, label_smoothing / static_cast<double>(classes));
    }
    logits.scatter_add_(1, label_part, counts.mul(label_smoothing - 1));
    if (wanted[2]) {
      bias_grad.add_(logits.sum(at::OptionalIntArrayRef{0}));
    }
    if (narrow) {
      product.copy_(logits);
    }
    if (wanted[0]) {
      at::Tensor out = hidden_grad.narrow(0, begin, count);
      at::mm_out(out, product, weight);
    }
    if (wanted[1] && narrow) {
      const int64_t scale = half ? kHalfTokens : 1;
      at::mm_out(weight_part, product.t(), half ? x_part.div(scale) : x_part);
      weight_grad.add_(weight_part, scale);
    } else if (wanted[1]) {
      weight_grad.addmm_(product.t(), x_part);
    }
  }

  return found;
}

}  // namespace

DEEPSP_KERNELS(m) {
  m.impl("linear_cross_entropy_gradients", linear_cross_entropy_gradients);
}

}  // namespace deepsp
