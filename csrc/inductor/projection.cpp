// The linear layers around the exchange: one product a chunk, and one of all that is received. Cut
// by rank, it would be many small ones, and their sum read and written for each.

#include "exchange.h"

#include "../exchange/ops.h"

#include <ATen/ops/bmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

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

// The blocks for all ranks by one product; in one tensor where they have as many columns.
Tensors project(
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
  return start_chunks(
      given, plan, [&](int64_t chunk) { return project(rows, weights, biases, plan, chunk); });
}

// All that was received, as rows [S_rank·B, Σ H_i·D_i].
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

c10::IValue project_to_heads_backward(const Given& given) {
  const at::TensorList buffers = given["buffers"], weights = given["weights"];
  const at::IntArrayRef wanted = given["wanted"];
  const c10::SymInt batch = given["batch"];
  const size_t n = weights.size();
  const SymPlan plan = plan_of_wait(
      {}, given["num_heads"], head_dims_of(weights, given["num_heads"]), batch, given, 0,
      buffers.size());
  const at::Tensor x = given["x"], rows = x.defined() ? rows_of(x) : x;
  const at::Tensor all = rows_by_tokens(buffers, plan, given);
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

c10::IValue heads_to_output_wait(const Given& given) {
  const at::TensorList buffers = given["buffers"];
  const at::Tensor weight = given["weight"], bias = given["bias"];
  const c10::SymInt num_heads = given["num_heads"], batch = given["batch"];
  const SymPlan plan =
      plan_of_wait({}, num_heads, weight.sym_size(1) / num_heads, batch, given, 0, buffers.size());
  const at::Tensor y = at::mm(rows_by_tokens(buffers, plan, given), weight.t());
  return batches_of(bias.defined() ? y.add(bias) : y, batch);
}

c10::IValue heads_to_output_weight_grad(const Given& given) {
  const at::TensorList buffers = given["buffers"];
  const at::Tensor grad = given["grad"], columns = rows_of(grad).t();
  const c10::SymInt num_heads = given["num_heads"], head_dim = given["head_dim"];
  const SymPlan plan =
      plan_of_wait({}, num_heads, head_dim, grad.sym_size(0), given, 0, buffers.size());
  return at::mm(columns, rows_by_tokens(buffers, plan, given));
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp_inductor, CompositeImplicitAutograd, m) {
  implement<project_to_heads_start>(m, "_project_to_heads_start");
  implement<project_to_heads_backward>(m, "_project_to_heads_backward");
  implement<heads_to_output_wait>(m, "_heads_to_output_wait");
  implement<heads_to_output_weight_grad>(m, "_heads_to_output_weight_grad");
}

}  // namespace deepsp::inductor
