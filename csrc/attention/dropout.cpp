// Attention with dropout as one node of a graph. Ops that draw inside of a graph use generators
// that are seeded alike on all ranks, so ranks would drop the same weights of different heads. Here
// a seed of this rank decides what is dropped, in forward and again in backward: only the seed is
// saved.

#include "../op.h"
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

void check_seed(const at::Tensor& seed) {
  TORCH_CHECK_VALUE(
      seed.dim() == 0 && seed.scalar_type() == at::kLong && (seed.is_cpu() || seed.is_meta()),
      "expected seed to be the int64 scalar on the CPU that dropout_seed returns, got ",
      dtype_name(seed.scalar_type()), " of shape ", seed.sym_sizes(), " on ", seed.device());
}

// The arguments that _attention_with_dropout and its backward share, checked.
struct DropoutCall {
  const at::Tensor q, k, v, seed;
  const OptionalTensor attn_mask;
  const double dropout_p;
  const bool is_causal;
  const std::optional<double> scale;

  explicit DropoutCall(const Given& given)
      : q(given["q"]),
        k(given["k"]),
        v(given["v"]),
        seed(given["seed"]),
        attn_mask(given.optional<at::Tensor>("attn_mask")),
        dropout_p(given["dropout_p"]),
        is_causal(given["is_causal"]),
        scale(given.optional<double>("scale")) {
    // Queries of some tokens, in any order, where the mask says which keys they see.
    check_full(q, k, v, {c10::SymInt(0), is_causal ? k.sym_size(1) : q.sym_size(1)});
    check_attention(
        attn_mask, dropout_p, is_causal, q.scalar_type(), q.sym_size(0), q.sym_size(2),
        k.sym_size(1), q.sym_size(1));
  }

  SymInts output_shape() const {
    return {q.sym_size(0), q.sym_size(1), q.sym_size(2), v.sym_size(3)};
  }
  const at::Generator& generator() const {
    return at::globalContext().defaultGenerator(q.device());
  }
  at::Tensor attend(
      const at::Tensor& q,
      const at::Tensor& k,
      const at::Tensor& v,
      const OptionalTensor& attn_mask) const;
};

// A rank makes one draw for each of its few parts of heads, one after another.
constexpr int64_t kMaxDraws = int64_t(1) << 20;

// splitmix64's finalizer: seeds that differ by one give unrelated numbers.
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
  // A GPU's generator is a counter, so the device isn't asked for a number.
  const uint64_t at = generator.get_offset();
  generator.set_offset(at + 4);
  return mix(generator.current_seed(), at);
}

// Seeds a generator for this object's lifetime, and restores its state afterwards.
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

at::Tensor DropoutCall::attend(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const OptionalTensor& attn_mask) const {
  // The caller has cast its arguments once; autocast doesn't cast in backward.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const Seeded seeded(generator(), seed.item<int64_t>());
  return at::scaled_dot_product_attention(
             q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask, dropout_p,
             is_causal, scale, q.size(2) != k.size(2))
      .transpose(1, 2);
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
  at::Generator generator = at::globalContext().defaultGenerator(like.device());
  const uint64_t drawn = draw(generator);
  for (int64_t n = 1; n < draws; ++n) {
    draw(generator);
  }
  const auto seed = static_cast<int64_t>(mix(drawn, static_cast<uint64_t>(rank)) >> 1);
  return {at::full({}, seed, at::kLong), at::empty({0}, options)};
}

c10::IValue attention_with_dropout_kernel(const Given& given) {
  const DropoutCall call(given);
  check_seed(call.seed);
  if (call.q.is_meta()) {
    return at::empty_symint(call.output_shape(), call.q.options());
  }
  return call.attend(call.q, call.k, call.v, call.attn_mask).contiguous();
}

c10::IValue attention_with_dropout_backward(const Given& given) {
  const DropoutCall call(given);
  const at::Tensor grad = given["grad"];
  const at::IntArrayRef wanted = given["wanted"];
  const SymInts shape = call.output_shape();
  TORCH_CHECK_VALUE(
      grad.sym_sizes() == c10::SymIntArrayRef(shape),
      "expected grad to have the shape of the output, ", c10::SymIntArrayRef(shape), ", got ",
      grad.sym_sizes());
  check_seed(call.seed);
  check_wanted(wanted, 4, "q, k, v and attn_mask");
  TORCH_CHECK_VALUE(
      !wanted[3] || (call.attn_mask.has_value() && call.attn_mask->is_floating_point()),
      "wanted asks for the gradient of attn_mask, which isn't a floating-point tensor");
  Tensors inputs{call.q, call.k, call.v, call.attn_mask.value_or(at::Tensor())}, asked, found;
  if (call.q.is_meta() || grad.numel() == 0) {  // shapes only; or a rank without queries
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (wanted[i]) {
        found.push_back(at::zeros_symint(inputs[i].sym_sizes(), inputs[i].options()));
      }
    }
    return found;
  }
  // Kernels run with autograd excluded; this one differentiates.
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
  const auto mask = call.attn_mask.has_value() ? OptionalTensor(inputs[3]) : std::nullopt;
  const at::Tensor out = call.attend(inputs[0], inputs[1], inputs[2], mask);
  found = torch::autograd::grad({out}, asked, {grad});
  for (at::Tensor& gradient : found) {
    gradient = gradient.contiguous();
  }
  return found;
}

const BackwardOp kBackward{
    Op("_attention_with_dropout_backward"),
    /*inputs=*/{"q", "k", "v", "attn_mask", "seed"},
    /*results=*/{},
    /*saved=*/{"q", "k", "v", "attn_mask", "seed"},
    /*gradients=*/{"q", "k", "v", "attn_mask"}};

void save(Call& call) {
  save_for(kBackward, call);
}

Tensors gradients_of(const Call& call, const Tensors& gradients) {
  return call_backward(kBackward, call, {{"grad", gradients[0]}});
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeExplicitAutograd, m) {
  m.impl("_dropout_seed", dropout_seed_kernel);
  implement<attention_with_dropout_kernel>(m, "_attention_with_dropout");
  implement<attention_with_dropout_backward>(m, "_attention_with_dropout_backward");
}

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  not_differentiable(m, "_dropout_seed");
  differentiable(m, "_attention_with_dropout", gradients_of, save);
  not_differentiable(m, "_attention_with_dropout_backward");
}

}  // namespace deepsp
