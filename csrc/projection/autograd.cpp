// Linear layers around the exchange, differentiated. The gradients of one are the
// other with its weight transposed: dO = dY·W goes straight into what is sent, and
// dX is summed from what arrives.

#include "../exchange/ops.h"
#include "../op.h"

#include <algorithm>

namespace deepsp {
namespace {

const Op project_to_heads_start("_project_to_heads_start");
const Op project_to_heads_backward("_project_to_heads_backward");
const Op heads_to_output_wait("_heads_to_output_wait");
const Op heads_to_output_weight_grad("_heads_to_output_weight_grad");

bool any_requires_grad(at::TensorList tensors) {
  return std::any_of(
      tensors.begin(), tensors.end(), [](const at::Tensor& x) { return x.requires_grad(); });
}

// Keeps x, only for a weight's gradient, weights and biases.
void keep_factors(Call& call) {
  const at::Tensor& x = call.inputs()[0];
  Tensors kept = call.inputs().slice(1, call.count("weights")).vec();
  if (any_requires_grad(kept)) {
    kept.push_back(x);
  }
  call.keep_tensors(kept);
  call.keep("batch", x.sym_size(0));
}

Tensors project_to_heads_start_gradients(const Call& call, const Tensors& buffers) {
  const size_t n = call.count("weights");
  const Tensors kept = call.kept_tensors();
  const auto wanted = call.wanted(1 + 2 * n);
  const Tensors found = project_to_heads_backward(
      call, {{"buffers", buffers},
             {"x", kept.size() > n ? c10::IValue(kept[n]) : c10::IValue()},
             {"weights", Tensors(kept.begin(), kept.begin() + n)},
             {"wanted", wanted}});
  return call.placed(found, wanted);
}

// Keeps the buffers, only for the weight's gradient, weight and bias.
void keep_weight(Call& call) {
  const size_t chunks = call.count("buffers");
  Tensors kept{call.inputs()[chunks]};
  if (any_requires_grad(kept)) {
    kept.insert(kept.end(), call.inputs().begin(), call.inputs().begin() + chunks);
  }
  call.keep_tensors(kept);
}

Tensors heads_to_output_wait_gradients(const Call& call, const Tensors& gradients) {
  const at::Tensor& grad = gradients[0];
  const size_t chunks = call.count("buffers");
  const c10::SymInt num_heads = call["num_heads"];
  const Tensors kept = call.kept_tensors();
  const at::Tensor weight = kept[0];
  Tensors found;
  if (call.wanted(chunks) != std::vector<int64_t>(chunks, 0)) {
    // The last chunk first: autograd asks for it first.
    found = project_to_heads_start(
        call, {{"x", grad},
               {"weights", Tensors{weight.t()}},
               {"biases", Tensors()},
               {"num_heads", SymInts{num_heads}},
               {"chunks", static_cast<int64_t>(chunks)},
               {"last_first", true}});
  }
  found.resize(call.count());
  // While that is in flight.
  if (call.wants(chunks)) {
    found[chunks] = heads_to_output_weight_grad(
        call, {{"grad", grad},
               {"buffers", Tensors(kept.begin() + 1, kept.end())},
               {"head_dim", weight.sym_size(1) / num_heads}});
  }
  if (call.wants(chunks + 1)) {
    found[chunks + 1] = grad.sum(at::IntArrayRef{0, 1});
  }
  return found;
}

// One weight for all projections, or one for each.
Tensors split_fused(at::TensorList fused, c10::SymIntArrayRef num_heads, const char* name) {
  if (fused.size() != 1 || num_heads.size() == 1) {
    return fused.vec();
  }
  c10::SymInt heads = 0;
  for (const c10::SymInt& count : num_heads) {
    heads = heads + count;
  }
  const c10::SymInt rows = fused[0].dim() > 0 ? fused[0].sym_size(0) : c10::SymInt(0);
  TORCH_CHECK_VALUE(
      heads > 0 && rows % heads == 0, "expected the rows of ", name,
      "[0], which serves all projections, to be a multiple of its ", heads, " heads, got ", rows,
      "; pass one for each projection if head dimensions differ");
  SymInts sizes;
  for (const c10::SymInt& count : num_heads) {
    sizes.push_back(rows / heads * count);
  }
  return fused[0].split_with_sizes_symint(sizes, 0);
}

c10::IValue project_to_heads(const Given& given) {
  const c10::SymIntArrayRef num_heads = given["num_heads"];
  const Tensors each = split_fused(given["weights"], num_heads, "weights");
  const at::Tensor x = given["x"];
  const Tensors buffers = project_to_heads_start(
      given, {{"weights", each},
              {"biases", split_fused(given["biases"], num_heads, "biases")},
              {"chunks", 1},
              {"last_first", false}});
  SymInts head_dims;  // the start has checked them
  for (size_t i = 0; i < each.size(); ++i) {
    head_dims.push_back(each[i].sym_size(0) / num_heads[i]);
  }
  return seq_to_heads_wait(
             given, {{"buffer", buffers[0]},
                     {"head_dims", head_dims},
                     {"batch", x.sym_size(0)},
                     {"chunk", 0},
                     {"chunks", 1}})
      .value();
}

c10::IValue heads_to_output(const Given& given) {
  const at::Tensor input = given["input"];
  const c10::SymInt num_heads = given["num_heads"];
  const at::Tensor buffer = heads_to_seq_start(
      given,
      {{"inputs", Tensors{input}}, {"num_heads", SymInts{num_heads}}, {"chunk", 0}, {"chunks", 1}});
  return heads_to_output_wait(given, {{"buffers", Tensors{buffer}}, {"batch", input.sym_size(0)}})
      .value();
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  implement<project_to_heads>(m, "project_to_heads");
  implement<heads_to_output>(m, "heads_to_output");
}

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  differentiable(m, "_project_to_heads_start", project_to_heads_start_gradients, keep_factors);
  differentiable(m, "_heads_to_output_wait", heads_to_output_wait_gradients, keep_weight);
  not_differentiable(m, "_project_to_heads_backward");
  not_differentiable(m, "_heads_to_output_weight_grad");
}

}  // namespace deepsp
