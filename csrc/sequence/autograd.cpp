// By the gradient contract: a rank's gradients are its tokens' share. A sum over
// the group that every rank goes on with alike passes its gradient through; a
// whole that every rank goes on with alike gives each rank its slice back.

#include "../dispatch.h"
#include "ops.h"

#include <ATen/ops/mul.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace deepsp {

at::Tensor all_reduce(
    const at::Tensor& input,
    double grad_scale,
    int64_t rank,
    int64_t size,
    std::string_view group_name) {
  static const auto op = find_op<decltype(all_reduce)>("deepsp::all_reduce");
  return op.call(input, grad_scale, rank, size, group_name);
}

at::Tensor unshard(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name) {
  static const auto op = find_op<decltype(unshard)>("deepsp::unshard");
  return op.call(input, dim, seq_lens, rank, group_name);
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

struct AllReduce : Function<AllReduce> {
  static Variable forward(
      AutogradContext* ctx,
      const at::Tensor& input,
      double grad_scale,
      int64_t rank,
      int64_t size,
      std::string_view group_name) {
    ctx->saved_data["grad_scale"] = grad_scale;
    at::AutoDispatchBelowADInplaceOrView guard;
    return all_reduce(input, grad_scale, rank, size, group_name);
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    const double scale = ctx->saved_data["grad_scale"].toDouble();
    return {scale == 1 ? gradients[0] : at::mul(gradients[0], scale), {}, {}, {}, {}};
  }
};

struct Unshard : Function<Unshard> {
  static Variable forward(
      AutogradContext* ctx,
      const at::Tensor& input,
      int64_t dim,
      c10::SymIntArrayRef seq_lens,
      int64_t rank,
      std::string_view group_name) {
    dim = check_unshard(input, dim, seq_lens, rank);
    c10::SymInt begin = 0;
    for (int64_t p = 0; p < rank; ++p) {
      begin = begin + seq_lens[p];
    }
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["begin"] = begin;
    ctx->saved_data["length"] = seq_lens[rank];
    at::AutoDispatchBelowADInplaceOrView guard;
    return unshard(input, dim, seq_lens, rank, group_name);
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    return {
        gradients[0].narrow_symint(
            ctx->saved_data["dim"].toInt(), ctx->saved_data["begin"].toSymInt(),
            ctx->saved_data["length"].toSymInt()),
        {},
        {},
        {},
        {}};
  }
};

at::Tensor all_reduce_autograd(
    const at::Tensor& input,
    double grad_scale,
    int64_t rank,
    int64_t size,
    std::string_view group_name) {
  return AllReduce::apply(input, grad_scale, rank, size, group_name);
}

at::Tensor unshard_autograd(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name) {
  return Unshard::apply(input, dim, seq_lens, rank, group_name);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  m.impl("all_reduce", all_reduce_autograd);
  m.impl("unshard", unshard_autograd);
  m.impl("sum_gradients_", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace deepsp
