#include "checks.h"

#include "../common/checks.h"

namespace deepsp {
namespace {

std::string name_of(const char* const* names, size_t i) {
  return names ? names[i] : "inputs[" + std::to_string(i) + "]";
}

void check_alike(at::TensorList inputs, const char* const* names) {
  TORCH_CHECK_VALUE(!inputs.empty(), "inputs is empty; at least one tensor is needed");
  const at::Tensor& first = inputs[0];
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& x = inputs[i];
    const auto name = [&] { return name_of(names, i); };
    const auto of_first = [&] { return name_of(names, 0); };
    TORCH_CHECK_VALUE(
        x.dim() == 4, name(), " has ", x.dim(),
        " dimensions; four are right: [batch, sequence, heads, head_dim]");
    TORCH_CHECK_VALUE(
        x.sym_size(0) == first.sym_size(0), name(), " has batch size ", x.sym_size(0), ", but ",
        of_first(), " has ", first.sym_size(0), "; they must be the same");
    TORCH_CHECK_VALUE(
        x.sym_size(1) == first.sym_size(1), name(), " has sequence length ", x.sym_size(1),
        ", but ", of_first(), " has ", first.sym_size(1), "; they must be the same");
    TORCH_CHECK_VALUE(
        x.scalar_type() == first.scalar_type(), name(), " is ", x.scalar_type(), ", but ",
        of_first(), " is ", first.scalar_type(), "; they must have the same dtype");
    TORCH_CHECK_VALUE(
        x.device() == first.device(), name(), " is on ", x.device(), ", but ", of_first(),
        " is on ", first.device(), "; they must be on the same device");
  }
}

// A head that several ranks hold comes back as a sum.
void check_sums(const HeadLayout& heads, at::ScalarType dtype) {
  for (size_t i = 0; !is_summable(dtype) && i < heads.tensors(); ++i) {
    for (int64_t p = 0; p + 1 < heads.parts(); ++p) {
      TORCH_CHECK_VALUE(
          heads.range(i, p).end <= heads.range(i, p + 1).begin, "inputs are ", dtype,
          ", and several ranks hold the same head of inputs[", i,
          "]; only float64, float32, bfloat16 and float16 can be summed");
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

void check_chunk(const HeadLayout& heads, int64_t chunk) {
  TORCH_CHECK_VALUE(
      chunk >= 0 && chunk < heads.chunks(), "chunk is ", chunk, ", but this exchange has ",
      heads.chunks(), " chunks");
}

}  // namespace

void check_seq_lens(c10::SymIntArrayRef seq_lens, int64_t rank) {
  const int64_t parts = static_cast<int64_t>(seq_lens.size());
  TORCH_CHECK_VALUE(
      parts > 0, "seq_lens is empty; it says how many tokens each rank of the group holds");
  TORCH_CHECK_VALUE(
      rank >= 0 && rank < parts, "rank is ", rank, ", but seq_lens has ", parts,
      " entries, one for each rank of the group; a rank from 0 to ", parts - 1, " is right");
  for (int64_t p = 0; p < parts; ++p) {
    TORCH_CHECK_VALUE(
        seq_lens[p] >= 0, "seq_lens[", p, "] is ", seq_lens[p], "; a length can't be negative");
    check_fits(seq_lens[p], "seq_lens");
  }
}

void check_num_heads(
    const std::vector<int64_t>& num_heads, int64_t parts, const char* const* names) {
  TORCH_CHECK_VALUE(parts >= 1, "parts is ", parts, "; at least 1 is right");
  TORCH_CHECK_VALUE(
      num_heads[0] >= parts, name_of(names, 0), " has ", num_heads[0], " heads, fewer than the ",
      parts, " ranks of the group; use a group of at most ", num_heads[0], " ranks");
  for (size_t i = 1; i < num_heads.size(); ++i) {
    TORCH_CHECK_VALUE(
        num_heads[i] > 0 && num_heads[0] % num_heads[i] == 0, name_of(names, i), " has ",
        num_heads[i], " heads, which don't divide the ", num_heads[0], " of ", name_of(names, 0),
        "; each of its heads must serve the same number of them");
  }
}

SymBlockLayout check_by_tokens(
    at::TensorList inputs,
    c10::SymIntArrayRef seq_lens,
    int64_t chunks,
    int64_t rank,
    const char* const* names) {
  check_seq_lens(seq_lens, rank);
  check_alike(inputs, names);
  TORCH_CHECK_VALUE(
      inputs[0].sym_size(1) == seq_lens[rank], name_of(names, 0), " has sequence length ",
      inputs[0].sym_size(1), ", but seq_lens[", rank, "] of this rank is ", seq_lens[rank],
      "; they must be the same");
  TORCH_CHECK_VALUE(chunks >= 1, "chunks is ", chunks, "; at least 1 is right");
  std::vector<int64_t> num_heads;
  std::vector<c10::SymInt> head_dims;
  for (const at::Tensor& x : inputs) {
    num_heads.push_back(x.sym_size(2).guard_int(__FILE__, __LINE__));
    head_dims.push_back(x.sym_size(3));
  }
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
      num_heads.size() == inputs.size(), "num_heads has ", num_heads.size(),
      " entries, but there are ", inputs.size(), " inputs; one for each is right");
  TORCH_CHECK_VALUE(chunks >= 1, "chunks is ", chunks, "; at least 1 is right");
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
  check_chunk(layout.heads, chunk);
  check_sums(layout.heads, inputs[0].scalar_type());
  TORCH_CHECK_VALUE(
      inputs[0].sym_size(1) == layout.token(parts), "inputs[0] has sequence length ",
      inputs[0].sym_size(1), ", but seq_lens add up to ", layout.token(parts),
      "; they must be the same");
  for (size_t i = 0; i < inputs.size(); ++i) {
    const int64_t mine = layout.heads.range(i, rank, chunk).size();
    TORCH_CHECK_VALUE(
        inputs[i].sym_size(2) == mine, "inputs[", i, "] has ", inputs[i].sym_size(2),
        " heads, but rank ", rank, " of ", parts, " holds ", mine, " of num_heads[", i,
        "] = ", heads[i], " heads", layout.heads.chunks() > 1 ? " in this chunk" : "");
  }
  return layout;
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
  TORCH_CHECK_VALUE(
      !num_heads.empty() && num_heads.size() == head_dims.size(), "num_heads has ",
      num_heads.size(), " entries and head_dims ", head_dims.size(),
      "; one each for every tensor that travels is right");
  const int64_t parts = static_cast<int64_t>(seq_lens.size());
  const std::vector<int64_t> heads = ints(num_heads);
  check_num_heads(heads, parts, nullptr);
  TORCH_CHECK_VALUE(chunks >= 1, "chunks is ", chunks, "; at least 1 is right");
  SymBlockLayout layout{
      HeadLayout(heads, parts, chunks), head_dims.vec(), batch, seq_lens.vec(), rank};
  TORCH_CHECK_VALUE(batch >= 0, "batch is ", batch, "; a size can't be negative");
  for (size_t i = 0; i < head_dims.size(); ++i) {
    TORCH_CHECK_VALUE(
        head_dims[i] >= 0, "head_dims[", i, "] is ", head_dims[i], "; a size can't be negative");
  }
  check_all_fits(layout);
  for (size_t n = 0; n < buffers.size(); ++n) {
    check_chunk(layout.heads, chunk + static_cast<int64_t>(n));
    TORCH_CHECK_VALUE(
        buffers[n].scalar_type() == buffers[0].scalar_type() &&
            buffers[n].device() == buffers[0].device(),
        "buffers[", n, "] is ", buffers[n].scalar_type(), " on ", buffers[n].device(),
        ", but buffers[0] is ", buffers[0].scalar_type(), " on ", buffers[0].device(),
        "; they must be alike");
    const c10::SymInt elements = buffer_elements(layout, chunk + static_cast<int64_t>(n));
    TORCH_CHECK_VALUE(
        buffers[n].dim() == 1 && buffers[n].sym_size(0) == elements, "the buffer has shape ",
        buffers[n].sym_sizes(), ", but the exchange described has [", elements,
        "]; pass what the start returned, and the same sizes");
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
