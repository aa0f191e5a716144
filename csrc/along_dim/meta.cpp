// Shapes, without data or a process group; and how functionalization sees the waits that return
// views.

#include "../functionalize.h"
#include "checks.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace deepsp {
namespace {

at::Tensor buffer_of(const SymAlong& layout, const at::Tensor& like) {
  return at::empty_symint({layout.parts(), layout.slot()}, like.options());
}

at::Tensor all_gather_start_meta(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    std::string_view grad,
    int64_t rank,
    std::string_view /*group_name*/,
    ReduceDtype /*reduce_dtype*/) {
  is_partial(grad);
  return buffer_of(check_part(input, dim, sizes, rank), input);
}

std::vector<at::Tensor> all_gather_wait_meta(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    std::string_view grad,
    int64_t rank,
    std::string_view /*group_name*/) {
  is_partial(grad);
  const SymAlong layout = check_buffer(buffer, dim, sizes, shape, rank);
  // As point to point has it; where blocks are padded, uneven ones are copied out, and long rows
  // may be views, too.
  // Meta views know no symbolic shapes; functionalization cuts the alias anyway.
  if (layout.outer == 1 && !layout.slot().is_symbolic() && !layout.elements().is_symbolic()) {
    const at::Tensor flat = buffer.view_symint({layout.slot() * layout.parts()});
    return {flat.narrow_symint(0, 0, layout.elements()).view_symint(shape)};
  }
  return {at::empty_symint(shape, buffer.options())};
}

at::Tensor reduce_scatter_start_meta(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view /*group_name*/) {
  check_summed(input.scalar_type(), "input");
  return buffer_of(check_entire(input, dim, sizes, rank), input);
}

at::Tensor reduce_scatter_wait_meta(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    int64_t rank,
    std::string_view /*group_name*/,
    ReduceDtype reduce_dtype) {
  check_summed(buffer.scalar_type(), "buffer");
  if (reduce_dtype) {
    check_summed(*reduce_dtype, "reduce_dtype");
  }
  check_buffer(buffer, dim, sizes, shape, rank);
  return at::empty_symint(resized(shape, dim, sizes[rank]), buffer.options());
}

at::Tensor scatter_start_meta(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view /*group_name*/) {
  const SymAlong layout = check_entire(input, dim, sizes, rank);
  return at::empty_symint({1, layout.slot()}, input.options())
      .expand_symint({layout.parts(), layout.slot()});
}

std::vector<at::Tensor> scatter_wait_meta(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    int64_t rank,
    std::string_view /*group_name*/) {
  const SymAlong layout = check_buffer(buffer, dim, sizes, shape, rank);
  return {buffer.select(0, rank)
              .narrow_symint(0, 0, layout.block(rank))
              .view_symint(resized(shape, dim, sizes[rank]))};
}

std::vector<at::Tensor> all_gather_wait_functionalize(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    std::string_view grad,
    int64_t rank,
    std::string_view group_name) {
  return cut_alias(buffer, [&](const at::Tensor& inner) {
    return all_gather_wait(inner, dim, sizes, shape, grad, rank, group_name);
  });
}

std::vector<at::Tensor> scatter_wait_functionalize(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    int64_t rank,
    std::string_view group_name) {
  return cut_alias(buffer, [&](const at::Tensor& inner) {
    return scatter_wait(inner, dim, sizes, shape, rank, group_name);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, Meta, m) {
  m.impl("all_gather_start", all_gather_start_meta);
  m.impl("all_gather_wait", all_gather_wait_meta);
  m.impl("reduce_scatter_start", reduce_scatter_start_meta);
  m.impl("reduce_scatter_wait", reduce_scatter_wait_meta);
  m.impl("scatter_start", scatter_start_meta);
  m.impl("scatter_wait", scatter_wait_meta);
}

TORCH_LIBRARY_IMPL(deepsp, Functionalize, m) {
  m.impl("all_gather_wait", all_gather_wait_functionalize);
  m.impl("scatter_wait", scatter_wait_functionalize);
}

}  // namespace deepsp
