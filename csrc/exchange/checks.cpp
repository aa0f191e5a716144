#include "checks.h"

#include "../common/checks.h"

namespace deepsp {
namespace {

std::string name_of(const char* const* names, size_t i) {
  return names ? names[i] : "inputs[" + std::to_string(i) + "]";
}

// lengths: whether these are alike, too.
void check_alike(at::TensorList inputs, const char* const* names, bool lengths = true) {
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
        !lengths || x.sym_size(1) == first.sym_size(1), "expected ", name,
        " to have the sequence length of ", first_name, " (", first.sym_size(1), "), got ",
        x.sym_size(1));
    check_like(x, name, first, first_name.c_str());
  }
}

// Products of the two, and with lengths, don't overflow.
constexpr int64_t kMostRanks = int64_t(1) << 20;

// A head that several ranks hold comes back as a sum. Queries that are cut don't.
void check_sums(const SymPlan& plan, at::ScalarType dtype) {
  for (size_t i = plan.cuts_queries(); !is_summable(dtype) && i < plan.heads.tensors(); ++i) {
    for (int64_t p = 0; p + 1 < plan.ranks(); ++p) {
      TORCH_CHECK_VALUE(
          plan.heads.range(i, p).end <= plan.heads.range(i, p + 1).begin,
          "expected float64, float32, bfloat16 or float16 for inputs[", i,
          "], since several ranks hold the same head of it and their parts are summed, got ",
          dtype_name(dtype));
    }
  }
}

SymPlan checked_plan(
    HeadLayout heads,
    SymInts head_dims,
    const c10::SymInt& batch,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    int64_t levels) {
  SymPlan plan(std::move(heads), std::move(head_dims), batch, seq_lens.vec(), rank, levels > 1);
  for (size_t i = 0; i < plan.head_dims.size(); ++i) {
    check_fits(
        {plan.total(), plan.batch, plan.heads.num_heads(i), plan.head_dims[i]},
        "seq_lens, batch, num_heads and head_dims");
  }
  return plan;
}

