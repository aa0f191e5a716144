#include "checks.h"

#include "../common/checks.h"

namespace deepsp {
namespace {

std::string name_of(const char* const* names, size_t i) {
  return names ? names[i] : "inputs[" + std::to_string(i) + "]";
}

void check_alike(at::TensorList inputs, const char* const* names) {
  check_inputs(inputs);
  const at::Tensor& first = inputs[0];
  const std::string first_name = name_of(names, 0);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& x = inputs[i];
    const std::string name = name_of(names, i);
    check_four(x, name, "[batch, sequence, heads, head_dim]");
    TORCH_CHECK_VALUE(
        x.sym_size(0) == first.sym_size(0), "expected ", name, " to have the batch size of ",
        first_name, " (", first.sym_size(0), "), got ", x.sym_size(0));
    TORCH_CHECK_VALUE(
        x.sym_size(1) == first.sym_size(1), "expected ", name, " to have the sequence length of ",
        first_name, " (", first.sym_size(1), "), got ", x.sym_size(1));
    check_like(x, name, first, first_name.c_str());
  }
}

// A head that several ranks hold comes back as a sum.
void check_sums(const HeadLayout& heads, at::ScalarType dtype) {
  for (size_t i = 0; !is_summable(dtype) && i < heads.tensors(); ++i) {
    for (int64_t p = 0; p + 1 < heads.parts(); ++p) {
      TORCH_CHECK_VALUE(
          heads.range(i, p).end <= heads.range(i, p + 1).begin,
          "expected float64, float32, bfloat16 or float16 for inputs[", i,
          "], since several ranks hold the same head of it and their parts are summed, got ",
          dtype_name(dtype));
    }
  }
}

void check_all_fits(const SymBlockLayout& layout) {
  for (size_t i = 0; i < layout.head_dims.size(); ++i) {
    check_fits(
        {layout.token(layout.parts()), layout.batch, layout.heads.num_heads(i),
         layout.head_dims[i]},
        "seq_lens, batch, num_heads and head_dims");
  }
}

}  // namespace

void check_inputs(at::TensorList inputs) {
  TORCH_CHECK_VALUE(
      !inputs.empty(), "expected inputs to have at least one tensor, got an empty list");
}

void check_four(const at::Tensor& x, const std::string& name, const char* dimensions) {
  TORCH_CHECK_VALUE(
      x.dim() == 4, "expected ", name, " to have 4 dimensions ", dimensions, ", got ", x.dim());
}

void check_seq_lens(c10::SymIntArrayRef seq_lens, int64_t rank) {
  const int64_t parts = static_cast<int64_t>(seq_lens.size());
  TORCH_CHECK_VALUE(
      parts > 0,
      "expected seq_lens to have the number of tokens of each rank of the group, got an empty "
      "list");
  check_rank(rank, parts, " in seq_lens");
  for (int64_t p = 0; p < parts; ++p) {
    check_at_least(seq_lens[p], 0, "seq_lens[", p, "]");
    check_fits(seq_lens[p], "seq_lens");
  }
}

void check_local_length(
    const at::Tensor& x, const std::string& name, c10::SymIntArrayRef seq_lens, int64_t rank) {
  TORCH_CHECK_VALUE(
      x.sym_size(1) == seq_lens[rank], "expected ", name, " to have sequence length ",
      seq_lens[rank], ", which is seq_lens[", rank, "], this rank's entry, got ", x.sym_size(1));
}

void check_num_heads(
    const std::vector<int64_t>& num_heads, int64_t parts, const char* const* names) {
  check_at_least(parts, 1, "parts");
  TORCH_CHECK_VALUE(
      num_heads[0] >= parts, "expected ", name_of(names, 0), " to have at least ", parts,
      " heads, the number of ranks of the group, got ", num_heads[0], "; use a group of at most ",
      num_heads[0], " ranks");
  for (size_t i = 1; i < num_heads.size(); ++i) {
    TORCH_CHECK_VALUE(
        num_heads[i] > 0 && num_heads[0] % num_heads[i] == 0, "expected the number of heads of ",
        name_of(names, i), " to divide that of ", name_of(names, 0), " (", num_heads[0], "), got ",
        num_heads[i]);
  }
}

HeadSizes check_inputs_by_tokens(
    at::TensorList inputs, c10::SymIntArrayRef seq_lens, int64_t rank, const char* const* names) {
  check_seq_lens(seq_lens, rank);
  check_alike(inputs, names);
  check_local_length(inputs[0], name_of(names, 0), seq_lens, rank);
  HeadSizes sizes;
  for (const at::Tensor& x : inputs) {
    sizes.num_heads.push_back(x.sym_size(2).guard_int(__FILE__, __LINE__));
    sizes.head_dims.push_back(x.sym_size(3));
  }
  return sizes;
}

