// The backward of each is the other's forward with the weight transposed, and the weight's gradient
// from what arrives meanwhile. Kept are the input, a part of it where it was gathered, and the
// weight: what was gathered is gathered again.

#include "../dispatch.h"
#include "ops.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace deepsp {

at::Tensor all_gather_matmul(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  static const auto op = find_op<decltype(all_gather_matmul)>("deepsp::all_gather_matmul");
  return op.call(input, weight, bias, dim, sizes, rank, group_name, reduce_dtype);
}

std::vector<at::Tensor> all_gather_matmul_backward(
    const at::Tensor& grad,
    const at::Tensor& input,
    const at::Tensor& weight,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    at::IntArrayRef wanted,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  static const auto op =
      find_op<decltype(all_gather_matmul_backward)>("deepsp::all_gather_matmul_backward");
  return op.call(grad, input, weight, dim, sizes, wanted, rank, group_name, reduce_dtype);
}

at::Tensor matmul_reduce_scatter(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  static const auto op = find_op<decltype(matmul_reduce_scatter)>("deepsp::matmul_reduce_scatter");
  return op.call(input, weight, bias, dim, sizes, rank, group_name, reduce_dtype);
}

std::vector<at::Tensor> matmul_reduce_scatter_backward(
    const at::Tensor& grad,
    const at::Tensor& input,
    const at::Tensor& weight,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    at::IntArrayRef wanted,
    int64_t rank,
    std::string_view group_name) {
  static const auto op =
      find_op<decltype(matmul_reduce_scatter_backward)>("deepsp::matmul_reduce_scatter_backward");
  return op.call(grad, input, weight, dim, sizes, wanted, rank, group_name);
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

using Forward = decltype(&all_gather_matmul);

template <bool kGathers>
struct Matmul : Function<Matmul<kGathers>> {
  static Variable forward(
      AutogradContext* ctx,
      const at::Tensor& input,
      const at::Tensor& weight,
      const std::optional<at::Tensor>& bias,
      int64_t dim,
      c10::SymIntArrayRef sizes,
      int64_t rank,
      std::string_view group_name,
      ReduceDtype reduce_dtype) {
    ctx->save_for_backward({input, weight});
    auto& data = ctx->saved_data;
    data["dim"] = dim;
    data["sizes"] = sizes;
    data["rank"] = rank;
    data["group_name"] = std::string(group_name);
    data["reduce_dtype"] = reduce_dtype;
    data["bias"] = bias.has_value();
    at::AutoDispatchBelowADInplaceOrView guard;
    constexpr Forward op = kGathers ? &all_gather_matmul : &matmul_reduce_scatter;
    return op(input, weight, bias, dim, sizes, rank, group_name, reduce_dtype);
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    // Gradients have the dtype of what they are gradients of, also inside autocast.
    const c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
    auto& data = ctx->saved_data;
    const variable_list saved = ctx->get_saved_variables();
    const auto sizes = data["sizes"].toSymIntVector();
    const int64_t dim = data["dim"].toInt(), rank = data["rank"].toInt();
    const std::string& group_name = data["group_name"].toStringRef();
    const bool with_bias = data["bias"].toBool();
    std::vector<int64_t> wanted{ctx->needs_input_grad(0), ctx->needs_input_grad(1), 0};
    if (with_bias) {
      wanted[2] = ctx->needs_input_grad(2);
    }
    std::vector<at::Tensor> found;
    if constexpr (kGathers) {
      found = all_gather_matmul_backward(
          gradients[0], saved[0], saved[1], dim, sizes, wanted, rank, group_name,
          data["reduce_dtype"].toOptional<at::ScalarType>());
    } else {
      found = matmul_reduce_scatter_backward(
          gradients[0], saved[0], saved[1], dim, sizes, wanted, rank, group_name);
    }
    variable_list result(8);
    size_t next = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (wanted[i]) {
        result[i] = found[next++];
      }
    }
    return result;
  }
};

template <bool kGathers>
at::Tensor matmul_autograd(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  return Matmul<kGathers>::apply(input, weight, bias, dim, sizes, rank, group_name, reduce_dtype);
}

template <bool kGathers, c10::DeviceType device>
at::Tensor matmul_autocast(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  const c10::impl::ExcludeDispatchKeyGuard guard{
      c10::DispatchKeySet(at::autocast::get_autocast_dispatch_key_from_device_type(device))};
  const auto dtype = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const at::Tensor& x) {
    return at::autocast::cached_cast(dtype, x, device);
  };
  std::optional<at::Tensor> cast_bias;
  if (bias.has_value()) {
    cast_bias = cast(*bias);
  }
  constexpr Forward op = kGathers ? &all_gather_matmul : &matmul_reduce_scatter;
  return op(cast(input), cast(weight), cast_bias, dim, sizes, rank, group_name, reduce_dtype);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  m.impl("all_gather_matmul", matmul_autograd<true>);
  m.impl("matmul_reduce_scatter", matmul_autograd<false>);
  // No second derivative: it raises.
  m.impl("all_gather_matmul_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("matmul_reduce_scatter_backward", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(deepsp, AutocastCPU, m) {
  m.impl("all_gather_matmul", matmul_autocast<true, at::kCPU>);
  m.impl("matmul_reduce_scatter", matmul_autocast<false, at::kCPU>);
}

TORCH_LIBRARY_IMPL(deepsp, AutocastCUDA, m) {
  m.impl("all_gather_matmul", matmul_autocast<true, at::kCUDA>);
  m.impl("matmul_reduce_scatter", matmul_autocast<false, at::kCUDA>);
}

}  // namespace deepsp
