#pragma once
// The logits of a linear layer for a chunk of tokens at a time, and their gradients' way back. They
// are softcap * tanh(scale * (x weight^T + bias) / softcap) / temperature.

#include "../op.h"
#include "../common/checks.h"
#include "../common/wide.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

namespace deepsp {

struct LogitsOf {
  std::optional<double> softcap;
  double scale = 1;
  double temperature = 1;
};

// The arguments that these ops share.
struct LogitsArguments {
  const std::string model;  // begins the names of its arguments, in an op of two models
  const at::Tensor hidden, weight;
  const OptionalTensor bias;
  std::optional<int64_t> chunk_tokens;
  const LogitsOf of;

  explicit LogitsArguments(
      const Given& given, double temperature = 1, const std::string& model = "")
      : model(model),
        hidden(given[model + "hidden"]),
        weight(given[model + "weight"]),
        bias(given.optional<at::Tensor>(model + "bias")),
        chunk_tokens(given.optional<int64_t>("chunk_tokens")),
        of{given.optional<double>(model + "softcap"), given[model + "scale"], temperature} {}
};

// The memory for one chunk's logits unless chunk_tokens is given. Smaller chunks are slower, since
// each adds to the full gradient of the weight; larger ones are hardly faster.
constexpr int64_t kChunkBytes = int64_t(32) << 20;
// On a GPU at least as many tokens: by arithmetic, reading and writing the weight's gradient in
// float32 takes as long there as the products of 350 (8 bytes at 3 TB/s, 6 operations a token at
// 800 TFLOP/s).
constexpr int64_t kGpuTokens = 1024;

// A sum over as many tokens of what is at most 1 times hidden would leave float16's range.
constexpr int64_t kHalfTokens = 512;

// `labels_name`: the op's name for the classes.
inline void check_logits(
    const LogitsArguments& given,
    const at::Tensor& labels,
    const std::string& labels_name,
    at::IntArrayRef wanted) {
  const auto& [model, hidden, weight, bias, chunk_tokens, of] = given;
  const at::ScalarType dtype = hidden.scalar_type();
  const std::string hidden_name = model + "hidden", weight_name = model + "weight",
                    bias_name = model + "bias";
  TORCH_CHECK_VALUE(
      is_summable(dtype), "expected ", hidden_name,
      " to be float64, float32, bfloat16 or float16, got ", dtype_name(dtype));
  TORCH_CHECK_VALUE(
      hidden.dim() >= 1, "expected ", hidden_name,
      " to have shape [..., E], with the features of each token "
      "in the last dimension, got a scalar");
  const c10::SymInt features = hidden.sym_size(-1);
  TORCH_CHECK_VALUE(
      weight.dim() == 2 && weight.sym_size(0) > 0 && weight.sym_size(1) == features, "expected ",
      weight_name, " to have shape [C, ", features, "], one row of ", hidden_name,
      "'s features for each of at least one class, got ", weight.sym_sizes());
  check_like(weight, weight_name, hidden, hidden_name.c_str(), kAutocast);
  if (bias.has_value()) {
    check_bias(*bias, bias_name, weight, weight_name);
    check_like(*bias, bias_name, hidden, hidden_name.c_str(), kAutocast);
  }
  check_device(labels, labels_name, hidden, hidden_name.c_str());
  TORCH_CHECK_VALUE(
      at::isIntegralType(labels.scalar_type(), /*includeBool=*/false), "expected ", labels_name,
      " to have an integer dtype, got ", dtype_name(labels.scalar_type()));
  const c10::SymIntArrayRef tokens = hidden.sym_sizes().slice(0, hidden.dim() - 1);
  TORCH_CHECK_VALUE(
      labels.sym_sizes() == tokens, "expected ", labels_name, " to have shape ", tokens,
      ", one for each token of ", hidden_name, " ", hidden.sym_sizes(), ", got ",
      labels.sym_sizes());
  const double softcap = of.softcap.value_or(1);
  TORCH_CHECK_VALUE(
      softcap > 0 && std::isfinite(softcap), "expected ", model,
      "softcap to be None or a finite number > 0, got ", softcap);
  TORCH_CHECK_VALUE(
      std::isfinite(of.scale), "expected ", model, "scale to be finite, got ", of.scale);
  TORCH_CHECK_VALUE(
      of.temperature > 0 && std::isfinite(of.temperature),
      "expected temperature to be a finite number > 0, got ", of.temperature);
  check_at_least(chunk_tokens.value_or(1), 1, "chunk_tokens");
  check_wanted(wanted, 3, "hidden, weight and bias");
  TORCH_CHECK_VALUE(
      !wanted[2] || bias.has_value(), "wanted asks for the gradient of bias, which is None");
}

inline void check_token_weights(
    const OptionalTensor& token_weights, const at::Tensor& labels, const at::Tensor& hidden) {
  if (token_weights.has_value()) {
    TORCH_CHECK_VALUE(
        token_weights->is_floating_point() && token_weights->sym_sizes() == labels.sym_sizes(),
        "expected token_weights to be floating point, of shape ", labels.sym_sizes(),
        ", one for each token, got ", dtype_name(token_weights->scalar_type()), " ",
        token_weights->sym_sizes());
    check_device(*token_weights, "token_weights", hidden, "hidden");
  }
}

// How often each token counts: 1, or its weight; 0 where it is ignored. `valid`: [tokens, 1].
inline at::Tensor token_counts(
    const OptionalTensor& token_weights, const at::Tensor& valid, at::ScalarType dtype) {
  return token_weights.has_value() ? token_weights->reshape(valid.sizes()).to(dtype).where(valid, 0)
                                   : valid.to(dtype);
}

// The classes of tokens, with 0 where they are ignored.
struct Classes {
  at::Tensor of;     // [tokens, 1] int64
  at::Tensor valid;  // [tokens, 1] bool

