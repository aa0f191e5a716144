// The backward of a start is the other direction's wait, that of a wait its start. What becomes of
// the gradient of a whole, `grad` says: "partial" ones are summed where they are scattered,
// "replicated" ones sliced.

#include "../dispatch.h"
#include "checks.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace deepsp {

at::Tensor all_gather_start(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    std::string_view grad,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  static const auto op = find_op<decltype(all_gather_start)>("deepsp::all_gather_start");
  return op.call(input, dim, sizes, grad, rank, group_name, reduce_dtype);
}

std::vector<at::Tensor> all_gather_wait(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    std::string_view grad,
    int64_t rank,
    std::string_view group_name) {
  static const auto op = find_op<decltype(all_gather_wait)>("deepsp::all_gather_wait");
  return op.call(buffer, dim, sizes, shape, grad, rank, group_name);
}

at::Tensor reduce_scatter_start(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name) {
  static const auto op = find_op<decltype(reduce_scatter_start)>("deepsp::reduce_scatter_start");
  return op.call(input, dim, sizes, rank, group_name);
}

at::Tensor reduce_scatter_wait(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  static const auto op = find_op<decltype(reduce_scatter_wait)>("deepsp::reduce_scatter_wait");
  return op.call(buffer, dim, sizes, shape, rank, group_name, reduce_dtype);
}

at::Tensor scatter_start(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name) {
  static const auto op = find_op<decltype(scatter_start)>("deepsp::scatter_start");
  return op.call(input, dim, sizes, rank, group_name);
}

