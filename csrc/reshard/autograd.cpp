// The backward of a start is the other direction's wait, that of a wait its start. What becomes of
// the gradient of a full tensor, `grad` says: "partial" ones are reduce-scattered, "replicated"
// ones sliced. The gradient of gathered weights is reduce-scattered.

#include "checks.h"
#include "ops.h"
#include "sums.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>

namespace deepsp {
namespace {

// ------------------------------------------------------------------- lists, along dimension 0

void keep_rows(Call& call) {
  const RowShapes rows(call.inputs());
  call.keep("row_shapes", rows.shapes);
  call.keep("row_dims", rows.dims);
  call.keep_dtypes("input_dtypes", dtypes_of(call.inputs()));
}

Tensors gather_cast_start_backward(const Call& call, const Tensors& buffers) {
  return reduce_scatter_cast_coalesced_wait(
      buffers[0].contiguous(), call["sizes"], call["row_shapes"], call["row_dims"], call["dtypes"],
      call["input_dtypes"], call["reduce_dtype"], call["rank"], call["group_name"]);
}

Tensors gather_cast_wait_backward(const Call& call, const Tensors& gradients) {
  return {reduce_scatter_cast_coalesced_start(
      gradients, call["sizes"], call["rank"], call["group_name"])};
}

Tensors reduce_scatter_cast_start_backward(const Call& call, const Tensors& buffers) {
  return gather_cast_coalesced_wait(
      buffers[0].contiguous(), call["sizes"], call["row_shapes"], call["row_dims"],
      call["input_dtypes"], call["rank"], call["group_name"]);
}

Tensors reduce_scatter_cast_wait_backward(const Call& call, const Tensors& gradients) {
  return {gather_cast_coalesced_start(
      gradients, call["sizes"], call["wire_dtypes"], call["rank"], call["group_name"],
      call["reduce_dtype"])};
}

Tensors gather_through_float8_backward(const Call& call, const Tensors& gradients) {
  return reduce_scatter_cast_coalesced(
      gradients, call["sizes"], call["input_dtypes"], call["rank"], call["group_name"],
      call["reduce_dtype"]);
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
    return scatter_wait(
        buffers[0], call["dim"], call["sizes"], call["shape"], call["rank"], call["group_name"]);
  }
  return {reduce_scatter_wait(
      buffers[0].contiguous(), call["dim"], call["sizes"], call["shape"], call["rank"],
      call["group_name"], call["reduce_dtype"])};
}

Tensors all_gather_wait_backward(const Call& call, const Tensors& gradients) {
  const auto& start = is_partial(call["grad"]) ? reduce_scatter_start : scatter_start;
  return {start(gradients[0], call["dim"], call["sizes"], call["rank"], call["group_name"])};
}

Tensors gather_wait_of(const Call& call, const Tensors& buffers, const char* grad) {
  return all_gather_wait(
      buffers[0].contiguous(), call["dim"], call["sizes"], call["shape"], grad, call["rank"],
      call["group_name"]);
}

Tensors reduce_scatter_start_backward(const Call& call, const Tensors& buffers) {
  return gather_wait_of(call, buffers, "partial");
}

Tensors reduce_scatter_wait_backward(const Call& call, const Tensors& gradients) {
  return {all_gather_start(
      gradients[0], call["dim"], call["sizes"], "partial", call["rank"], call["group_name"],
      call["reduce_dtype"])};
}

Tensors scatter_start_backward(const Call& call, const Tensors& buffers) {
  return gather_wait_of(call, buffers, "replicated");
}

Tensors scatter_wait_backward(const Call& call, const Tensors& gradients) {
  return {all_gather_start(
      gradients[0], call["dim"], call["sizes"], "replicated", call["rank"], call["group_name"],
      std::nullopt)};
}

// ------------------------------------------------------------------- sums

// A sum that every rank uses in the same way has a replicated gradient, which is passed on;
// partial gradients are summed in turn.

Tensors all_reduce_backward(const Call& call, const Tensors& gradients) {
  if (!is_partial(call["grad"])) {
    return gradients;
  }
  return {all_reduce(
      gradients[0], "partial", call["rank"], call["size"], call["group_name"],
      call["reduce_dtype"])};
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
    return all_reduce_wait(
        buffer, call["shapes"], call["dims"], "partial", call["rank"], call["size"],
        call["group_name"], call["reduce_dtype"]);
  }
  const SumShapes sums = check_sum_wait(
      buffer, call["shapes"], call["dims"], "replicated", call["rank"], call["size"],
      call["reduce_dtype"]);
  return views_of(buffer.view_symint({buffer.sym_numel()}), sums.of);
}

Tensors all_reduce_wait_backward(const Call& call, const Tensors& gradients) {
  if (is_partial(call["grad"])) {
    return {all_reduce_start(
        gradients, "partial", call["rank"], call["size"], call["group_name"],
        call["reduce_dtype"])};
  }
  // As it passes through, in the shape that the buffer has.
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
  differentiable(m, "gather_cast_coalesced_start", gather_cast_start_backward, keep_rows);
  differentiable(m, "gather_cast_coalesced_wait", gather_cast_wait_backward);
  differentiable(
      m, "reduce_scatter_cast_coalesced_start", reduce_scatter_cast_start_backward, keep_rows);
  differentiable(m, "reduce_scatter_cast_coalesced_wait", reduce_scatter_cast_wait_backward);
  differentiable(m, "gather_through_float8", gather_through_float8_backward, keep_rows);
  not_differentiable(m, "gather_cast_float8_coalesced");
  differentiable(m, "all_gather_start", all_gather_start_backward, keep_full_shape);
  differentiable(m, "all_gather_wait", all_gather_wait_backward);
  differentiable(m, "reduce_scatter_start", reduce_scatter_start_backward, keep_shape);
  differentiable(m, "reduce_scatter_wait", reduce_scatter_wait_backward);
  differentiable(m, "scatter_start", scatter_start_backward, keep_shape);
  differentiable(m, "scatter_wait", scatter_wait_backward);
  differentiable(m, "all_reduce", all_reduce_backward);
  differentiable(m, "all_reduce_start", all_reduce_start_backward, keep_shapes);
  differentiable(m, "all_reduce_wait", all_reduce_wait_backward);
  not_differentiable(m, "sum_gradients_");
}

}  // namespace deepsp
