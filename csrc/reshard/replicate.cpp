// Forward, nothing is computed or sent: the outputs are the inputs. Backward, the partial gradients
// of a bucket are summed over the group: the later op launches the sum and the earlier one waits
// for it, so that it is in flight during the backward of the ops between them. The buffer passes
// from one to the other as the gradient of a token, which has its shape.

#include "../op.h"
#include "sums.h"

#include <ATen/ops/alias.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace deepsp {
// Composites with autograd functions of their own, not differentiable(): what they return are views
// of their inputs, which tracing and functionalization know as at::alias's.
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

variable_list aliases(at::TensorList tensors) {
  variable_list result;
  for (const at::Tensor& x : tensors) {
    result.push_back(at::alias(x));
  }
  return result;
}

void save_group(AutogradContext* ctx, int64_t rank, int64_t size, std::string_view group_name) {
  ctx->saved_data["rank"] = rank;
  ctx->saved_data["size"] = size;
  ctx->saved_data["group_name"] = std::string(group_name);
}

Argument call_saved(const char* op, AutogradContext* ctx, With argument) {
  std::vector<With> values{
      std::move(argument), {"grad", "partial"}, {"reduce_dtype", c10::IValue()}};
  for (const auto& [name, value] : ctx->saved_data) {
    values.emplace_back(name.c_str(), value);
  }
  return Op(op)(values);
}

struct ReplicateStart : Function<ReplicateStart> {
  static variable_list forward(
      AutogradContext* ctx,
      at::TensorList tensors,
      int64_t rank,
      int64_t size,
      std::string_view group_name) {
    std::vector<c10::SymInt> shapes;
    std::vector<int64_t> dims;
    for (const at::Tensor& x : tensors) {
      shapes.insert(shapes.end(), x.sym_sizes().begin(), x.sym_sizes().end());
      dims.push_back(x.dim());
    }
    save_group(ctx, rank, size, group_name);
    ctx->saved_data["shapes"] = c10::SymIntArrayRef(shapes);
    ctx->saved_data["dims"] = dims;
    ctx->set_materialize_grads(false);
    const c10::SymInt elements = check_sum(tensors, "partial", rank, size, {});
    at::AutoDispatchBelowADInplaceOrView guard;
    variable_list outputs = aliases(tensors);
    const auto shape = sum_buffer_shape(elements, size, tensors[0].scalar_type(), {});
    outputs.push_back(at::zeros({}, tensors[0].options()).expand_symint(shape));
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    const at::Tensor& token = gradients.back();
    variable_list sums(ctx->saved_data["dims"].toIntVector().size());
    if (token.defined()) {
      sums = static_cast<Tensors>(call_saved("all_reduce_wait", ctx, {"buffer", token}));
    }
    sums.resize(sums.size() + 3);
    return sums;
  }
};

struct ReplicateWait : Function<ReplicateWait> {
  static variable_list forward(
      AutogradContext* ctx,
      at::TensorList tensors,
      const at::Tensor& /*token*/,
      int64_t rank,
      int64_t size,
      std::string_view group_name) {
    save_group(ctx, rank, size, group_name);
    at::AutoDispatchBelowADInplaceOrView guard;
    return aliases(tensors);
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    const at::Tensor sum = call_saved("all_reduce_start", ctx, {"inputs", gradients});
    variable_list result(gradients.size());
    result.push_back(sum);
    result.resize(result.size() + 3);
    return result;
  }
};

struct ScaleGradient : Function<ScaleGradient> {
  static Variable forward(AutogradContext* ctx, const at::Tensor& input, double scale) {
    ctx->saved_data["scale"] = scale;
    at::AutoDispatchBelowADInplaceOrView guard;
    return at::alias(input);
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    return {at::mul(gradients[0], ctx->saved_data["scale"].toDouble()), {}};
  }
};

std::tuple<std::vector<at::Tensor>, at::Tensor> replicate_start(
    at::TensorList tensors, int64_t rank, int64_t size, std::string_view group_name) {
  variable_list outputs = ReplicateStart::apply(tensors, rank, size, group_name);
  at::Tensor token = outputs.back();
  outputs.pop_back();
  return {std::move(outputs), token};
}

std::vector<at::Tensor> replicate_wait(
    at::TensorList tensors,
    const at::Tensor& token,
    int64_t rank,
    int64_t size,
    std::string_view group_name) {
  return ReplicateWait::apply(tensors, token, rank, size, group_name);
}

at::Tensor scale_gradient(const at::Tensor& input, double scale) {
  return ScaleGradient::apply(input, scale);
}

at::Tensor replicated(const at::Tensor& input) {
  return input.clone();
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  m.impl("replicate_start", replicate_start);
  m.impl("replicate_wait", replicate_wait);
  m.impl("_scale_gradient", scale_gradient);
  m.impl("replicated", replicated);
}

}  // namespace deepsp