std::vector<at::Tensor> scatter_wait(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    int64_t rank,
    std::string_view group_name) {
  static const auto op = find_op<decltype(scatter_wait)>("deepsp::scatter_wait");
  return op.call(buffer, dim, sizes, shape, rank, group_name);
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// What a backward must know of the exchange; nothing else is saved.
struct Exchange {
  int64_t dim = 0;
  std::vector<c10::SymInt> sizes;
  std::vector<c10::SymInt> shape;  // the whole's
  bool partial = true;
  int64_t rank = 0;
  std::string group_name;
  ReduceDtype reduce_dtype;

  void save(AutogradContext* ctx) const {
    auto& data = ctx->saved_data;
    data["dim"] = dim;
    data["sizes"] = c10::SymIntArrayRef(sizes);
    data["shape"] = c10::SymIntArrayRef(shape);
    data["partial"] = partial;
    data["rank"] = rank;
    data["group_name"] = group_name;
    data["reduce_dtype"] = reduce_dtype;
  }

  static Exchange of(AutogradContext* ctx) {
    auto& data = ctx->saved_data;
    return {
        data["dim"].toInt(),
        data["sizes"].toSymIntVector(),
        data["shape"].toSymIntVector(),
        data["partial"].toBool(),
        data["rank"].toInt(),
        data["group_name"].toStringRef(),
        data["reduce_dtype"].toOptional<at::ScalarType>()};
  }

  const char* grad() const { return partial ? "partial" : "replicated"; }

  at::Tensor gather_start(const at::Tensor& part) const {
    return all_gather_start(part, dim, sizes, grad(), rank, group_name, reduce_dtype);
  }
  at::Tensor gather_wait(const at::Tensor& buffer) const {
    return all_gather_wait(buffer.contiguous(), dim, sizes, shape, grad(), rank, group_name)[0];
  }
  // The way of a whole's gradient.
  at::Tensor scatter_start(const at::Tensor& whole) const {
    return partial ? reduce_scatter_start(whole, dim, sizes, rank, group_name)
                   : deepsp::scatter_start(whole, dim, sizes, rank, group_name);
  }
  at::Tensor scatter_wait(const at::Tensor& buffer) const {
    return partial ? reduce_scatter_wait(
                         buffer.contiguous(), dim, sizes, shape, rank, group_name, reduce_dtype)
                   : deepsp::scatter_wait(buffer, dim, sizes, shape, rank, group_name)[0];
  }
};

variable_list first_of(at::Tensor gradient, size_t arguments) {
  variable_list gradients(arguments);
  gradients[0] = std::move(gradient);
  return gradients;
}

struct AllGatherStart : Function<AllGatherStart> {
  static Variable forward(
      AutogradContext* ctx,
      const at::Tensor& input,
      int64_t dim,
      c10::SymIntArrayRef sizes,
      std::string_view grad,
      int64_t rank,
      std::string_view group_name,
      ReduceDtype reduce_dtype) {
    check_part(input, dim, sizes, rank);
    Exchange{
        dim,
        sizes.vec(),
        entire_shape(input.sym_sizes(), dim, sizes),
        is_partial(grad),
        rank,
        std::string(group_name),
        reduce_dtype}
        .save(ctx);
    at::AutoDispatchBelowADInplaceOrView guard;
    return all_gather_start(input, dim, sizes, grad, rank, group_name, reduce_dtype);
  }

  static variable_list backward(AutogradContext* ctx, variable_list buffers) {
    return first_of(Exchange::of(ctx).scatter_wait(buffers[0]), 7);
  }
};

struct AllGatherWait : Function<AllGatherWait> {
  static variable_list forward(
      AutogradContext* ctx,
      const at::Tensor& buffer,
      int64_t dim,
      c10::SymIntArrayRef sizes,
      c10::SymIntArrayRef shape,
      std::string_view grad,
      int64_t rank,
      std::string_view group_name) {
    Exchange{dim, sizes.vec(), {}, is_partial(grad), rank, std::string(group_name), {}}.save(ctx);
    at::AutoDispatchBelowADInplaceOrView guard;
    return all_gather_wait(buffer, dim, sizes, shape, grad, rank, group_name);
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    return first_of(Exchange::of(ctx).scatter_start(gradients[0]), 7);
  }
};

struct ReduceScatterStart : Function<ReduceScatterStart> {
  static Variable forward(
      AutogradContext* ctx,
      const at::Tensor& input,
      int64_t dim,
      c10::SymIntArrayRef sizes,
      int64_t rank,
      std::string_view group_name) {
    Exchange{dim, sizes.vec(), input.sym_sizes().vec(), true, rank, std::string(group_name), {}}
        .save(ctx);
    at::AutoDispatchBelowADInplaceOrView guard;
    return reduce_scatter_start(input, dim, sizes, rank, group_name);
  }

  static variable_list backward(AutogradContext* ctx, variable_list buffers) {
    return first_of(Exchange::of(ctx).gather_wait(buffers[0]), 5);
  }
};

struct ReduceScatterWait : Function<ReduceScatterWait> {
  static Variable forward(
      AutogradContext* ctx,
      const at::Tensor& buffer,
      int64_t dim,
      c10::SymIntArrayRef sizes,
      c10::SymIntArrayRef shape,
      int64_t rank,
      std::string_view group_name,
      ReduceDtype reduce_dtype) {
    Exchange{dim, sizes.vec(), {}, true, rank, std::string(group_name), reduce_dtype}.save(ctx);
    at::AutoDispatchBelowADInplaceOrView guard;
    return reduce_scatter_wait(buffer, dim, sizes, shape, rank, group_name, reduce_dtype);
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    return first_of(Exchange::of(ctx).gather_start(gradients[0]), 7);
  }
};

struct ScatterStart : Function<ScatterStart> {
  static Variable forward(
      AutogradContext* ctx,
      const at::Tensor& input,
      int64_t dim,
      c10::SymIntArrayRef sizes,
      int64_t rank,
      std::string_view group_name) {
    Exchange{dim, sizes.vec(), input.sym_sizes().vec(), false, rank, std::string(group_name), {}}
        .save(ctx);
    at::AutoDispatchBelowADInplaceOrView guard;
    return scatter_start(input, dim, sizes, rank, group_name);
  }

  static variable_list backward(AutogradContext* ctx, variable_list buffers) {
    return first_of(Exchange::of(ctx).gather_wait(buffers[0]), 5);
  }
};

struct ScatterWait : Function<ScatterWait> {
  static variable_list forward(
      AutogradContext* ctx,
      const at::Tensor& buffer,
      int64_t dim,
      c10::SymIntArrayRef sizes,
      c10::SymIntArrayRef shape,
      int64_t rank,
      std::string_view group_name) {
    Exchange{dim, sizes.vec(), {}, false, rank, std::string(group_name), {}}.save(ctx);
    at::AutoDispatchBelowADInplaceOrView guard;
    return scatter_wait(buffer, dim, sizes, shape, rank, group_name);
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    return first_of(Exchange::of(ctx).gather_start(gradients[0]), 6);
  }
};

at::Tensor all_gather_start_autograd(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    std::string_view grad,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  return AllGatherStart::apply(input, dim, sizes, grad, rank, group_name, reduce_dtype);
}

std::vector<at::Tensor> all_gather_wait_autograd(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    std::string_view grad,
    int64_t rank,
    std::string_view group_name) {
  return AllGatherWait::apply(buffer, dim, sizes, shape, grad, rank, group_name);
}

at::Tensor reduce_scatter_start_autograd(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name) {
  return ReduceScatterStart::apply(input, dim, sizes, rank, group_name);
}

at::Tensor reduce_scatter_wait_autograd(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  return ReduceScatterWait::apply(buffer, dim, sizes, shape, rank, group_name, reduce_dtype);
}

at::Tensor scatter_start_autograd(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name) {
  return ScatterStart::apply(input, dim, sizes, rank, group_name);
}

std::vector<at::Tensor> scatter_wait_autograd(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    int64_t rank,
    std::string_view group_name) {
  return ScatterWait::apply(buffer, dim, sizes, shape, rank, group_name);
}

// ------------------------------------------------------------------- both halves

at::Tensor all_gather_composite(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    std::string_view grad,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  check_part(input, dim, sizes, rank);
  return all_gather_wait(
      all_gather_start(input, dim, sizes, grad, rank, group_name, reduce_dtype), dim, sizes,
      entire_shape(input.sym_sizes(), dim, sizes), grad, rank, group_name)[0];
}

at::Tensor reduce_scatter_composite(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  if (reduce_dtype) {
    check_summed(*reduce_dtype, "reduce_dtype");  // before anything is sent
  }
  return reduce_scatter_wait(
      reduce_scatter_start(input, dim, sizes, rank, group_name), dim, sizes, input.sym_sizes(),
      rank, group_name, reduce_dtype);
}

at::Tensor scatter_composite(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    std::string_view grad,
    int64_t rank,
    std::string_view group_name) {
  if (is_partial(grad)) {
    const SymAlong layout = check_entire(input, dim, sizes, rank);
    return input.narrow_symint(dim, layout.begin(rank), sizes[rank])
        .clone(at::MemoryFormat::Contiguous);
  }
  return scatter_wait(
      scatter_start(input, dim, sizes, rank, group_name), dim, sizes, input.sym_sizes(), rank,
      group_name)[0];
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  m.impl("all_gather", all_gather_composite);
  m.impl("reduce_scatter", reduce_scatter_composite);
  m.impl("scatter", scatter_composite);
}

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  m.impl("all_gather_start", all_gather_start_autograd);
  m.impl("all_gather_wait", all_gather_wait_autograd);
  m.impl("reduce_scatter_start", reduce_scatter_start_autograd);
  m.impl("reduce_scatter_wait", reduce_scatter_wait_autograd);
  m.impl("scatter_start", scatter_start_autograd);
  m.impl("scatter_wait", scatter_wait_autograd);
}

}  // namespace deepsp
