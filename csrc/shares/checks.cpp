#include "checks.h"

#include "../common/checks.h"
#include "../exchange/checks.h"

namespace deepsp {
namespace {

// Queries are cut in two at most: those of the first half of the sequence, and those mirrored.
constexpr int64_t kMostChunks = 2;

// Products of the two, and with lengths, don't overflow.
constexpr int64_t kMostRanks = int64_t(1) << 20;

void check_chunks(int64_t chunks) {
  TORCH_CHECK_VALUE(
      chunks >= 1 && chunks <= kMostChunks, "expected 1 <= chunks <= ", kMostChunks,
      " where queries are cut, got ", chunks);
}

void check_all_fits(const SymShareBlocks& blocks) {
  for (size_t i = 0; i < blocks.head_dims.size(); ++i) {
    check_fits(
        {blocks.total(), blocks.batch, blocks.shares.num_heads(i), blocks.head_dims[i]},
        "seq_lens, batch, num_heads and head_dims");
  }
}

}  // namespace

ShareLayout share_layout(
    const std::vector<int64_t>& num_heads,
    int64_t ranks,
    int64_t query_parts,
    const char* const* names) {
  TORCH_CHECK_VALUE(
      ranks <= kMostRanks && num_heads[0] <= kMostRanks, "expected at most ", kMostRanks,
      " ranks and heads, got ", ranks, " and ", num_heads[0]);
  check_at_least(query_parts, 0, "query_parts");
  TORCH_CHECK_VALUE(
      query_parts == 0 || ranks % query_parts == 0,
      "expected query_parts to divide the number of ranks of the group (", ranks, "), got ",
      query_parts, "; or pass \"auto\"");
  const int64_t groups = query_parts == 0 ? 1 : ranks / query_parts;
  TORCH_CHECK_VALUE(
      num_heads[0] >= groups, "expected ", names ? names[0] : "inputs[0]", " to have at least ",
      groups, " heads with query_parts ", query_parts, " on ", ranks, " ranks, got ", num_heads[0],
      "; raise query_parts (over a mesh of two dimensions: its rows), or pass \"auto\" with a "
      "group "
      "of one dimension");
  check_num_heads(num_heads, 1, names);
  return ShareLayout(num_heads, ranks, query_parts);
}

SymShareBlocks check_tokens_to_share(
    at::TensorList inputs,
    int64_t query_parts,
    c10::SymIntArrayRef seq_lens,
    int64_t chunks,
    int64_t rank,
    const char* const* names) {
  check_chunks(chunks);
  const auto shapes = check_inputs_by_tokens(inputs, seq_lens, rank, names);
  const auto ranks = static_cast<int64_t>(seq_lens.size());
  SymShareBlocks blocks{
      share_layout(shapes.num_heads, ranks, query_parts, names),
      shapes.head_dims,
      inputs[0].sym_size(0),
      seq_lens.vec(),
      rank,
      chunks};
  check_all_fits(blocks);
  return blocks;
}

SymShareBlocks check_shares(
    at::TensorList inputs,
    c10::SymIntArrayRef num_heads,
    int64_t query_parts,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank) {
  check_chunks(chunks);
  check_chunk(chunk, chunks);
  check_seq_lens(seq_lens, rank);
  check_inputs(inputs);
  const std::vector<int64_t> heads = ints(num_heads);
  check_at_least(heads.size(), 1, "len(num_heads)");
  SymShareBlocks blocks{
      share_layout(heads, static_cast<int64_t>(seq_lens.size()), query_parts),
      {},
      inputs[0].sym_size(0),
      seq_lens.vec(),
      rank,
      chunks};
  const std::vector<Cell> cells = blocks.shares.cells(rank);
  const size_t others = chunk == 0 ? heads.size() - 1 : 0;
  TORCH_CHECK_VALUE(
      inputs.size() == cells.size() + others, "expected inputs to have ", cells.size() + others,
      " tensors, queries of the ", cells.size(), " cells of rank ", rank, " and ", others,
      " others, got ", inputs.size());
  const auto check = [&](size_t n, const c10::SymInt& tokens, int64_t h) {
    const at::Tensor& x = inputs[n];
    const std::string name = "inputs[" + std::to_string(n) + "]";
    check_four(x, name, "[batch, sequence, heads, head_dim]");
    check_like(x, name, inputs[0], "inputs[0]");
    TORCH_CHECK_VALUE(
        x.sym_size(0) == blocks.batch && x.sym_size(1) == tokens && x.sym_size(2) == h, "expected ",
        name, " of shape [", blocks.batch, ", ", tokens, ", ", h, ", head_dim], got ",
        x.sym_sizes());
  };
  for (size_t c = 0; c < cells.size(); ++c) {
    check(c, blocks.queries(cells[c], chunk), cells[c].heads.size());
    TORCH_CHECK_VALUE(
        inputs[c].sym_size(3) == inputs[0].sym_size(3), "expected inputs[", c,
        "] to have the head_dim of inputs[0] (", inputs[0].sym_size(3), "), got ",
        inputs[c].sym_size(3));
  }
  blocks.head_dims.push_back(inputs[0].sym_size(3));
  for (size_t i = 1; i < heads.size(); ++i) {
    if (others > 0) {
      check(cells.size() + i - 1, blocks.total(), blocks.shares.reads(i, rank).size());
    }
    blocks.head_dims.push_back(others > 0 ? inputs[cells.size() + i - 1].sym_size(3) : 0);
  }
  TORCH_CHECK_VALUE(
      others == 0 || is_summable(inputs[0].scalar_type()),
      "expected float64, float32, bfloat16 or float16, since several ranks may hold the same head "
      "and their parts are summed, got ",
      dtype_name(inputs[0].scalar_type()));
  check_all_fits(blocks);
  return blocks;
}

SymShareBlocks check_share_buffers(
    at::TensorList buffers,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    const c10::SymInt& batch,
    int64_t query_parts,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank) {
  check_chunks(chunks);
  check_chunk(chunk, chunks);
  check_seq_lens(seq_lens, rank);
  check_described(num_heads, head_dims, batch);
  SymShareBlocks blocks{
      share_layout(ints(num_heads), static_cast<int64_t>(seq_lens.size()), query_parts),
      head_dims.vec(),
      batch,
      seq_lens.vec(),
      rank,
      chunks};
  check_all_fits(blocks);
  for (size_t n = 0; n < buffers.size(); ++n) {
    check_buffer(
        buffers[n], n, buffers[0], elements_of_buffer(blocks, chunk + static_cast<int64_t>(n)));
  }
  return blocks;
}

ShareBlocks<int64_t> concrete(const SymShareBlocks& blocks) {
  return {
      blocks.shares,
      ints(blocks.head_dims),
      blocks.batch.guard_int(__FILE__, __LINE__),
      ints(blocks.seq_lens),
      blocks.rank,
      blocks.chunks};
}

}  // namespace deepsp
