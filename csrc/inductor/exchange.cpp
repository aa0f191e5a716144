// The exchange, and the linear layers around it. Of a linear layer one product for each rank's
// part, so that an exchange is launched when its parts are there and the products of an arrived
// chunk don't wait for the next.

#include "../exchange/ops.h"
#include "../exchange/engine.h"
#include "decomposition.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include <numeric>

namespace deepsp::inductor {
namespace {

// What this rank gets from every rank, and gives to it, with one chunk of an exchange, in elements.
struct Way {
  SymInts gets;
  SymInts gives;
  // Both directions' buffers have the size of the larger one: they are each other's gradients. The
  // difference travels from this rank to itself, behind its own block.
  c10::SymInt padding = 0;
  int64_t rank;

  Way(const SymBlockLayout& layout, int64_t chunk, bool to_heads)
      : gets(layout.counts_by_heads(chunk)),
        gives(layout.counts_by_tokens(chunk)),
        rank(layout.rank) {
    const c10::SymInt by_heads = std::accumulate(gets.begin(), gets.end(), c10::SymInt(0));
    const c10::SymInt by_tokens = std::accumulate(gives.begin(), gives.end(), c10::SymInt(0));
    const bool larger_by_heads = by_heads >= by_tokens;  // one question, lest two answers differ
    if (!to_heads) {
      std::swap(gets, gives);
    }
    if (larger_by_heads != to_heads) {
      padding = larger_by_heads ? by_heads - by_tokens : by_tokens - by_heads;
    }
  }

