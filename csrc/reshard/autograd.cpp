// The backward of a start is the reverse collective's wait, that of a wait the reverse collective's
// start. `grad` decides about the gradient of a full tensor: "partial" ones are reduce-scattered,
// "replicated" ones sliced. The gradient of gathered weights is reduce-scattered.

#include "../op.h"
#include "checks.h"
#include "sums.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>

namespace deepsp {
namespace {

// Calls an op that returns one tensor, or a list, with the saved arguments of `call` for those that
// aren't among `values`.
Tensors one_by(const char* op, const Call& call, at::ArrayRef<With> values) {
  return {Op(op)(call, values)};
}
Tensors list_by(const char* op, const Call& call, at::ArrayRef<With> values) {
  return Op(op)(call, values);
}

// ------------------------------------------------------------------- lists, along dimension 0

void keep_rows(Call& call) {
  const RowShapes rows(call.inputs());
  call.keep("row_shapes", rows.shapes);
  call.keep("row_dims", rows.dims);
  call.keep_dtypes("input_dtypes", dtypes_of(call.inputs()));
}

Tensors gather_cast_start_backward(const Call& call, const Tensors& buffers) {
  const bool by_backend = !call["backend_sums"].value().isNone();
  return list_by(
      "_reduce_scatter_cast_coalesced_wait", call,
      {{"buffer", by_backend ? buffers[0] : buffers[0].contiguous()},
       {"wire_dtypes", call["dtypes"].value()},
       {"dtypes", call["input_dtypes"].value()}});
}

Tensors gather_cast_wait_backward(const Call& call, const Tensors& gradients) {
  return one_by("_reduce_scatter_cast_coalesced_start", call, {{"inputs", gradients}});
}

Tensors reduce_scatter_cast_start_backward(const Call& call, const Tensors& buffers) {
  return list_by(
      "_gather_cast_coalesced_wait", call,
      {{"buffer", buffers[0].contiguous()}, {"dtypes", call["input_dtypes"].value()}});
}

Tensors reduce_scatter_cast_wait_backward(const Call& call, const Tensors& gradients) {
  return one_by(
      "_gather_cast_coalesced_start", call,
      {{"shards", gradients}, {"dtypes", call["wire_dtypes"].value()}});
}

Tensors gather_through_float8_backward(const Call& call, const Tensors& gradients) {
  return list_by(
      "_reduce_scatter_cast_coalesced", call,
      {{"inputs", gradients}, {"dtypes", call["input_dtypes"].value()}});
}

// ------------------------------------------------------------------- one tensor, along a dimension

void keep_full_shape(Call& call) {
  call.keep("shape", entire_shape(call.inputs()[0].sym_sizes(), call["dim"], call["sizes"]));
}

void keep_shape(Call& call) {
  call.keep("shape", call.inputs()[0].sym_sizes());
}

Tensors all_gather_start_backward(const Call& call, const Tensors& buffers) {
  if (!is_partial(call["grad"])) {
    return list_by("scatter_wait", call, {{"buffer", buffers[0]}});
  }
  return one_by("reduce_scatter_wait", call, {{"buffer", buffers[0].contiguous()}});
}

Tensors all_gather_wait_backward(const Call& call, const Tensors& gradients) {
  return one_by(
      is_partial(call["grad"]) ? "reduce_scatter_start" : "scatter_start", call,
      {{"input", gradients[0]}});
}

Tensors reduce_scatter_start_backward(const Call& call, const Tensors& buffers) {
  return list_by(
      "all_gather_wait", call, {{"buffer", buffers[0].contiguous()}, {"grad", "partial"}});
}

Tensors reduce_scatter_wait_backward(const Call& call, const Tensors& gradients) {
  return one_by("all_gather_start", call, {{"input", gradients[0]}, {"grad", "partial"}});
}

Tensors scatter_start_backward(const Call& call, const Tensors& buffers) {
  return list_by(
      "all_gather_wait", call, {{"buffer", buffers[0].contiguous()}, {"grad", "replicated"}});
}

Tensors scatter_wait_backward(const Call& call, const Tensors& gradients) {
  return one_by(
      "all_gather_start", call,
      {{"input", gradients[0]}, {"grad", "replicated"}, {"reduce_dtype", c10::IValue()}});
}

// ------------------------------------------------------------------- sums

// A sum that every rank uses in the same way has a replicated gradient, which is passed on;
// partial gradients are summed in turn.

Tensors all_reduce_backward(const Call& call, const Tensors& gradients) {
  if (!is_partial(call["grad"])) {
    return gradients;
  }
  return one_by("all_reduce", call, {{"input", gradients[0]}});
}

void keep_shapes(Call& call) {
  SymInts shapes;
  std::vector<int64_t> dims;
  for (const at::Tensor& x : call.inputs()) {
    shapes.insert(shapes.end(), x.sym_sizes().begin(), x.sym_sizes().end());
    dims.push_back(x.dim());
  }
  call.keep("shapes", shapes);
  call.keep("dims", dims);
}

Tensors all_reduce_start_backward(const Call& call, const Tensors& buffers) {
  const at::Tensor buffer = buffers[0].contiguous();
  if (is_partial(call["grad"])) {
    return list_by("all_reduce_wait", call, {{"buffer", buffer}});
  }
  const SumShapes sums = check_sum_wait(
      buffer, call["shapes"], call["dims"], "replicated", call["rank"], call["size"],
      call["reduce_dtype"]);
  return views_of(buffer.view_symint({buffer.sym_numel()}), sums.of);
}

Tensors all_reduce_wait_backward(const Call& call, const Tensors& gradients) {
  if (is_partial(call["grad"])) {
    return one_by("all_reduce_start", call, {{"inputs", gradients}});
  }
  // It is passed on, in the shape of the buffer.
  Tensors flat;
  for (const at::Tensor& gradient : gradients) {
    flat.push_back(gradient.reshape({-1}));
  }
  const at::Tensor buffer = flat.size() == 1 ? flat[0] : at::cat(flat);
  const c10::SymInt elements = buffer.sym_numel();
  const SymInts shape =
      sum_buffer_shape(elements, call["size"], buffer.scalar_type(), call["reduce_dtype"]);
  if (shape.size() == 1) {
    return {buffer};
  }
  const SymInts padding{0, shape[0] * shape[1] - elements};
  return {at::constant_pad_nd_symint(buffer, padding).view_symint(shape)};
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  differentiable(m, "_gather_cast_coalesced_start", gather_cast_start_backward, keep_rows);
  differentiable(m, "_gather_cast_coalesced_wait", gather_cast_wait_backward);
  differentiable(
      m, "_reduce_scatter_cast_coalesced_start", reduce_scatter_cast_start_backward, keep_rows);
  differentiable(m, "_reduce_scatter_cast_coalesced_wait", reduce_scatter_cast_wait_backward);
  differentiable(m, "gather_through_float8", gather_through_float8_backward, keep_rows);
  not_differentiable(m, "_gather_cast_float8_coalesced");
  differentiable(m, "all_gather_start", all_gather_start_backward, keep_full_shape);
  differentiable(m, "all_gather_wait", all_gather_wait_backward);
  differentiable(m, "reduce_scatter_start", reduce_scatter_start_backward, keep_shape);
  differentiable(m, "reduce_scatter_wait", reduce_scatter_wait_backward);
  differentiable(m, "scatter_start", scatter_start_backward, keep_shape);
  differentiable(m, "scatter_wait", scatter_wait_backward);
  differentiable(m, "all_reduce", all_reduce_backward);
  differentiable(m, "all_reduce_start", all_reduce_start_backward, keep_shapes);
  differentiable(m, "all_reduce_wait", all_reduce_wait_backward);
  not_differentiable(m, "_sum_gradients_");
}

}  // namespace deepsp
