// Gathering differentiated: the gradient of gathered weights is scattered, summed; the
// backward of a start is the other direction's wait, that of a wait its start.

#include "checks.h"
#include "ops.h"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace deepsp {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;
using ReduceDtype = std::optional<at::ScalarType>;

// IValues know no lists of dtypes.
std::vector<int64_t> codes(Dtypes dtypes) {
  std::vector<int64_t> result;
  for (const at::ScalarType dtype : dtypes) {
    result.push_back(static_cast<int64_t>(dtype));
  }
  return result;
}

std::vector<at::ScalarType> dtypes_from(const std::vector<int64_t>& codes) {
  std::vector<at::ScalarType> result;
  for (const int64_t code : codes) {
    result.push_back(static_cast<at::ScalarType>(code));
  }
  return result;
}

// What a backward must know of the exchange; nothing else is saved.
struct Shards {
  std::vector<c10::SymInt> sizes;
  RowShapes rows{{}};
  std::vector<at::ScalarType> wire;    // dtypes of whole tensors
  std::vector<at::ScalarType> dtypes;  // dtypes of shards
  ReduceDtype reduce_dtype;
  int64_t rank = 0;
  std::string group_name;

  Shards(c10::SymIntArrayRef sizes, int64_t rank, std::string_view group_name)
      : sizes(sizes.vec()), rank(rank), group_name(group_name) {}

  void save(AutogradContext* ctx) const {
    auto& data = ctx->saved_data;
    data["sizes"] = c10::SymIntArrayRef(sizes);
    data["row_shapes"] = c10::SymIntArrayRef(rows.shapes);
    data["row_dims"] = rows.dims;
    data["wire"] = codes(wire);
    data["dtypes"] = codes(dtypes);
    data["reduce_dtype"] = reduce_dtype;
    data["rank"] = rank;
    data["group_name"] = group_name;
  }

  explicit Shards(AutogradContext* ctx) {
    auto& data = ctx->saved_data;
    sizes = data["sizes"].toSymIntVector();
    rows.shapes = data["row_shapes"].toSymIntVector();
    rows.dims = data["row_dims"].toIntVector();
    wire = dtypes_from(data["wire"].toIntVector());
    dtypes = dtypes_from(data["dtypes"].toIntVector());
    reduce_dtype = data["reduce_dtype"].toOptional<at::ScalarType>();
    rank = data["rank"].toInt();
    group_name = data["group_name"].toStringRef();
  }
};

// One gradient for every tensor of the list argument, none for the others.
variable_list with_undefined(variable_list gradients, size_t others) {
  gradients.resize(gradients.size() + others);
  return gradients;
}

struct GatherStart : Function<GatherStart> {
  static Variable forward(
      AutogradContext* ctx,
      at::TensorList shards,
      c10::SymIntArrayRef sizes,
      Dtypes dtypes,
      int64_t rank,
      std::string_view group_name,
      ReduceDtype reduce_dtype) {
    Shards s(sizes, rank, group_name);
    s.rows = RowShapes(shards);
    s.wire = dtypes.vec();
    s.dtypes = dtypes_of(shards);
    s.reduce_dtype = reduce_dtype;
    s.save(ctx);
    at::AutoDispatchBelowADInplaceOrView guard;
    return gather_cast_coalesced_start(shards, sizes, dtypes, rank, group_name, reduce_dtype);
  }

  static variable_list backward(AutogradContext* ctx, variable_list buffers) {
    const Shards s(ctx);
    return with_undefined(
        reduce_scatter_cast_coalesced_wait(
            buffers[0].contiguous(), s.sizes, s.rows.shapes, s.rows.dims, s.wire, s.dtypes,
            s.reduce_dtype, s.rank, s.group_name),
        5);
  }
};

struct GatherWait : Function<GatherWait> {
  static variable_list forward(
      AutogradContext* ctx,
      const at::Tensor& buffer,
      c10::SymIntArrayRef sizes,
      c10::SymIntArrayRef row_shapes,
      at::IntArrayRef row_dims,
      Dtypes dtypes,
      int64_t rank,
      std::string_view group_name) {
    Shards(sizes, rank, group_name).save(ctx);
    at::AutoDispatchBelowADInplaceOrView guard;
    return gather_cast_coalesced_wait(
        buffer, sizes, row_shapes, row_dims, dtypes, rank, group_name);
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    const Shards s(ctx);
    return with_undefined(
        {reduce_scatter_cast_coalesced_start(gradients, s.sizes, s.rank, s.group_name)}, 6);
  }
};

struct ScatterStart : Function<ScatterStart> {
  static Variable forward(
      AutogradContext* ctx,
      at::TensorList inputs,
      c10::SymIntArrayRef sizes,
      int64_t rank,
      std::string_view group_name) {
    Shards s(sizes, rank, group_name);
    s.rows = RowShapes(inputs);
    s.wire = dtypes_of(inputs);
    s.save(ctx);
    at::AutoDispatchBelowADInplaceOrView guard;
    return reduce_scatter_cast_coalesced_start(inputs, sizes, rank, group_name);
  }