SymBlockLayout check_by_tokens(
    at::TensorList inputs,
    c10::SymIntArrayRef seq_lens,
    int64_t chunks,
    int64_t rank,
    const char* const* names) {
  const auto [num_heads, head_dims] = check_inputs_by_tokens(inputs, seq_lens, rank, names);
  check_at_least(chunks, 1, "chunks");
  const int64_t parts = static_cast<int64_t>(seq_lens.size());
  check_num_heads(num_heads, parts, names);
  SymBlockLayout layout{
      HeadLayout(num_heads, parts, chunks), head_dims, inputs[0].sym_size(0), seq_lens.vec(), rank};
  check_all_fits(layout);
  return layout;
}

SymBlockLayout check_by_heads(
    at::TensorList inputs,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank) {
  check_seq_lens(seq_lens, rank);
  check_alike(inputs, nullptr);
  TORCH_CHECK_VALUE(
      num_heads.size() == inputs.size(), "expected num_heads to have one entry for each of the ",
      inputs.size(), " inputs, got ", num_heads.size());
  check_at_least(chunks, 1, "chunks");
  const int64_t parts = static_cast<int64_t>(seq_lens.size());
  const std::vector<int64_t> heads = ints(num_heads);
  check_num_heads(heads, parts, nullptr);
  std::vector<c10::SymInt> head_dims;
  for (const at::Tensor& x : inputs) {
    head_dims.push_back(x.sym_size(3));
  }
  SymBlockLayout layout{
      HeadLayout(heads, parts, chunks), head_dims, inputs[0].sym_size(0), seq_lens.vec(), rank};
  check_all_fits(layout);
  check_chunk(chunk, layout.heads.chunks());
  check_sums(layout.heads, inputs[0].scalar_type());
  TORCH_CHECK_VALUE(
      inputs[0].sym_size(1) == layout.token(parts), "expected inputs[0] to have sequence length ",
      layout.token(parts), ", the sum of seq_lens, got ", inputs[0].sym_size(1));
  for (size_t i = 0; i < inputs.size(); ++i) {
    const int64_t mine = layout.heads.range(i, rank, chunk).size();
    TORCH_CHECK_VALUE(
        inputs[i].sym_size(2) == mine, "expected inputs[", i, "] to have ", mine,
        " heads, those of num_heads[", i, "] = ", heads[i], " that rank ", rank, " of ", parts,
        " holds", layout.heads.chunks() > 1 ? " in this chunk" : "", ", got ",
        inputs[i].sym_size(2));
  }
  return layout;
}

void check_described(
    c10::SymIntArrayRef num_heads, c10::SymIntArrayRef head_dims, const c10::SymInt& batch) {
  TORCH_CHECK_VALUE(
      !num_heads.empty() && num_heads.size() == head_dims.size(),
      "expected num_heads and head_dims to have one entry for each tensor exchanged, got ",
      num_heads.size(), " and ", head_dims.size(), " entries");
  check_at_least(batch, 0, "batch");
  for (size_t i = 0; i < head_dims.size(); ++i) {
    check_at_least(head_dims[i], 0, "head_dims[", i, "]");
  }
}

void check_buffer(
    const at::Tensor& buffer, size_t n, const at::Tensor& first, const c10::SymInt& elements) {
  check_like(buffer, "buffers[" + std::to_string(n) + "]", first, "buffers[0]");
  TORCH_CHECK_VALUE(
      buffer.dim() == 1 && buffer.sym_size(0) == elements,
      "expected the buffer of the exchange described to have shape [", elements, "], got ",
      buffer.sym_sizes(), "; pass what the start returned, with the sizes given to it");
}

SymBlockLayout check_wait(
    at::TensorList buffers,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    const c10::SymInt& batch,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank) {
  check_seq_lens(seq_lens, rank);
  check_described(num_heads, head_dims, batch);
  const int64_t parts = static_cast<int64_t>(seq_lens.size());
  const std::vector<int64_t> heads = ints(num_heads);
  check_num_heads(heads, parts, nullptr);
  check_at_least(chunks, 1, "chunks");
  SymBlockLayout layout{
      HeadLayout(heads, parts, chunks), head_dims.vec(), batch, seq_lens.vec(), rank};
  check_all_fits(layout);
  for (size_t n = 0; n < buffers.size(); ++n) {
    check_chunk(chunk + static_cast<int64_t>(n), layout.heads.chunks());
    check_buffer(
        buffers[n], n, buffers[0], buffer_elements(layout, chunk + static_cast<int64_t>(n)));
  }
  return layout;
}

c10::SymInt buffer_elements(const SymBlockLayout& layout, int64_t chunk) {
  const c10::SymInt by_heads = layout.elements_by_heads(chunk);
  const c10::SymInt by_tokens = layout.elements_by_tokens(chunk);
  // Not a comparison: a graph is for both.
  return by_heads.max(by_tokens);
}

BlockLayout<int64_t> concrete(const SymBlockLayout& layout) {
  return {
      layout.heads, ints(layout.head_dims), layout.batch.guard_int(__FILE__, __LINE__),
      ints(layout.seq_lens), layout.rank};
}

}  // namespace deepsp
