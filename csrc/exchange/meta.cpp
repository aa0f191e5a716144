// Shapes and strides of the exchange, without data or a process group; and how
// functionalization sees the wait that returns views.

#include "../functionalize.h"
#include "checks.h"
#include "ops.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace deepsp {
namespace {

std::vector<at::Tensor> views_by_heads(
    const at::Tensor& buffer, const SymBlockLayout& layout, int64_t chunk) {
  const c10::SymInt columns = layout.columns(layout.rank, chunk);
  std::vector<at::Tensor> views;
  for (size_t i = 0; i < layout.heads.tensors(); ++i) {
    const c10::SymInt dim = layout.head_dims[i];
    const c10::SymInt step = buffer.sym_stride(0);
    views.push_back(buffer.as_strided_symint(
        {layout.batch, layout.token(layout.parts()),
         c10::SymInt(layout.heads.range(i, layout.rank, chunk).size()), dim},
        {step * columns, step * layout.batch * columns, step * dim, step},
        buffer.sym_storage_offset() + step * layout.column(i, layout.rank, chunk)));
  }
  return views;
}

std::vector<at::Tensor> outputs_by_tokens(
    const SymBlockLayout& layout, const at::Tensor& like, bool tokens_first) {
  const c10::SymInt& tokens = layout.seq_lens[layout.rank];
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < layout.heads.tensors(); ++i) {
    const c10::SymInt heads = layout.heads.num_heads(i);
    const c10::SymInt& dim = layout.head_dims[i];
    outputs.push_back(
        tokens_first
            ? at::empty_symint({tokens, layout.batch, heads, dim}, like.options()).transpose(0, 1)
            : at::empty_symint({layout.batch, tokens, heads, dim}, like.options()));
  }
  return outputs;
}

std::vector<at::Tensor> heads_to_seq_meta(
    at::TensorList inputs,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view /*group_name*/,
    bool tokens_first) {
  return outputs_by_tokens(
      check_by_heads(inputs, num_heads, seq_lens, 0, 1, rank), inputs[0], tokens_first);
}

std::vector<at::Tensor> seq_to_heads_start_meta(
    at::TensorList inputs,
    c10::SymIntArrayRef seq_lens,
    int64_t chunks,
    bool /*last_first*/,
    int64_t rank,
    std::string_view /*group_name*/) {
  const SymBlockLayout layout = check_by_tokens(inputs, seq_lens, chunks, rank);
  std::vector<at::Tensor> buffers;
  for (int64_t chunk = 0; chunk < layout.heads.chunks(); ++chunk) {
    buffers.push_back(at::empty_symint({buffer_elements(layout, chunk)}, inputs[0].options()));
  }
  return buffers;
}

std::vector<at::Tensor> seq_to_heads_wait_meta(
    const at::Tensor& buffer,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank,
    std::string_view /*group_name*/) {
  return views_by_heads(
      buffer, check_wait(buffer, num_heads, head_dims, batch, seq_lens, chunk, chunks, rank),
      chunk);
}

at::Tensor heads_to_seq_start_meta(
    at::TensorList inputs,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank,
    std::string_view /*group_name*/) {
  const SymBlockLayout layout = check_by_heads(inputs, num_heads, seq_lens, chunk, chunks, rank);
  return at::empty_symint({buffer_elements(layout, chunk)}, inputs[0].options());
}

std::vector<at::Tensor> heads_to_seq_wait_meta(
    at::TensorList buffers,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view /*group_name*/,
    bool tokens_first) {
  const int64_t chunks = static_cast<int64_t>(buffers.size());
  return outputs_by_tokens(
      check_wait(buffers, num_heads, head_dims, batch, seq_lens, 0, chunks, rank), buffers[0],
      tokens_first);
}

std::vector<at::Tensor> seq_to_heads_wait_functionalize(
    const at::Tensor& buffer,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank,
    std::string_view group_name) {
  return cut_alias(buffer, [&](const at::Tensor& inner) {
    return seq_to_heads_wait(
        inner, num_heads, head_dims, batch, seq_lens, chunk, chunks, rank, group_name);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, Meta, m) {
  m.impl("heads_to_seq", heads_to_seq_meta);
  m.impl("seq_to_heads_start", seq_to_heads_start_meta);
  m.impl("seq_to_heads_wait", seq_to_heads_wait_meta);
  m.impl("heads_to_seq_start", heads_to_seq_start_meta);
  m.impl("heads_to_seq_wait", heads_to_seq_wait_meta);
}

TORCH_LIBRARY_IMPL(deepsp, Functionalize, m) {
  m.impl("seq_to_heads_wait", seq_to_heads_wait_functionalize);
}

}  // namespace deepsp