  int64_t parts() const { return static_cast<int64_t>(gets.size()); }
};

// One all-to-all of flat blocks, one for each rank.
at::Tensor send(Tensors blocks, const Way& way, std::string_view group_name) {
  SymInts gets = way.gets, gives = way.gives;
  if (!is_zero(way.padding)) {
    gets[way.rank] = gets[way.rank] + way.padding;
    gives[way.rank] = gives[way.rank] + way.padding;
    blocks.insert(blocks.begin() + way.rank + 1, blocks[way.rank].new_zeros_symint(way.padding));
  }
  return launch("all_to_all_single", way.parts(), joined(blocks), {gets, gives}, group_name);
}

// What arrived, without the padding.
at::Tensor receive(const at::Tensor& buffer, const Way& way) {
  const at::Tensor full = landed(buffer, way.parts());
  if (is_zero(way.padding)) {
    return full;
  }
  const auto behind = way.gets.begin() + way.rank + 1;
  const c10::SymInt end = std::accumulate(way.gets.begin(), behind, c10::SymInt(0));
  const c10::SymInt rest = std::accumulate(behind, way.gets.end(), c10::SymInt(0));
  return at::cat({full.narrow_symint(0, 0, end), full.narrow_symint(0, end + way.padding, rest)});
}

// Launches all chunks, of which `pack` makes the blocks.
template <class Pack>
Tensors start_chunks(const Given& given, const SymBlockLayout& layout, const Pack& pack) {
  const int64_t count = layout.heads.chunks();
  const bool last_first = given["last_first"];
  Tensors buffers(count);
  for (int64_t n = 0; n < count; ++n) {
    const int64_t chunk = last_first ? count - 1 - n : n;
    buffers[chunk] = send(pack(chunk), Way(layout, chunk, /*to_heads=*/true), given["group_name"]);
  }
  return buffers;
}

// ------------------------------------------------------------------- by tokens

// Every rank's block: [S_rank·B, X_p].
Tensors blocks_by_tokens(const at::Tensor& buffer, const SymBlockLayout& layout, int64_t chunk) {
  const Way way(layout, chunk, /*to_heads=*/false);
  Tensors blocks = receive(buffer, way).split_with_sizes_symint(way.gets);
  for (int64_t p = 0; p < layout.parts(); ++p) {
    blocks[p] = blocks[p].view_symint(
        {layout.seq_lens[layout.rank] * layout.batch, layout.columns(p, chunk)});
  }
  return blocks;
}

// By chunk, and by rank.
std::vector<Tensors> blocks_by_tokens(at::TensorList buffers, const SymBlockLayout& layout) {
  std::vector<Tensors> blocks;
  for (size_t chunk = 0; chunk < buffers.size(); ++chunk) {
    blocks.push_back(blocks_by_tokens(buffers[chunk], layout, chunk));
  }
  return blocks;
}

// What arrived of a run of tensor i's heads: [S_rank·B, h·D_i], the sum of what its ranks sent.
at::Tensor heads_of(
    const std::vector<Tensors>& blocks,
    const SymBlockLayout& layout,
    size_t i,
    const HeadSegment& segment) {
  Tensors parts;
  for (size_t r = 0; r < segment.readers.size(); ++r) {
    const int64_t p = segment.readers[r], chunk = segment.chunks[r];
    const int64_t first = layout.heads.range(i, p, chunk).begin;
    const c10::SymInt& dim = layout.head_dims[i];
    parts.push_back(
        blocks[chunk][p].narrow_symint(
            1, layout.column(i, p, chunk) + dim * (segment.heads.begin - first),
            dim * segment.heads.size()));
  }
  return parts.size() == 1 ? parts[0] : sum_in_order(parts, {}, parts[0].scalar_type());
}

// ------------------------------------------------------------------- the exchange

// One flat block [S_rank, B, X_p] for every rank p, of inputs [B, S_rank, H_i, D_i].
Tensors pack_by_tokens(at::TensorList inputs, const SymBlockLayout& layout, int64_t chunk) {
  const int64_t parts = layout.parts();
  const c10::SymInt& tokens = layout.seq_lens[layout.rank];
  bool even = layout.heads.chunks() == 1;
  for (size_t i = 0; i < inputs.size(); ++i) {
    even = even && layout.heads.num_heads(i) % parts == 0;
  }
  Tensors blocks;
  if (even) {
    // All at once: [B, S_rank, P, h, D] -> [P, S_rank, B, X].
    for (size_t i = 0; i < inputs.size(); ++i) {
      blocks.push_back(
          inputs[i]
              .reshape_symint(
                  {layout.batch, tokens, parts, layout.heads.num_heads(i) / parts,
                   layout.head_dims[i]})
              .permute({2, 1, 0, 3, 4})
              .flatten(3));
    }
    return joined(blocks, 3).reshape({parts, -1}).unbind();
  }
  for (int64_t p = 0; p < parts; ++p) {
    Tensors columns;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Range heads = layout.heads.range(i, p, chunk);
      columns.push_back(
          inputs[i].narrow(2, heads.begin, heads.size()).permute({1, 0, 2, 3}).flatten(2));
    }
    blocks.push_back(at::cat(columns, 2).reshape(-1));
  }
  return blocks;
}

c10::IValue seq_to_heads_start(const Given& given) {
  const at::TensorList inputs = given["inputs"];
  const SymBlockLayout layout =
      check_by_tokens(inputs, given["seq_lens"], given["chunks"], given["rank"]);
  return start_chunks(
      given, layout, [&](int64_t chunk) { return pack_by_tokens(inputs, layout, chunk); });
}

c10::IValue seq_to_heads_wait(const Given& given) {
  const SymBlockLayout layout = check_wait(
      {}, given["num_heads"], given["head_dims"], given["batch"], given["seq_lens"], 0,
      given["chunks"], given["rank"]);
  const int64_t chunk = given["chunk"];
  return views_by_heads(
      receive(given["buffer"], Way(layout, chunk, /*to_heads=*/true)), layout, chunk);
}

c10::IValue heads_to_seq_start(const Given& given) {
  const at::TensorList inputs = given["inputs"];
  const int64_t chunk = given["chunk"];
  const SymBlockLayout layout = check_by_heads(
      inputs, given["num_heads"], given["seq_lens"], chunk, given["chunks"], given["rank"]);
  const Way way(layout, chunk, /*to_heads=*/false);
  // The flat blocks [S_p, B, X_rank] for every rank p, one after another.
  Tensors columns;
  for (const at::Tensor& x : inputs) {
    columns.push_back(x.transpose(0, 1).flatten(2));
  }
  const at::Tensor packed = joined(columns, 2).reshape(-1);
  // Only for the padding, behind this rank's own, are they told apart.
  return send(
      is_zero(way.padding) ? Tensors{packed} : packed.split_with_sizes_symint(way.gives), way,
      given["group_name"]);
}

c10::IValue heads_to_seq_wait(const Given& given) {
  const at::TensorList buffers = given["buffers"];
  const SymBlockLayout layout = check_wait(
      {}, given["num_heads"], given["head_dims"], given["batch"], given["seq_lens"], 0,
      buffers.size(), given["rank"]);
  const std::vector<Tensors> blocks = blocks_by_tokens(buffers, layout);
  Tensors outputs;
  for (size_t i = 0; i < layout.heads.tensors(); ++i) {
    Tensors columns;
    for (const HeadSegment& segment : layout.heads.segments(i)) {
      columns.push_back(heads_of(blocks, layout, i, segment));
    }
    const at::Tensor output = at::cat(columns, 1)
                                  .view_symint(
                                      {layout.seq_lens[layout.rank], layout.batch,
                                       layout.heads.num_heads(i), layout.head_dims[i]})
                                  .transpose(0, 1);
    outputs.push_back(given["tokens_first"] ? output : output.contiguous());
  }
  return outputs;
}

c10::IValue heads_to_seq(const Given& given) {
  const at::TensorList inputs = given["inputs"];
  SymInts dims;
  for (const at::Tensor& x : inputs) {
    dims.push_back(x.sym_size(3));
  }
  const at::Tensor buffer = deepsp::heads_to_seq_start(
      inputs, given["num_heads"], given["seq_lens"], 0, 1, given["rank"], given["group_name"]);
  return deepsp::heads_to_seq_wait(
      buffer, given["num_heads"], dims, inputs[0].sym_size(0), given["seq_lens"], given["rank"],
      given["group_name"], given["tokens_first"]);
}

// ------------------------------------------------------------------- linear layers

// [B, S_rank, dim] -> [S_rank·B, dim], in the order of the blocks.
at::Tensor rows_of(const at::Tensor& x) {
  return x.transpose(0, 1).reshape_symint({-1, x.sym_size(2)});
}

// The way back, contiguous.
at::Tensor batches_of(const at::Tensor& rows, const c10::SymInt& batch) {
  return rows.view_symint({-1, batch, rows.sym_size(1)}).transpose(0, 1).contiguous();
}

// The rows of a weight, or of its bias, that belong to these of tensor i's heads.
at::Tensor rows_for(const at::Tensor& of, const SymBlockLayout& layout, size_t i, Range heads) {
  const c10::SymInt& dim = layout.head_dims[i];
  return of.narrow_symint(0, dim * heads.begin, dim * heads.size());
}

// D_i of weights [H_i·D_i, dim].
SymInts head_dims_of(at::TensorList weights, c10::SymIntArrayRef num_heads) {
  SymInts dims;
  for (size_t i = 0; i < weights.size(); ++i) {
    dims.push_back(weights[i].sym_size(0) / num_heads[i]);
  }
  return dims;
}

// Adds a product to a sum, undefined at first; 16-bit ones in float32.
void add_product(at::Tensor& sum, const at::Tensor& a, const at::Tensor& b) {
  if (!sum.defined()) {
    sum = at::mm(a, b);
  } else if (a.scalar_type() == at::kBFloat16 || a.scalar_type() == at::kHalf) {
    sum = sum.to(at::kFloat).add(at::mm(a, b).to(at::kFloat));
  } else {
    sum = at::addmm(sum, a, b);
  }
}

c10::IValue project_to_heads_start(const Given& given) {
  const at::Tensor x = given["x"];
  const at::TensorList weights = given["weights"], biases = given["biases"];
  const SymBlockLayout layout = check_wait(
      {}, given["num_heads"], head_dims_of(weights, given["num_heads"]), x.sym_size(0),
      given["seq_lens"], 0, given["chunks"], given["rank"]);
  const at::Tensor rows = rows_of(x);
  return start_chunks(given, layout, [&](int64_t chunk) {
    Tensors blocks;
    for (int64_t p = 0; p < layout.parts(); ++p) {
      Tensors columns;
      for (size_t i = 0; i < weights.size(); ++i) {
        const Range heads = layout.heads.range(i, p, chunk);
        if (heads.size() > 0) {
          columns.push_back(
              at::linear(
                  rows, rows_for(weights[i], layout, i, heads),
                  biases.empty() ? at::Tensor() : rows_for(biases[i], layout, i, heads)));
        }
      }
      blocks.push_back(at::cat(columns, 1).reshape(-1));
    }
    return blocks;
  });
}

c10::IValue project_to_heads_backward(const Given& given) {
  const at::TensorList buffers = given["buffers"], weights = given["weights"];
  const at::IntArrayRef wanted = given["wanted"];
  const c10::SymInt batch = given["batch"];
  const size_t n = weights.size();
  const SymBlockLayout layout = check_wait(
      {}, given["num_heads"], head_dims_of(weights, given["num_heads"]), batch, given["seq_lens"],
      0, buffers.size(), given["rank"]);
  const at::Tensor x = given["x"], rows = x.defined() ? rows_of(x) : x;
  at::Tensor of_x;
  std::vector<Tensors> of(2 * n);  // weights and biases, by segment
  std::vector<Tensors> blocks(buffers.size());
  for (int64_t chunk = buffers.size() - 1; chunk >= 0; --chunk) {  // as they were sent
    blocks[chunk] = blocks_by_tokens(buffers[chunk], layout, chunk);
    for (size_t i = 0; i < n; ++i) {
      const auto segments = layout.heads.segments(i);
      of[i].resize(segments.size());
      of[n + i].resize(segments.size());
      for (size_t s = 0; s < segments.size(); ++s) {
        const HeadSegment& segment = segments[s];
        if (*std::min_element(segment.chunks.begin(), segment.chunks.end()) != chunk) {
          continue;  // no part of it is there yet, or it was complete before
        }
        const at::Tensor grad = heads_of(blocks, layout, i, segment);
        if (wanted[0]) {
          add_product(of_x, grad, rows_for(weights[i], layout, i, segment.heads));
        }
        if (wanted[1 + i]) {
          of[i][s] = at::mm(grad.t(), rows);
        }
        if (wanted[1 + n + i]) {
          of[n + i][s] = grad.sum(0);
        }
      }
    }
  }
  Tensors results;
  if (wanted[0]) {
    results.push_back(batches_of(of_x.to(buffers[0].scalar_type()), batch));
  }
  for (size_t i = 0; i < 2 * n; ++i) {
    if (wanted[1 + i]) {
      results.push_back(at::cat(of[i]));
    }
  }
  return results;
}

c10::IValue heads_to_output_wait(const Given& given) {
  const at::TensorList buffers = given["buffers"];
  const at::Tensor weight = given["weight"], bias = given["bias"];
  const c10::SymInt num_heads = given["num_heads"], batch = given["batch"];
  const SymBlockLayout layout = check_wait(
      {}, num_heads, weight.sym_size(1) / num_heads, batch, given["seq_lens"], 0, buffers.size(),
      given["rank"]);
  at::Tensor sum;
  for (size_t chunk = 0; chunk < buffers.size(); ++chunk) {
    const Tensors blocks = blocks_by_tokens(buffers[chunk], layout, chunk);
    for (int64_t p = 0; p < layout.parts(); ++p) {
      add_product(sum, blocks[p], rows_for(weight.t(), layout, 0, layout.heads.range(0, p, chunk)));
    }
  }
  const at::Tensor y = sum.to(buffers[0].scalar_type());
  return batches_of(bias.defined() ? y.add(bias) : y, batch);
}

c10::IValue heads_to_output_weight_grad(const Given& given) {
  const at::TensorList buffers = given["buffers"];
  const at::Tensor grad = given["grad"], columns = rows_of(grad).t();
  const c10::SymInt num_heads = given["num_heads"], head_dim = given["head_dim"];
  const SymBlockLayout layout = check_wait(
      {}, num_heads, head_dim, grad.sym_size(0), given["seq_lens"], 0, buffers.size(),
      given["rank"]);
  const std::vector<Tensors> blocks = blocks_by_tokens(buffers, layout);
  Tensors parts;
  for (const HeadSegment& segment : layout.heads.segments(0)) {
    parts.push_back(at::mm(columns, heads_of(blocks, layout, 0, segment)));
  }
  return at::cat(parts, 1);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp_inductor, CompositeImplicitAutograd, m) {
  decomposes<heads_to_seq>(m, "heads_to_seq");
  decomposes<seq_to_heads_start>(m, "seq_to_heads_start");
  decomposes<seq_to_heads_wait>(m, "seq_to_heads_wait");
  decomposes<heads_to_seq_start>(m, "heads_to_seq_start");
  decomposes<heads_to_seq_wait>(m, "heads_to_seq_wait");
  decomposes<project_to_heads_start>(m, "project_to_heads_start");
  decomposes<project_to_heads_backward>(m, "project_to_heads_backward");
  decomposes<heads_to_output_wait>(m, "heads_to_output_wait");
  decomposes<heads_to_output_weight_grad>(m, "heads_to_output_weight_grad");
}

}  // namespace deepsp::inductor
