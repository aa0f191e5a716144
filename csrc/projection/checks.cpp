#include "ops.h"

namespace deepsp {
namespace {

std::string weight_name(size_t i) {
  return "weights[" + std::to_string(i) + "]";
}

void check_same_kind(
    const at::Tensor& t, const std::string& name, const at::Tensor& first, const char* first_name) {
  TORCH_CHECK_VALUE(
      t.scalar_type() == first.scalar_type(), name, " is ", t.scalar_type(), ", but ", first_name,
      " is ", first.scalar_type(), "; they must have the same dtype (autocast casts both)");
  TORCH_CHECK_VALUE(
      t.device() == first.device(), name, " is on ", t.device(), ", but ", first_name, " is on ",
      first.device(), "; they must be on the same device");
}

// D_i of weights [H_i·D_i, dim].
std::vector<c10::SymInt> head_dims_of(
    at::TensorList weights, c10::SymIntArrayRef num_heads, const std::optional<c10::SymInt>& dim) {
  TORCH_CHECK_VALUE(
      !weights.empty() && weights.size() == num_heads.size(), "weights has ", weights.size(),
      " entries and num_heads ", num_heads.size(), "; one each for every projection is right");
  std::vector<c10::SymInt> dims;
  for (size_t i = 0; i < weights.size(); ++i) {
    const at::Tensor& w = weights[i];
    TORCH_CHECK_VALUE(
        w.dim() == 2, weight_name(i), " has ", w.dim(),
        " dimensions; two are right: [heads * head_dim, features of x]");
    TORCH_CHECK_VALUE(
        !dim.has_value() || w.sym_size(1) == *dim, weight_name(i), " takes ", w.sym_size(1),
        " features, but x has ", dim.value_or(0), "; they must be the same");
    TORCH_CHECK_VALUE(
        num_heads[i] > 0 && w.sym_size(0) % num_heads[i] == 0, weight_name(i), " has ",
        w.sym_size(0), " rows, which num_heads[", i, "] = ", num_heads[i], " doesn't divide");
    dims.push_back(w.sym_size(0) / num_heads[i]);
  }
  return dims;
}

void check_tokens(
    const at::Tensor& t, const char* name, c10::SymIntArrayRef seq_lens, int64_t rank) {
  check_seq_lens(seq_lens, rank);
  TORCH_CHECK_VALUE(
      t.dim() == 3, name, " has ", t.dim(),
      " dimensions; three are right: [batch, sequence, features]");
  TORCH_CHECK_VALUE(
      t.sym_size(1) == seq_lens[rank], name, " has sequence length ", t.sym_size(1),
      ", but seq_lens[", rank, "] of this rank is ", seq_lens[rank], "; they must be the same");
  TORCH_CHECK_VALUE(
      t.is_floating_point(), name, " is ", t.scalar_type(),
      "; a linear layer needs a floating-point dtype");
}

}  // namespace

SymBlockLayout check_project(
    const at::Tensor& x,
    at::TensorList weights,
    at::TensorList biases,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t chunks,
    int64_t rank) {
  check_tokens(x, "x", seq_lens, rank);
  const std::vector<c10::SymInt> dims = head_dims_of(weights, num_heads, x.sym_size(2));
  TORCH_CHECK_VALUE(
      biases.empty() || biases.size() == weights.size(), "biases has ", biases.size(),
      " entries, but there are ", weights.size(), " weights; none or one for each is right");
  for (size_t i = 0; i < weights.size(); ++i) {
    check_same_kind(weights[i], weight_name(i), x, "x");
    if (!biases.empty()) {
      const std::string name = "biases[" + std::to_string(i) + "]";
      check_same_kind(biases[i], name, x, "x");
      TORCH_CHECK_VALUE(
          biases[i].dim() == 1 && biases[i].sym_size(0) == weights[i].sym_size(0), name,
          " has shape ", biases[i].sym_sizes(), "; [", weights[i].sym_size(0),
          "], the rows of its weight, is right");
    }
  }
  return check_wait({}, num_heads, dims, x.sym_size(0), seq_lens, 0, chunks, rank);
}

SymBlockLayout check_project_backward(
    at::TensorList buffers,
    const std::optional<at::Tensor>& x,
    at::TensorList weights,
    c10::SymIntArrayRef num_heads,
    const c10::SymInt& batch,
    c10::SymIntArrayRef seq_lens,
    at::IntArrayRef wanted,
    int64_t rank) {
  TORCH_CHECK_VALUE(!buffers.empty(), "buffers is empty; one for each chunk is right");
  TORCH_CHECK_VALUE(
      wanted.size() == 1 + 2 * weights.size(), "wanted has ", wanted.size(), " entries; ",
      1 + 2 * weights.size(), " are right: for x, for each weight, for each bias");
  const auto dims = head_dims_of(weights, num_heads, std::nullopt);
  for (size_t i = 0; i < weights.size(); ++i) {
    TORCH_CHECK_VALUE(
        !wanted[1 + i] || x.has_value(), "x is None, but the gradient of ", weight_name(i),
        " needs it");
  }
  if (x.has_value()) {
    check_tokens(*x, "x", seq_lens, rank);
  }
  return check_wait(
      buffers, num_heads, dims, batch, seq_lens, 0, static_cast<int64_t>(buffers.size()), rank);
}

SymBlockLayout check_output(
    at::TensorList buffers,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    const c10::SymInt& num_heads,
    const c10::SymInt& batch,
    c10::SymIntArrayRef seq_lens,
    int64_t rank) {
  TORCH_CHECK_VALUE(!buffers.empty(), "buffers is empty; one for each chunk is right");
  TORCH_CHECK_VALUE(
      weight.dim() == 2 && num_heads > 0 && weight.sym_size(1) % num_heads == 0,
      "weight has shape ", weight.sym_sizes(), "; [features, num_heads * head_dim] with ",
      num_heads, " heads is right");
  check_same_kind(weight, "weight", buffers[0], "what arrives");
  if (bias.has_value()) {
    check_same_kind(*bias, "bias", buffers[0], "what arrives");
    TORCH_CHECK_VALUE(
        bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), "bias has shape ",
        bias->sym_sizes(), "; [", weight.sym_size(0), "], the rows of the weight, is right");
  }
  return check_wait(
      buffers, num_heads, weight.sym_size(1) / num_heads, batch, seq_lens, 0,
      static_cast<int64_t>(buffers.size()), rank);
}

SymBlockLayout check_output_weight_grad(
    const at::Tensor& grad,
    at::TensorList buffers,
    const c10::SymInt& num_heads,
    const c10::SymInt& head_dim,
    c10::SymIntArrayRef seq_lens,
    int64_t rank) {
  TORCH_CHECK_VALUE(!buffers.empty(), "buffers is empty; one for each chunk is right");
  check_tokens(grad, "grad", seq_lens, rank);
  check_same_kind(grad, "grad", buffers[0], "what arrived");
  return check_wait(
      buffers, num_heads, head_dim, grad.sym_size(0), seq_lens, 0,
      static_cast<int64_t>(buffers.size()), rank);
}

}  // namespace deepsp