  static variable_list backward(AutogradContext* ctx, variable_list buffers) {
    const Shards s(ctx);
    return with_undefined(
        gather_cast_coalesced_wait(
            buffers[0].contiguous(), s.sizes, s.rows.shapes, s.rows.dims, s.wire, s.rank,
            s.group_name),
        3);
  }
};

struct ScatterWait : Function<ScatterWait> {
  static variable_list forward(
      AutogradContext* ctx,
      const at::Tensor& buffer,
      c10::SymIntArrayRef sizes,
      c10::SymIntArrayRef row_shapes,
      at::IntArrayRef row_dims,
      Dtypes wire_dtypes,
      Dtypes dtypes,
      ReduceDtype reduce_dtype,
      int64_t rank,
      std::string_view group_name) {
    Shards s(sizes, rank, group_name);
    s.wire = wire_dtypes.vec();
    s.reduce_dtype = reduce_dtype;
    s.save(ctx);
    at::AutoDispatchBelowADInplaceOrView guard;
    return reduce_scatter_cast_coalesced_wait(
        buffer, sizes, row_shapes, row_dims, wire_dtypes, dtypes, reduce_dtype, rank, group_name);
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    const Shards s(ctx);
    return with_undefined(
        {gather_cast_coalesced_start(
            gradients, s.sizes, s.wire, s.rank, s.group_name, s.reduce_dtype)},
        8);
  }
};

std::vector<at::Tensor> reduce_scatter_cast_coalesced(
    at::TensorList inputs,
    c10::SymIntArrayRef sizes,
    Dtypes dtypes,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  check_whole(inputs, sizes, rank);
  check_results(dtypes, reduce_dtype, inputs.size());
  const RowShapes rows(inputs);
  return reduce_scatter_cast_coalesced_wait(
      reduce_scatter_cast_coalesced_start(inputs, sizes, rank, group_name), sizes, rows.shapes,
      rows.dims, dtypes_of(inputs), dtypes, reduce_dtype, rank, group_name);
}

struct GatherThroughFloat8 : Function<GatherThroughFloat8> {
  static variable_list forward(
      AutogradContext* ctx,
      at::TensorList shards,
      c10::SymIntArrayRef sizes,
      at::ScalarType float8_dtype,
      at::ScalarType dtype,
      int64_t rank,
      std::string_view group_name,
      ReduceDtype reduce_dtype) {
    Shards s(sizes, rank, group_name);
    s.dtypes = dtypes_of(shards);
    s.reduce_dtype = reduce_dtype;
    s.save(ctx);
    at::AutoDispatchBelowADInplaceOrView guard;
    return gather_through_float8(
        shards, sizes, float8_dtype, dtype, rank, group_name, reduce_dtype);
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    const Shards s(ctx);
    return with_undefined(
        reduce_scatter_cast_coalesced(
            gradients, s.sizes, s.dtypes, s.rank, s.group_name, s.reduce_dtype),
        6);
  }
};

// ------------------------------------------------------------------- as kernels

at::Tensor gather_start_autograd(
    at::TensorList shards,
    c10::SymIntArrayRef sizes,
    Dtypes dtypes,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  return GatherStart::apply(shards, sizes, dtypes, rank, group_name, reduce_dtype);
}

std::vector<at::Tensor> gather_wait_autograd(
    const at::Tensor& buffer,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef row_shapes,
    at::IntArrayRef row_dims,
    Dtypes dtypes,
    int64_t rank,
    std::string_view group_name) {
  return GatherWait::apply(buffer, sizes, row_shapes, row_dims, dtypes, rank, group_name);
}

at::Tensor scatter_start_autograd(
    at::TensorList inputs, c10::SymIntArrayRef sizes, int64_t rank, std::string_view group_name) {
  return ScatterStart::apply(inputs, sizes, rank, group_name);
}

std::vector<at::Tensor> scatter_wait_autograd(
    const at::Tensor& buffer,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef row_shapes,
    at::IntArrayRef row_dims,
    Dtypes wire_dtypes,
    Dtypes dtypes,
    ReduceDtype reduce_dtype,
    int64_t rank,
    std::string_view group_name) {
  return ScatterWait::apply(
      buffer, sizes, row_shapes, row_dims, wire_dtypes, dtypes, reduce_dtype, rank, group_name);
}

std::vector<at::Tensor> gather_through_float8_autograd(
    at::TensorList shards,
    c10::SymIntArrayRef sizes,
    at::ScalarType float8_dtype,
    at::ScalarType dtype,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  return GatherThroughFloat8::apply(
      shards, sizes, float8_dtype, dtype, rank, group_name, reduce_dtype);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  m.impl("reduce_scatter_cast_coalesced", reduce_scatter_cast_coalesced);
}

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  m.impl("gather_cast_coalesced_start", gather_start_autograd);
  m.impl("gather_cast_coalesced_wait", gather_wait_autograd);
  m.impl("reduce_scatter_cast_coalesced_start", scatter_start_autograd);
  m.impl("reduce_scatter_cast_coalesced_wait", scatter_wait_autograd);
  m.impl("gather_through_float8", gather_through_float8_autograd);
  m.impl("gather_cast_float8_coalesced", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace deepsp
