// The linear layers around the exchange. On the CPU, one is a product for each rank's part, which
// Inductor has written where it is sent from, and the products of an arrived chunk don't wait for
// the next. On a GPU it is one product a chunk, and one of all that arrives: cut by rank, it would
// be many small ones, and their sum read and written for each.

#include "exchange.h"

#include "../exchange/ops.h"
#include "../transport/group.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include <algorithm>

namespace deepsp::inductor {
namespace {

// [B, S_rank, dim] -> [S_rank·B, dim], in the order of the blocks.
at::Tensor rows_of(const at::Tensor& x) {
  return x.transpose(0, 1).reshape_symint({-1, x.sym_size(2)});
}

// The way back, contiguous.
at::Tensor batches_of(const at::Tensor& rows, const c10::SymInt& batch) {
  return rows.view_symint({-1, batch, rows.sym_size(1)}).transpose(0, 1).contiguous();
}

// The rows of a weight, or of its bias, that belong to these of tensor i's heads.
at::Tensor rows_for(const at::Tensor& of, const SymPlan& plan, size_t i, Range heads) {
  const c10::SymInt& dim = plan.head_dims[i];
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

// Whether linear layers aren't cut by rank.
bool at_once(const at::Tensor& x) {
  return x.is_cuda() || is_switched_on("DEEPSP_TEST_COLLECTIVES");
}

// The blocks for all ranks by one product; in one tensor where they have as many columns.
Tensors project_at_once(
    const at::Tensor& rows,
    at::TensorList weights,
    at::TensorList biases,
    const SymPlan& plan,
    int64_t chunk) {
  Tensors of_weights, of_biases;
  SymInts widths;
  bool even = true;
  for (int64_t p = 0; p < plan.ranks(); ++p) {
    for (size_t i = 0; i < weights.size(); ++i) {
      const Range heads = plan.heads.range(i, p, chunk);
      if (heads.size() > 0) {
        of_weights.push_back(rows_for(weights[i], plan, i, heads));
        if (!biases.empty()) {
          of_biases.push_back(rows_for(biases[i], plan, i, heads));
        }
      }
    }
    widths.push_back(plan.columns(p, chunk));
    even = even && TORCH_STATICALLY_KNOWN_TRUE(widths[p].sym_eq(widths[0]));
  }
  const at::Tensor weight = joined(of_weights);
  const at::Tensor bias = biases.empty() ? at::Tensor() : joined(of_biases);
  Tensors blocks;
  if (even) {
    // It writes the blocks as they are sent.
    const c10::SymInt parts = plan.ranks(), n = rows.sym_size(0), dim = rows.sym_size(1);
    at::Tensor all = at::bmm(
        rows.expand_symint({parts, n, dim}),
        weight.view_symint({parts, widths[0], dim}).transpose(1, 2));
    if (bias.defined()) {
      all = all.add(bias.view_symint({parts, 1, widths[0]}));
    }
    blocks.push_back(all.reshape(-1));
    return blocks;
  }
  for (const at::Tensor& block :
       at::linear(rows, weight, bias).split_with_sizes_symint(widths, 1)) {
    blocks.push_back(block.reshape(-1));
  }
  return blocks;
}

c10::IValue project_to_heads_start(const Given& given) {
  const at::Tensor x = given["x"];
  const at::TensorList weights = given["weights"], biases = given["biases"];
  const SymInts dims = head_dims_of(weights, given["num_heads"]);
  const SymPlan plan =
      plan_of_wait({}, given["num_heads"], dims, x.sym_size(0), given, 0, given["chunks"]);
  const at::Tensor rows = rows_of(x);
  if (plan.cuts_queries()) {
    Tensors inputs;
    for (size_t i = 0; i < weights.size(); ++i) {
      inputs.push_back(
          at::linear(x, weights[i], biases.empty() ? at::Tensor() : biases[i])
              .unflatten_symint(-1, {plan.heads.num_heads(i), dims[i]}));
    }
    return deepsp::seq_to_heads_start(given, {{"inputs", inputs}}).value();
  }
  return start_chunks(given, plan, [&](int64_t chunk) {
    if (at_once(x)) {
      return project_at_once(rows, weights, biases, plan, chunk);
    }
    Tensors blocks;
    for (int64_t p = 0; p < plan.ranks(); ++p) {
      Tensors columns;
      for (size_t i = 0; i < weights.size(); ++i) {
        const Range heads = plan.heads.range(i, p, chunk);
        if (heads.size() > 0) {
          columns.push_back(
              at::linear(
                  rows, rows_for(weights[i], plan, i, heads),
                  biases.empty() ? at::Tensor() : rows_for(biases[i], plan, i, heads)));
        }
      }
      blocks.push_back(at::cat(columns, 1).reshape(-1));
    }
    return blocks;
  });
}

// All that arrived, as rows [S_rank·B, Σ H_i·D_i].
at::Tensor rows_by_tokens(at::TensorList buffers, const SymPlan& plan, const Given& given) {
  if (!plan.cuts_queries()) {
    return all_heads_of(blocks_by_tokens(buffers, plan), plan, 0, plan.heads.tensors());
  }
  const Tensors merged = deepsp::heads_to_seq_wait(
      given, {{"buffers", buffers.vec()},
              {"num_heads", plan.heads.num_heads()},
              {"head_dims", plan.head_dims},
              {"batch", plan.batch},
              {"tokens_first", true}});
  Tensors rows;
  for (const at::Tensor& x : merged) {
    rows.push_back(rows_of(x.flatten(2)));
  }
  return joined(rows, 1);
}

// Of all that arrived.
Tensors project_backward_at_once(
    const at::Tensor& all,
    const at::Tensor& rows,
    at::TensorList weights,
    at::IntArrayRef wanted,
    const c10::SymInt& batch) {
  const size_t n = weights.size();
  Tensors results;
  SymInts widths;
  for (const at::Tensor& weight : weights) {
    widths.push_back(weight.sym_size(0));
  }
  const Tensors grads = all.split_with_sizes_symint(widths, 1);
  if (wanted[0]) {
    results.push_back(batches_of(at::mm(all, joined(weights.vec())), batch));
  }
  for (size_t i = 0; i < n; ++i) {
    if (wanted[1 + i]) {
      results.push_back(at::mm(grads[i].t(), rows));
    }
  }
  for (size_t i = 0; i < n; ++i) {
    if (wanted[1 + n + i]) {
      results.push_back(grads[i].sum(0));
    }
  }
  return results;
}

c10::IValue project_to_heads_backward(const Given& given) {
  const at::TensorList buffers = given["buffers"], weights = given["weights"];
  const at::IntArrayRef wanted = given["wanted"];
  const c10::SymInt batch = given["batch"];
  const size_t n = weights.size();
  const SymPlan plan = plan_of_wait(
      {}, given["num_heads"], head_dims_of(weights, given["num_heads"]), batch, given, 0,
      buffers.size());
  const at::Tensor x = given["x"], rows = x.defined() ? rows_of(x) : x;
  if (at_once(buffers[0]) || plan.cuts_queries()) {
    return project_backward_at_once(
        rows_by_tokens(buffers, plan, given), rows, weights, wanted, batch);
  }
  at::Tensor of_x;
  std::vector<Tensors> of(2 * n);  // weights and biases, by segment
  std::vector<Tensors> blocks(buffers.size());
  for (int64_t chunk = buffers.size() - 1; chunk >= 0; --chunk) {  // as they were sent
    blocks[chunk] = blocks_by_tokens(buffers[chunk], plan, chunk);
    for (size_t i = 0; i < n; ++i) {
      const auto segments = plan.heads.segments(i);
      of[i].resize(segments.size());
      of[n + i].resize(segments.size());
      for (size_t s = 0; s < segments.size(); ++s) {
        const HeadSegment& segment = segments[s];
        if (*std::min_element(segment.chunks.begin(), segment.chunks.end()) != chunk) {
          continue;  // no part of it is there yet, or it was complete before
        }
        const at::Tensor grad = heads_of(blocks, plan, i, segment);
        if (wanted[0]) {
          add_product(of_x, grad, rows_for(weights[i], plan, i, segment.heads));
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
  const SymPlan plan =
      plan_of_wait({}, num_heads, weight.sym_size(1) / num_heads, batch, given, 0, buffers.size());
  at::Tensor sum;
  if (at_once(buffers[0]) || plan.cuts_queries()) {
    sum = at::mm(rows_by_tokens(buffers, plan, given), weight.t());
  } else {
    for (size_t chunk = 0; chunk < buffers.size(); ++chunk) {
      const Tensors blocks = blocks_by_tokens(buffers[chunk], plan, chunk);
      for (int64_t p = 0; p < plan.ranks(); ++p) {
        const Range heads = plan.heads.range(0, p, chunk);
        add_product(sum, blocks[p], rows_for(weight.t(), plan, 0, heads));
      }
    }
  }
  const at::Tensor y = sum.to(buffers[0].scalar_type());
  return batches_of(bias.defined() ? y.add(bias) : y, batch);
}

c10::IValue heads_to_output_weight_grad(const Given& given) {
  const at::TensorList buffers = given["buffers"];
  const at::Tensor grad = given["grad"], columns = rows_of(grad).t();
  const c10::SymInt num_heads = given["num_heads"], head_dim = given["head_dim"];
  const SymPlan plan =
      plan_of_wait({}, num_heads, head_dim, grad.sym_size(0), given, 0, buffers.size());
  if (at_once(grad) || plan.cuts_queries()) {
    return at::mm(columns, rows_by_tokens(buffers, plan, given));
  }
  const std::vector<Tensors> blocks = blocks_by_tokens(buffers, plan);
  Tensors parts;
  for (const HeadSegment& segment : plan.heads.segments(0)) {
    parts.push_back(at::mm(columns, heads_of(blocks, plan, 0, segment)));
  }
  return at::cat(parts, 1);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp_inductor, CompositeImplicitAutograd, m) {
  implement<project_to_heads_start>(m, "_project_to_heads_start");
  implement<project_to_heads_backward>(m, "_project_to_heads_backward");
  implement<heads_to_output_wait>(m, "_heads_to_output_wait");
  implement<heads_to_output_weight_grad>(m, "_heads_to_output_weight_grad");
}

}  // namespace deepsp::inductor