  Classes(const at::Tensor& labels, int64_t classes, int64_t ignore_index)
      : of(labels.reshape({labels.numel(), 1}).to(at::kLong)), valid(of.ne(ignore_index)) {
    // As PyTorch's own; on a GPU gather asserts it.
    if (of.is_cpu()) {
      const at::Tensor outside = valid.logical_and(of.lt(0).logical_or_(of.ge(classes)));
      if (outside.any().item<bool>()) {
        TORCH_CHECK_INDEX(
            false, "Target ", of.masked_select(outside)[0].item<int64_t>(),
            " is out of bounds: expected labels from 0 to ", classes - 1, ", or ignore_index (",
            ignore_index, ")");
      }
    }
    of = of.masked_fill(valid.logical_not(), 0);
  }
};

// The wanted gradients of hidden, weight and bias. Those of weight and bias are summed over the
// chunks, in the wide dtype.
struct LogitsGradients {
  at::Tensor hidden, weight, bias;
  Tensors all;

  LogitsGradients(const LogitsArguments& of, at::IntArrayRef wanted) {
    const auto wide = of.hidden.options().dtype(wide_dtype(of.hidden.scalar_type()));
    if (wanted[0]) {
      hidden = all.emplace_back(at::zeros_symint(of.hidden.sym_sizes(), of.hidden.options()));
    }
    if (wanted[1]) {
      weight = all.emplace_back(at::zeros_symint(of.weight.sym_sizes(), wide));
    }
    if (wanted[2]) {
      bias = all.emplace_back(at::zeros_symint(of.bias->sym_sizes(), wide));
    }
  }
};

class Logits {
 public:
  const int64_t tokens, classes;

  // `gradients`: those that add_gradients is to compute. `models`: the number of models whose
  // logits share a chunk's memory.
  Logits(
      const LogitsArguments& given,
      int64_t tokens,
      const LogitsGradients& gradients,
      int64_t models = 1)
      : tokens(tokens),
        classes(given.weight.size(0)),
        x_(given.hidden.reshape({tokens, given.weight.size(1)})),
        weight_(given.weight),
        bias_(given.bias),
        of_(given.of),
        gradients_(gradients),
        wide_(wide_dtype(x_.scalar_type())),
        narrow_(wide_ != x_.scalar_type()),
        half_(x_.scalar_type() == at::kHalf) {
    const int64_t row_bytes = classes * static_cast<int64_t>(c10::elementSize(wide_));
    const int64_t least = x_.is_cpu() ? 1 : kGpuTokens;
    const bool half_sums = half_ && !gradients.all.empty();
    chunk_ = given.chunk_tokens.value_or(std::max(least, kChunkBytes / (models * row_bytes)));
    chunk_ = std::max<int64_t>(1, std::min({tokens, chunk_, half_sums ? kHalfTokens : chunk_}));
    // Used by each chunk in turn: a fresh one each time would cost its page faults.
    const auto wide_options = x_.options().dtype(wide_);
    wide_buffer_ = at::empty({chunk_, classes}, wide_options);
    narrow_buffer_ = narrow_ ? at::empty({chunk_, classes}, x_.options()) : wide_buffer_;
    if (of_.softcap.has_value() && !gradients.all.empty()) {
      slopes_ = at::empty({chunk_, classes}, wide_options);
    }
    if (gradients.hidden.defined()) {
      hidden_grad_ = gradients.hidden.view(x_.sizes());
    }
    if (gradients.weight.defined() && narrow_) {
      weight_part_ = at::empty(weight_.sizes(), x_.options());
    }
  }

