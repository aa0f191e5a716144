// Attention with dropout as one node of a graph. What draws inside of a graph draws from generators
// that are seeded alike on all ranks, so that each would drop what the others drop in their heads.
// Here a rank's own seed says what it drops, in backward once more: only the seed is kept.

#include "../common/checks.h"
#include "ops.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>

namespace deepsp {
namespace {

// wanted: whether for q, k, v, attn_mask.
const Op<Tensors(
    const at::Tensor& grad,
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const OptionalTensor& attn_mask,
    double dropout_p,
    bool is_causal,
    std::optional<double> scale,
    const at::Tensor& seed,
    at::IntArrayRef wanted)>
    attention_with_dropout_backward("attention_with_dropout_backward");

void check_seed(const at::Tensor& seed) {
  TORCH_CHECK_VALUE(
      seed.dim() == 0 && seed.scalar_type() == at::kLong && (seed.is_cpu() || seed.is_meta()),
      "expected seed to be the int64 scalar on the CPU that dropout_seed returns, got ",
      dtype_name(seed.scalar_type()), " of shape ", seed.sym_sizes(), " on ", seed.device());
}

void check(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const OptionalTensor& attn_mask,
    double dropout_p,
    bool is_causal) {
  // Some tokens' queries, in any order: what they see is the mask's.
  check_full(q, k, v, {c10::SymInt(0), is_causal ? k.sym_size(1) : q.sym_size(1)});
  check_attention(
      attn_mask, dropout_p, is_causal, q.scalar_type(), q.sym_size(0), q.sym_size(2), k.sym_size(1),
      q.sym_size(1));
}

// One for each of a rank's parts of heads, of which there are few; they are drawn one by one.
constexpr int64_t kMaxDraws = int64_t(1) << 20;

// splitmix64's finalizer: neighbours have nothing in common.
uint64_t mix(uint64_t seed, uint64_t number) {
  uint64_t x = seed + (number + 1) * 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

uint64_t draw(at::Generator& generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  if (generator.device().is_cpu()) {
    return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
  }
  // A counter: where it stands says what comes next. Nothing is asked of the device.
  const uint64_t at = generator.get_offset();
  generator.set_offset(at + 4);
  return mix(generator.current_seed(), at);
}

// The generator draws what a seed says, and goes on afterwards as if nothing had been drawn.
class Seeded {
 public:
  Seeded(at::Generator generator, int64_t seed) : generator_(std::move(generator)) {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    before_ = generator_.get_state();
    generator_.set_current_seed(static_cast<uint64_t>(seed));
  }
  ~Seeded() {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    generator_.set_state(before_);
  }
  Seeded(const Seeded&) = delete;
  Seeded& operator=(const Seeded&) = delete;

 private:
  at::Generator generator_;
  at::Tensor before_;
};

at::Tensor seeded_attention(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const OptionalTensor& attn_mask,
    double dropout_p,
    bool is_causal,
    std::optional<double> scale,
    const at::Generator& generator,
    int64_t seed) {
  // Whoever calls has cast, once: backward wouldn't again.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const Seeded seeded(generator, seed);
  return at::scaled_dot_product_attention(
             q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask, dropout_p,
             is_causal, scale, q.size(2) != k.size(2))
      .transpose(1, 2);
}

const at::Generator& generator_of(const at::Tensor& q) {
  return at::globalContext().defaultGenerator(q.device());
}

std::tuple<at::Tensor, at::Tensor> dropout_seed_kernel(
    const at::Tensor& like, int64_t rank, int64_t draws) {
  check_at_least(rank, 0, "rank");
  TORCH_CHECK_VALUE(
      draws >= 1 && draws <= kMaxDraws, "expected draws to be a number from 1 to ", kMaxDraws,
      ", got ", draws);
  const auto options = like.options().dtype(at::kLong);
  if (like.is_meta()) {
    return {at::empty({}, options), at::empty({0}, options)};
  }
  at::Generator generator = generator_of(like);
  const uint64_t drawn = draw(generator);
  for (int64_t n = 1; n < draws; ++n) {
    draw(generator);
  }
  const auto seed = static_cast<int64_t>(mix(drawn, static_cast<uint64_t>(rank)) >> 1);
  return {at::full({}, seed, at::kLong), at::empty({0}, options)};
}

at::Tensor attention_with_dropout_kernel(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const OptionalTensor& attn_mask,
    double dropout_p,
    bool is_causal,
    std::optional<double> scale,
    const at::Tensor& seed) {
  check(q, k, v, attn_mask, dropout_p, is_causal);
  check_seed(seed);
  if (q.is_meta()) {
    const c10::SymInt sizes[] = {q.sym_size(0), q.sym_size(1), q.sym_size(2), v.sym_size(3)};
    return at::empty_symint(sizes, q.options());
  }
  return seeded_attention(
             q, k, v, attn_mask, dropout_p, is_causal, scale, generator_of(q), seed.item<int64_t>())
      .contiguous();
}

Tensors attention_with_dropout_backward_kernel(
    const at::Tensor& grad,
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const OptionalTensor& attn_mask,
    double dropout_p,
    bool is_causal,
    std::optional<double> scale,
    const at::Tensor& seed,
    at::IntArrayRef wanted) {
  check(q, k, v, attn_mask, dropout_p, is_causal);
  TORCH_CHECK_VALUE(
      grad.dim() == 4 && grad.sym_size(0) == q.sym_size(0) && grad.sym_size(1) == q.sym_size(1) &&
          grad.sym_size(2) == q.sym_size(2) && grad.sym_size(3) == v.sym_size(3),
      "expected grad to have the shape of the output, [", q.sym_size(0), ", ", q.sym_size(1), ", ",
      q.sym_size(2), ", ", v.sym_size(3), "], got ", grad.sym_sizes());
  check_seed(seed);
  check_wanted(wanted, 4, "q, k, v and attn_mask");
  TORCH_CHECK_VALUE(
      !wanted[3] || (attn_mask.has_value() && attn_mask->is_floating_point()),
      "wanted asks for the gradient of attn_mask, which isn't a floating-point tensor");
  Tensors inputs{q, k, v, attn_mask.value_or(at::Tensor())}, asked, found;
  if (q.is_meta() || grad.numel() == 0) {  // shapes only; or a rank without queries
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (wanted[i]) {
        found.push_back(at::zeros_symint(inputs[i].sym_sizes(), inputs[i].options()));
      }
    }
    return found;
  }
  // A kernel runs below autograd, which is what this one needs.
  auto keys = c10::impl::tls_local_dispatch_key_set();
  keys.excluded_ = keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  const c10::impl::ForceDispatchKeyGuard above(keys);
  const at::AutoGradMode enabled(true);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].defined()) {
      inputs[i] = inputs[i].detach().requires_grad_(wanted[i]);
    }
    if (wanted[i]) {
      asked.push_back(inputs[i]);
    }
  }
  if (asked.empty()) {
    return found;
  }
  const auto mask = attn_mask.has_value() ? std::make_optional(inputs[3]) : std::nullopt;
  const at::Tensor out = seeded_attention(
      inputs[0], inputs[1], inputs[2], mask, dropout_p, is_causal, scale, generator_of(q),
      seed.item<int64_t>());
  found = torch::autograd::grad({out}, asked, {grad});
  for (at::Tensor& gradient : found) {
    gradient = gradient.contiguous();
  }
  return found;
}

void keep_all(Call& call) {
  call.keep_tensors(call.inputs().vec());
}

Tensors attention_with_dropout_gradients(const Call& call, const Tensors& gradients) {
  const Tensors kept = call.kept_tensors();
  const auto wanted = call.wanted(4);
  return call.placed(
      attention_with_dropout_backward(
          gradients[0], kept[0], kept[1], kept[2],
          call.count("attn_mask") ? OptionalTensor(kept[3]) : std::nullopt, call["dropout_p"],
          call["is_causal"], call["scale"], kept.back(), wanted),
      wanted);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeExplicitAutograd, m) {
  m.impl("dropout_seed", dropout_seed_kernel);
  m.impl("attention_with_dropout", attention_with_dropout_kernel);
  m.impl("attention_with_dropout_backward", attention_with_dropout_backward_kernel);
}

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  not_differentiable(m, "dropout_seed");
  differentiable(m, "attention_with_dropout", attention_with_dropout_gradients, keep_all);
  not_differentiable(m, "attention_with_dropout_backward");
}

}  // namespace deepsp
