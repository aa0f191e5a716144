// Attention of full sequences by blocks of scores, as one node of a graph.

#include "../common/checks.h"
#include "blocks.h"
#include "ops.h"

#include <ATen/ops/empty.h>

namespace deepsp {
namespace {

// wanted: whether for q, k, v, sinks.
const Op<Tensors(
    const at::Tensor& grad,
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const OptionalTensor& documents,
    bool is_causal,
    at::IntArrayRef window_size,
    std::optional<double> scale,
    std::optional<double> softcap,
    const OptionalTensor& sinks,
    const at::Tensor& output,
    const at::Tensor& log_sum_exp,
    at::IntArrayRef wanted,
    c10::SymIntArrayRef queries)>
    blockwise_attention_backward("blockwise_attention_backward");

void check(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const Pattern& pattern,
    c10::SymIntArrayRef queries) {
  check_full(q, k, v, queries);
  check_pattern(pattern, q.sym_size(0), k.sym_size(1), q.sym_size(2).guard_int(__FILE__, __LINE__));
}

std::tuple<at::Tensor, at::Tensor> blockwise_attention_kernel(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const OptionalTensor& documents,
    bool is_causal,
    at::IntArrayRef window_size,
    std::optional<double> scale,
    std::optional<double> softcap,
    const OptionalTensor& sinks,
    c10::SymIntArrayRef queries) {
  check(q, k, v, {documents, window_size, softcap, sinks}, queries);
  if (q.is_meta()) {
    const c10::SymInt out[] = {q.sym_size(0), q.sym_size(1), q.sym_size(2), v.sym_size(3)};
    const c10::SymInt sums[] = {q.sym_size(0), q.sym_size(2), q.sym_size(1)};
    const auto wide = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    return {tokens_first(out, q.options()), at::empty_symint(sums, q.options().dtype(wide))};
  }
  const Attending how = attending(
      documents, is_causal, window_size, scale, softcap, q.size(0), k.size(1), q.size(3),
      ints(queries));
  // Some queries see a square of keys up to their own, and all keys before it.
  Attended attended(q, v.size(3), how, /*whole=*/queries.empty() || how.band.right != 0);
  attended.add(k, v, {0, k.size(1)});
  return attended.finish(sinks);
}

Tensors blockwise_attention_backward_kernel(
    const at::Tensor& grad,
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const OptionalTensor& documents,
    bool is_causal,
    at::IntArrayRef window_size,
    std::optional<double> scale,
    std::optional<double> softcap,
    const OptionalTensor& sinks,
    const at::Tensor& output,
    const at::Tensor& log_sum_exp,
    at::IntArrayRef wanted,
    c10::SymIntArrayRef queries) {
  check(q, k, v, {documents, window_size, softcap, sinks}, queries);
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
  check_wanted(wanted, 4, "q, k, v and sinks");
  TORCH_CHECK_VALUE(
      !wanted[3] || sinks.has_value(), "wanted asks for the gradient of sinks, which are None");
  Tensors found;
  if (q.is_meta()) {
    for (const at::Tensor* x : {&q, &k, &v}) {
      found.push_back(tokens_first(x->sym_sizes(), x->options()));
    }
    found.push_back(wanted[3] ? at::empty_symint(sinks->sym_sizes(), sinks->options()) : q);
  } else {
    const Attending how = attending(
        documents, is_causal, window_size, scale, softcap, q.size(0), k.size(1), q.size(3),
        ints(queries));
    AttendedGradients gradients(grad, q, output, log_sum_exp, how);
    const auto [dk, dv] = gradients.add(k, v, {0, k.size(1)});
    found = {gradients.of_q(), dk, dv, wanted[3] ? gradients.of_sinks(*sinks) : q};
  }
  Tensors asked;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i]) {
      asked.push_back(found[i]);
    }
  }
  return asked;
}

void keep_all(Call& call) {
  Tensors kept = call.inputs().vec();
  kept.insert(kept.end(), call.outputs().begin(), call.outputs().end());
  call.keep_tensors(std::move(kept));
  call.leave_undefined();
  call.only_first_is_differentiable();
}

Tensors gradients_of(const Call& call, const Tensors& gradients) {
  if (!gradients[0].defined()) {
    return {};
  }
  const Tensors kept = call.kept_tensors();
  size_t next = 3;
  const auto optional = [&](const char* name) {
    return call.count(name) > 0 ? OptionalTensor(kept[next++]) : std::nullopt;
  };
  const OptionalTensor documents = optional("documents"), sinks = optional("sinks");
  std::vector<int64_t> wanted = call.wanted(3);
  wanted.push_back(sinks.has_value() && call.wants(next - 1));
  const Tensors found = blockwise_attention_backward(
      gradients[0], kept[0], kept[1], kept[2], documents, call["is_causal"], call["window_size"],
      call["scale"], call["softcap"], sinks, kept[next], kept[next + 1], wanted, call["queries"]);
  if (documents.has_value()) {
    wanted.insert(wanted.begin() + 3, 0);
  }
  return call.placed(found, wanted);
}

}  // namespace

DEEPSP_KERNELS(m) {
  m.impl("blockwise_attention", blockwise_attention_kernel);
  m.impl("blockwise_attention_backward", blockwise_attention_backward_kernel);
}

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  differentiable(m, "blockwise_attention", gradients_of, keep_all);
  not_differentiable(m, "blockwise_attention_backward");
}

}  // namespace deepsp