// Checks what an owner has of a section, and returns how many tensors that is.
size_t check_section(
    at::TensorList inputs, const SymPlan& plan, const Section<c10::SymInt>& section, size_t first) {
  for (size_t n = 0; n < section.tensors.size(); ++n) {
    const at::Tensor& x = inputs[first + n];
    const auto& [tensor, heads, column, columns] = section.tensors[n];
    TORCH_CHECK_VALUE(
        x.sym_size(1) == section.rows(), "expected ", name_of(nullptr, first + n),
        " to have sequence length ", section.rows(), ", the ",
        section.all_tokens ? "sum of seq_lens" : "number of queries of this rank's cell", ", got ",
        x.sym_size(1));
    TORCH_CHECK_VALUE(
        x.sym_size(2) == heads.size(), "expected ", name_of(nullptr, first + n), " to have ",
        heads.size(), " heads, those of num_heads[", tensor, "] = ", plan.heads.num_heads(tensor),
        " that rank ", plan.rank, " of ", plan.ranks(), " holds",
        plan.chunks() > 1 ? " in this chunk" : "", ", got ", x.sym_size(2));
    TORCH_CHECK_VALUE(
        x.sym_size(3) == plan.head_dims[tensor], "expected ", name_of(nullptr, first + n),
        " to have head_dim ", plan.head_dims[tensor], ", that of the other cells, got ",
        x.sym_size(3));
  }
  return section.tensors.size();
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

int64_t check_seq_lens(c10::SymIntArrayRef seq_lens, int64_t rank, int64_t levels) {
  const int64_t count = static_cast<int64_t>(seq_lens.size());
  check_at_least(levels, 1, "levels");
  TORCH_CHECK_VALUE(
      count > 0,
      "expected seq_lens to have the number of tokens of each rank of the group, got an empty "
      "list");
  const int64_t parts = count / levels;
  const std::vector<int64_t> widths =
      levels > 1 ? level_widths(parts) : std::vector<int64_t>{parts};
  TORCH_CHECK_VALUE(
      parts * levels == count && static_cast<int64_t>(widths.size()) == levels,
      "expected seq_lens to have the tokens of each rank for each of the levels of width 2, 3, "
      "4, 6, ... and the number of ranks, got ",
      count, " entries for ", levels, " levels");
  check_rank(rank, parts, " in seq_lens");
  for (int64_t n = 0; n < count; ++n) {
    check_at_least(seq_lens[n], 0, "seq_lens[", n, "]");
    check_fits(seq_lens[n], "seq_lens");
  }
  for (int64_t n = 0; n < levels; ++n) {
    for (int64_t p = 0; p < parts; ++p) {
      TORCH_CHECK_VALUE(
          block_of(p, widths[n], parts) || seq_lens[n * parts + p] == 0, "expected seq_lens[",
          n * parts + p, "] to be 0, since rank ", p, " of ", parts, " is in no block of ",
          widths[n], ", got ", seq_lens[n * parts + p]);
    }
  }
  return parts;
}

namespace {

// The heads of tensors that are sent by levels: of each level, whole where there are enough.
HeadLayout layout_of(
    const std::vector<int64_t>& num_heads,
    int64_t ranks,
    const Given& given,
    int64_t chunks,
    const char* const* names = nullptr) {
  int64_t parts = given.get("query_parts", 1);
  if (given.get("levels", 1) > 1) {
    TORCH_CHECK_VALUE(
        chunks == 1 && parts == 1, "expected chunks and query_parts to be 1 with levels, got ",
        chunks, " and ", parts);
    parts = num_heads[0] < ranks ? HeadLayout::kAuto : 1;
  }
  return head_layout(num_heads, ranks, chunks, parts, names);
}

}  // namespace

void check_local_length(
    const at::Tensor& x, const std::string& name, c10::SymIntArrayRef seq_lens, int64_t rank) {
  TORCH_CHECK_VALUE(
      x.sym_size(1) == seq_lens[rank], "expected ", name, " to have sequence length ",
      seq_lens[rank], ", which is seq_lens[", rank, "], this rank's entry, got ", x.sym_size(1));
}

HeadLayout head_layout(
    const std::vector<int64_t>& num_heads,
    int64_t ranks,
    int64_t chunks,
    int64_t query_parts,
    const char* const* names) {
  check_at_least(ranks, 1, "parts");
  check_at_least(chunks, 1, "chunks");
  check_at_least(query_parts, 0, "query_parts");
  const std::string first = name_of(names, 0);
  if (query_parts == 1) {
    TORCH_CHECK_VALUE(
        num_heads[0] >= ranks, "expected ", first, " to have at least ", ranks,
        " heads, the number of ranks of the group, got ", num_heads[0], "; use a group of at most ",
        num_heads[0], " ranks");
  } else {
    TORCH_CHECK_VALUE(
        ranks <= kMostRanks && num_heads[0] <= kMostRanks, "expected at most ", kMostRanks,
        " ranks and heads, got ", ranks, " and ", num_heads[0]);
    TORCH_CHECK_VALUE(
        query_parts == HeadLayout::kAuto || ranks % query_parts == 0,
        "expected query_parts to divide the number of ranks of the group (", ranks, "), got ",
        query_parts, "; or pass \"auto\"");
    const int64_t groups = query_parts == HeadLayout::kAuto ? 1 : ranks / query_parts;
    TORCH_CHECK_VALUE(
        num_heads[0] >= groups, "expected ", first, " to have at least ", groups,
        " heads with query_parts ", query_parts, " on ", ranks, " ranks, got ", num_heads[0],
        "; raise query_parts (over a mesh of two dimensions: its rows), or pass \"auto\" with a "
        "group of one dimension");
  }
  for (size_t i = 1; i < num_heads.size(); ++i) {
    TORCH_CHECK_VALUE(
        num_heads[i] > 0 && num_heads[0] % num_heads[i] == 0, "expected the number of heads of ",
        name_of(names, i), " to divide that of ", first, " (", num_heads[0], "), got ",
        num_heads[i]);
  }
  return HeadLayout(num_heads, ranks, chunks, query_parts);
}

SymPlan plan_by_tokens(at::TensorList inputs, const Given& given, const char* const* names) {
  const c10::SymIntArrayRef seq_lens = given["seq_lens"];
  const int64_t rank = given["rank"];
  const int64_t levels = given.get("levels", 1);
  const int64_t ranks = check_seq_lens(seq_lens, rank, levels);
  check_alike(inputs, names);
  if (levels == 1) {
    check_local_length(inputs[0], name_of(names, 0), seq_lens, rank);
  }
  std::vector<int64_t> num_heads;
  SymInts head_dims;
  for (const at::Tensor& x : inputs) {
    num_heads.push_back(x.sym_size(2).guard_int(__FILE__, __LINE__));
    head_dims.push_back(x.sym_size(3));
  }
  const SymPlan plan = checked_plan(
      layout_of(num_heads, ranks, given, given.get("chunks", 1), names), std::move(head_dims),
      inputs[0].sym_size(0), seq_lens, rank, levels);
  TORCH_CHECK_VALUE(
      levels == 1 || inputs[0].sym_size(1) == plan.tokens(), "expected ", name_of(names, 0),
      " to have sequence length ", plan.tokens(), ", which is this rank's of all levels, got ",
      inputs[0].sym_size(1));
  return plan;
}

SymPlan plan_by_heads(at::TensorList inputs, const Given& given) {
  const c10::SymIntArrayRef seq_lens = given["seq_lens"];
  const int64_t rank = given["rank"], chunk = given.get("chunk", 0);
  const int64_t levels = given.get("levels", 1);
  const int64_t ranks = check_seq_lens(seq_lens, rank, levels);
  const std::vector<int64_t> num_heads = ints(given["num_heads"]);
  const bool one_section = levels == 1 && given.get("query_parts", 1) == 1;
  check_alike(inputs, nullptr, /*lengths=*/one_section);
  TORCH_CHECK_VALUE(
      one_section ? num_heads.size() == inputs.size() : !num_heads.empty(),
      "expected num_heads to have one entry for each of the ", inputs.size(), " inputs, got ",
      num_heads.size());
  SymPlan plan(
      layout_of(num_heads, ranks, given, given.get("chunks", 1)), SymInts(num_heads.size(), 0),
      inputs[0].sym_size(0), seq_lens.vec(), rank, levels > 1);
  check_chunk(chunk, plan.chunks());
  const auto sections = plan.sections(rank, chunk);
  size_t count = 0;
  for (const auto& section : sections) {
    for (const auto& heads : section.tensors) {
      if (count < inputs.size()) {
        plan.head_dims[heads.tensor] = inputs[count].sym_size(3);
      }
      ++count;
    }
  }
  TORCH_CHECK_VALUE(
      inputs.size() == count, "expected inputs to have ", count, " tensors, the queries of the ",
      plan.heads.cells(rank, chunk).size(), " cells of rank ", rank, " and what they read, got ",
      inputs.size());
  plan = checked_plan(plan.heads, plan.head_dims, plan.batch, seq_lens, rank, levels);
  check_sums(plan, inputs[0].scalar_type());
  count = 0;
  for (const auto& section : sections) {
    count += check_section(inputs, plan, section, count);
  }
  return plan;
}

SymPlan plan_of_wait(at::TensorList buffers, const Given& given, int64_t chunk, int64_t chunks) {
  return plan_of_wait(
      buffers, given["num_heads"], given["head_dims"], given["batch"], given, chunk, chunks);
}

SymPlan plan_of_wait(
    at::TensorList buffers,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    const c10::SymInt& batch,
    const Given& given,
    int64_t chunk,
    int64_t chunks) {
  const c10::SymIntArrayRef seq_lens = given["seq_lens"];
  const int64_t rank = given["rank"], levels = given.get("levels", 1);
  const int64_t ranks = check_seq_lens(seq_lens, rank, levels);
  TORCH_CHECK_VALUE(
      !num_heads.empty() && num_heads.size() == head_dims.size(),
      "expected num_heads and head_dims to have one entry for each tensor exchanged, got ",
      num_heads.size(), " and ", head_dims.size(), " entries");
  check_at_least(batch, 0, "batch");
  for (size_t i = 0; i < head_dims.size(); ++i) {
    check_at_least(head_dims[i], 0, "head_dims[", i, "]");
  }
  const SymPlan plan = checked_plan(
      layout_of(ints(num_heads), ranks, given, chunks), head_dims.vec(), batch, seq_lens, rank,
      levels);
  for (size_t n = 0; n < buffers.size(); ++n) {
    const int64_t of = chunk + static_cast<int64_t>(n);
    check_chunk(of, plan.chunks());
    check_like(buffers[n], "buffers[" + std::to_string(n) + "]", buffers[0], "buffers[0]");
    const c10::SymInt elements = plan.buffer_elements(of);
    TORCH_CHECK_VALUE(
        buffers[n].dim() == 1 && buffers[n].sym_size(0) == elements,
        "expected the buffer of the exchange described to have shape [", elements, "], got ",
        buffers[n].sym_sizes(), "; pass what the start returned, with the sizes given to it");
  }
  return plan;
}

Layout concrete(const SymPlan& plan) {
  return Layout(
      plan.heads, ints(plan.head_dims), plan.batch.guard_int(__FILE__, __LINE__),
      ints(plan.given_lens()), plan.rank, !plan.levels.empty());
}

}  // namespace deepsp
