// A sum that every rank goes on with alike has the whole gradient on each, and passes it on;
// gradients that are shares are summed in turn.

#include "../along_dim/checks.h"
#include "../dispatch.h"
#include "ops.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace deepsp {

at::Tensor all_reduce(
    const at::Tensor& input,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  static const auto op = find_op<decltype(all_reduce)>("deepsp::all_reduce");
  return op.call(input, grad, rank, size, group_name, reduce_dtype);
}

at::Tensor all_reduce_start(
    at::TensorList inputs,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  static const auto op = find_op<decltype(all_reduce_start)>("deepsp::all_reduce_start");
  return op.call(inputs, grad, rank, size, group_name, reduce_dtype);
}

std::vector<at::Tensor> all_reduce_wait(
    const at::Tensor& buffer,
    c10::SymIntArrayRef shapes,
    at::IntArrayRef dims,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  static const auto op = find_op<decltype(all_reduce_wait)>("deepsp::all_reduce_wait");
  return op.call(buffer, shapes, dims, grad, rank, size, group_name, reduce_dtype);
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

struct Sum {
  std::vector<c10::SymInt> shapes;
  std::vector<int64_t> dims;
  bool partial = true;
  int64_t rank = 0;
  int64_t size = 1;
  std::string group_name;
  ReduceDtype reduce_dtype;

  void save(AutogradContext* ctx) const {
    auto& data = ctx->saved_data;
    data["shapes"] = c10::SymIntArrayRef(shapes);
    data["dims"] = dims;
    data["partial"] = partial;
    data["rank"] = rank;
    data["size"] = size;
    data["group_name"] = group_name;
    data["reduce_dtype"] = reduce_dtype;
  }

  static Sum of(AutogradContext* ctx) {
    auto& data = ctx->saved_data;
    return {
        data["shapes"].toSymIntVector(),
        data["dims"].toIntVector(),
        data["partial"].toBool(),
        data["rank"].toInt(),
        data["size"].toInt(),
        data["group_name"].toStringRef(),
        data["reduce_dtype"].toOptional<at::ScalarType>()};
  }
};

struct AllReduce : Function<AllReduce> {
  static Variable forward(
      AutogradContext* ctx,
      const at::Tensor& input,
      std::string_view grad,
      int64_t rank,
      int64_t size,
      std::string_view group_name,
      ReduceDtype reduce_dtype) {
    Sum{{}, {}, is_partial(grad), rank, size, std::string(group_name), reduce_dtype}.save(ctx);
    at::AutoDispatchBelowADInplaceOrView guard;
    return all_reduce(input, grad, rank, size, group_name, reduce_dtype);
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    const Sum s = Sum::of(ctx);
    const at::Tensor gradient =
        s.partial
            ? all_reduce(gradients[0], "partial", s.rank, s.size, s.group_name, s.reduce_dtype)
            : gradients[0];
    return {gradient, {}, {}, {}, {}, {}};
  }
};

struct AllReduceStart : Function<AllReduceStart> {
  static Variable forward(
      AutogradContext* ctx,
      at::TensorList inputs,
      std::string_view grad,
      int64_t rank,
      int64_t size,
      std::string_view group_name,
      ReduceDtype reduce_dtype) {
    Sum s{{}, {}, is_partial(grad), rank, size, std::string(group_name), reduce_dtype};
    for (const at::Tensor& x : inputs) {
      s.shapes.insert(s.shapes.end(), x.sym_sizes().begin(), x.sym_sizes().end());
      s.dims.push_back(x.dim());
    }
    s.save(ctx);
    at::AutoDispatchBelowADInplaceOrView guard;
    return all_reduce_start(inputs, grad, rank, size, group_name, reduce_dtype);
  }

  static variable_list backward(AutogradContext* ctx, variable_list buffers) {
    const Sum s = Sum::of(ctx);
    const at::Tensor buffer = buffers[0].contiguous();
    variable_list gradients;
    if (s.partial) {
      gradients = all_reduce_wait(
          buffer, s.shapes, s.dims, "partial", s.rank, s.size, s.group_name, s.reduce_dtype);
    } else {
      gradients = views_of(
          buffer.view_symint({buffer.sym_numel()}),
          check_sum_wait(buffer, s.shapes, s.dims, "replicated", s.rank, s.size, s.reduce_dtype)
              .of);
    }
    gradients.resize(gradients.size() + 5);
    return gradients;
  }
};

struct AllReduceWait : Function<AllReduceWait> {
  static variable_list forward(
      AutogradContext* ctx,
      const at::Tensor& buffer,
      c10::SymIntArrayRef shapes,
      at::IntArrayRef dims,
      std::string_view grad,
      int64_t rank,
      int64_t size,
      std::string_view group_name,
      ReduceDtype reduce_dtype) {
    Sum{{}, {}, is_partial(grad), rank, size, std::string(group_name), reduce_dtype}.save(ctx);
    at::AutoDispatchBelowADInplaceOrView guard;
    return all_reduce_wait(buffer, shapes, dims, grad, rank, size, group_name, reduce_dtype);
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    const Sum s = Sum::of(ctx);
    at::Tensor buffer;
    if (s.partial) {
      buffer = all_reduce_start(gradients, "partial", s.rank, s.size, s.group_name, s.reduce_dtype);
    } else {
      // As it passes through, in the shape that the buffer has.
      std::vector<at::Tensor> flat;
      for (const at::Tensor& gradient : gradients) {
        flat.push_back(gradient.reshape({-1}));
      }
      buffer = flat.size() == 1 ? flat[0] : at::cat(flat);
      const c10::SymInt elements = buffer.sym_numel();
      const auto shape = sum_buffer_shape(elements, s.size, buffer.scalar_type(), s.reduce_dtype);
      if (shape.size() == 2) {
        const std::vector<c10::SymInt> padding{0, shape[0] * shape[1] - elements};
        buffer = at::constant_pad_nd_symint(buffer, padding).view_symint(shape);
      }
    }
    variable_list result(8);
    result[0] = buffer;
    return result;
  }
};

at::Tensor all_reduce_autograd(
    const at::Tensor& input,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  return AllReduce::apply(input, grad, rank, size, group_name, reduce_dtype);
}

at::Tensor all_reduce_start_autograd(
    at::TensorList inputs,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  return AllReduceStart::apply(inputs, grad, rank, size, group_name, reduce_dtype);
}

std::vector<at::Tensor> all_reduce_wait_autograd(
    const at::Tensor& buffer,
    c10::SymIntArrayRef shapes,
    at::IntArrayRef dims,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  return AllReduceWait::apply(buffer, shapes, dims, grad, rank, size, group_name, reduce_dtype);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  m.impl("all_reduce", all_reduce_autograd);
  m.impl("all_reduce_start", all_reduce_start_autograd);
  m.impl("all_reduce_wait", all_reduce_wait_autograd);
  m.impl("sum_gradients_", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace deepsp