  int64_t chunk_tokens() const { return chunk_; }

  // Calls visit(begin, count, logits) for each chunk. The logits, [count, classes], may be
  // overwritten: the next chunk's take their place. On the CPU, chunks without a token that is
  // `valid` are left out, and have gradients of 0.
  template <class Visit>
  void walk(const Visit& visit, const at::Tensor& valid = {}) {
    for (int64_t begin = 0; begin < tokens; begin += chunk_) {
      const int64_t count = std::min(chunk_, tokens - begin);
      if (!valid.defined() || !valid.is_cpu() || valid.narrow(0, begin, count).any().item<bool>()) {
        visit(begin, count, of_chunk(begin, count));
      }
    }
  }

  // The logits of `count` tokens, at most a chunk's.
  at::Tensor of_chunk(int64_t begin, int64_t count) {
    const at::Tensor logits = wide_buffer_.narrow(0, 0, count);
    at::Tensor product = narrow_buffer_.narrow(0, 0, count);
    at::mm_out(product, x_.narrow(0, begin, count), weight_.t());
    if (narrow_) {
      logits.copy_(product);
    }
    if (bias_.has_value()) {
      logits.add_(*bias_);
    }
    if (!of_.softcap.has_value()) {
      if (const double factor = of_.scale / of_.temperature; factor != 1) {
        logits.mul_(factor);
      }
      return logits;
    }
    logits.mul_(of_.scale / *of_.softcap).tanh_();
    if (slopes_.defined()) {
      at::Tensor slopes = slopes_.narrow(0, 0, count);
      at::mul_out(slopes, logits, logits).neg_().add_(1);
    }
    return logits.mul_(*of_.softcap / of_.temperature);
  }

  // Adds the gradients of the chunk that is visited, and overwrites `grad`. With `unit`, the
  // gradient of hidden is that many times this one's.
  void add_gradients(
      int64_t begin, int64_t count, const at::Tensor& grad, const at::Tensor& unit = {}) {
    if (slopes_.defined()) {
      grad.mul_(slopes_.narrow(0, 0, count));
    }
    if (const double factor = of_.scale / of_.temperature; factor != 1) {
      grad.mul_(factor);
    }
    if (gradients_.bias.defined()) {
      gradients_.bias.add_(grad.sum(at::OptionalIntArrayRef{0}));
    }
    at::Tensor product = grad;
    if (narrow_) {
      product = narrow_buffer_.narrow(0, 0, count);
      product.copy_(grad);
    }
    if (hidden_grad_.defined()) {
      at::Tensor out = hidden_grad_.narrow(0, begin, count);
      at::mm_out(out, product, weight_);
      if (unit.defined()) {
        out.copy_(out.to(wide_).mul_(unit));
      }
    }
    if (gradients_.weight.defined()) {
      const at::Tensor x = x_.narrow(0, begin, count);
      if (narrow_) {
        const int64_t scale = half_ ? kHalfTokens : 1;
        at::mm_out(weight_part_, product.t(), half_ ? x.div(scale) : x);
        gradients_.weight.add_(weight_part_, scale);
      } else {
        gradients_.weight.addmm_(product.t(), x);
      }
    }
  }

 private:
  const at::Tensor x_, weight_;
  const OptionalTensor bias_;
  const LogitsOf of_;
  const LogitsGradients& gradients_;
  const at::ScalarType wide_;
  const bool narrow_, half_;
  int64_t chunk_;
  at::Tensor wide_buffer_, narrow_buffer_, slopes_, hidden_grad_, weight_part_;
};

}  // namespace deepsp
