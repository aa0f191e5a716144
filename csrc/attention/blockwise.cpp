// Attention of full sequences by blocks of scores, as one node of a graph.

#include "../common/checks.h"
#include "blocks.h"
#include "log_sum.h"
#include "ops.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

namespace deepsp {
namespace {

// The arguments that _blockwise_attention and its backward share, checked.
struct BlockwiseCall {
  const at::Tensor q, k, v;
  const BlockArguments how;
  const c10::SymIntArrayRef queries;

  explicit BlockwiseCall(const Given& given)
      : q(given["q"]), k(given["k"]), v(given["v"]), how(given), queries(given["queries"]) {
    check_full(q, k, v, queries);
    check_pattern(
        how.pattern(), q.sym_size(0), k.sym_size(1), q.sym_size(2).guard_int(__FILE__, __LINE__));
  }

  Attending attending() const {
    return deepsp::attending(how, q.size(0), k.size(1), q.size(3), ints(queries));
  }
};

c10::IValue blockwise_attention_kernel(const Given& given) {
  const BlockwiseCall call(given);
  if (call.q.is_meta()) {
    return empty_attended(call.q, call.q.sym_size(1), call.q.sym_size(2), call.v.sym_size(3));
  }
  const Attending how = call.attending();
  Attended attended(call.q, call.v.size(3), how, /*at_once=*/true);
  attended.add(call.k, call.v, {0, call.k.size(1)});
  return attended.finish(call.how.sinks);
}

c10::IValue blockwise_attention_backward(const Given& given) {
  const BlockwiseCall call(given);
  const auto& [q, k, v, how, queries] = call;
  const at::Tensor grad = given["grad"], output = given["output"];
  const at::Tensor log_sum_exp = given["log_sum_exp"];
  const at::IntArrayRef wanted = given["wanted"];
  const c10::SymInt shape[] = {q.sym_size(0), q.sym_size(1), q.sym_size(2), v.sym_size(3)};
  const c10::SymInt sums[] = {q.sym_size(0), q.sym_size(2), q.sym_size(1)};
  const std::pair<const char*, const at::Tensor*> like_output[] = {
      {"grad", &grad}, {"output", &output}};
  for (const auto& [name, x] : like_output) {
    TORCH_CHECK_VALUE(
        x->sym_sizes() == c10::SymIntArrayRef(shape), "expected ", name, " to have shape ",
        c10::SymIntArrayRef(shape), ", that of the output, got ", x->sym_sizes());
    check_dtype(*x, name, q, "q");
  }
  TORCH_CHECK_VALUE(
      log_sum_exp.sym_sizes() == c10::SymIntArrayRef(sums), "expected log_sum_exp to have shape ",
      c10::SymIntArrayRef(sums), ", got ", log_sum_exp.sym_sizes());
  const auto grad_log_sum = given.optional<at::Tensor>("grad_log_sum_exp");
  TORCH_CHECK_VALUE(
      !grad_log_sum.has_value() || grad_log_sum->sym_sizes() == c10::SymIntArrayRef(sums),
      "expected grad_log_sum_exp to have shape ", c10::SymIntArrayRef(sums), ", got ",
      grad_log_sum->sym_sizes());
  check_wanted(wanted, 4, "q, k, v and sinks");
  TORCH_CHECK_VALUE(
      !wanted[3] || how.sinks.has_value(), "wanted asks for the gradient of sinks, which are None");
  Tensors found;
  if (q.is_meta()) {
    for (const at::Tensor* x : {&q, &k, &v}) {
      found.push_back(tokens_first(x->sym_sizes(), x->options()));
    }
    found.push_back(wanted[3] ? at::empty_symint(how.sinks->sym_sizes(), how.sinks->options()) : q);
  } else {
    const LogSumGradient of(output, grad_log_sum);
    const Attending attending = call.attending();
    AttendedGradients gradients(
        of.grad(grad), of.widened(q), of.output(output), log_sum_exp, attending, /*at_once=*/true);
    const auto [dk, dv] = gradients.add(of.widened(k), of.widened(v), {0, k.size(1)});
    found = {
        of.narrowed(gradients.of_q()), of.narrowed(dk), of.narrowed(dv),
        wanted[3] ? gradients.of_sinks(*how.sinks) : q};
  }
  Tensors asked;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i]) {
      asked.push_back(found[i]);
    }
  }
  return asked;
}

const BackwardOp kBackward{
    Op("_blockwise_attention_backward"),
    /*inputs=*/{"q", "k", "v", "documents", "sinks"},
    /*results=*/{"output", "log_sum_exp"},
    /*saved=*/{"q", "k", "v", "documents", "sinks", "output", "log_sum_exp"},
    /*gradients=*/{"q", "k", "v", "sinks"}};
constexpr size_t kOutput = 5;  // among those saved

void save(Call& call) {
  save_for(kBackward, call);
  call.leave_undefined();
}

Tensors gradients_of(const Call& call, const Tensors& gradients) {
  if (!gradients[0].defined() && !gradients[1].defined()) {
    return {};
  }
  const at::Tensor grad =
      gradients[0].defined() ? gradients[0] : at::zeros_like(call.kept_tensors()[kOutput]);
  const c10::IValue of_log_sum = gradients[1].defined() ? gradients[1] : c10::IValue();
  return call_backward(kBackward, call, {{"grad", grad}, {"grad_log_sum_exp", of_log_sum}});
}

}  // namespace

DEEPSP_KERNELS(m) {
  implement<blockwise_attention_kernel>(m, "_blockwise_attention");
  implement<blockwise_attention_backward>(m, "_blockwise_attention_backward");
}

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  differentiable(m, "_blockwise_attention", gradients_of, save);
  not_differentiable(m, "_blockwise_attention_backward");
}

}  // namespace deepsp
