// Linear layers around the exchange, differentiated. The gradients of one are the
// other with its weight transposed: dO = dY·W goes straight into what is sent, and
// dX is summed from what arrives.

#include "../dispatch.h"
#include "../exchange/ops.h"
#include "ops.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace deepsp {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// Gradients have the dtype of what they are gradients of, also where backward runs
// inside autocast: a cast would read what is on its way.
struct NoAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

struct ProjectToHeadsStart : Function<ProjectToHeadsStart> {
  static variable_list forward(
      AutogradContext* ctx,
      const at::Tensor& x,
      at::TensorList weights,
      at::TensorList biases,
      c10::SymIntArrayRef num_heads,
      c10::SymIntArrayRef seq_lens,
      int64_t chunks,
      bool last_first,
      int64_t rank,
      std::string_view group_name) {
    const auto wants = [](const at::Tensor& t) { return t.requires_grad(); };
    variable_list saved(weights.begin(), weights.end());
    if (std::any_of(weights.begin(), weights.end(), wants)) {
      saved.push_back(x);
    }
    ctx->save_for_backward(saved);
    auto& data = ctx->saved_data;
    data["weights"] = static_cast<int64_t>(weights.size());
    data["biases"] = static_cast<int64_t>(biases.size());
    data["num_heads"] = num_heads;
    data["batch"] = x.dim() == 3 ? x.sym_size(0) : c10::SymInt(0);
    data["seq_lens"] = seq_lens;
    data["rank"] = rank;
    data["group_name"] = std::string(group_name);
    at::AutoDispatchBelowADInplaceOrView guard;
    return project_to_heads_start(
        x, weights, biases, num_heads, seq_lens, chunks, last_first, rank, group_name);
  }

  static variable_list backward(AutogradContext* ctx, variable_list buffers) {
    const NoAutocast guard;
    auto& data = ctx->saved_data;
    const size_t n = data["weights"].toInt();
    const size_t n_biases = data["biases"].toInt();
    const variable_list saved = ctx->get_saved_variables();
    const variable_list weights(saved.begin(), saved.begin() + n);
    std::optional<at::Tensor> x;
    if (saved.size() > n) {
      x = saved[n];
    }
    std::vector<int64_t> wanted(1 + 2 * n);
    for (size_t i = 0; i < 1 + n + n_biases; ++i) {
      wanted[i] = ctx->needs_input_grad(i);
    }
    const variable_list found = project_to_heads_backward(
        buffers, x, weights, data["num_heads"].toSymIntVector(), data["batch"].toSymInt(),
        data["seq_lens"].toSymIntVector(), wanted, data["rank"].toInt(),
        data["group_name"].toStringRef());
    variable_list gradients(1 + n + n_biases + 6);
    size_t next = 0;
    for (size_t i = 0; i < 1 + n + n_biases; ++i) {
      if (wanted[i]) {
        gradients[i] = found[next++];
      }
    }
    return gradients;
  }
};

struct HeadsToOutputWait : Function<HeadsToOutputWait> {
  static Variable forward(
      AutogradContext* ctx,
      at::TensorList buffers,
      const at::Tensor& weight,
      const std::optional<at::Tensor>& bias,
      const c10::SymInt& num_heads,
      const c10::SymInt& batch,
      c10::SymIntArrayRef seq_lens,
      int64_t rank,
      std::string_view group_name) {
    variable_list saved{weight};
    if (weight.requires_grad()) {
      saved.insert(saved.end(), buffers.begin(), buffers.end());
    }
    ctx->save_for_backward(saved);
    auto& data = ctx->saved_data;
    data["chunks"] = static_cast<int64_t>(buffers.size());
    data["bias"] = bias.has_value();
    data["num_heads"] = num_heads;
    data["seq_lens"] = seq_lens;
    data["rank"] = rank;
    data["group_name"] = std::string(group_name);
    at::AutoDispatchBelowADInplaceOrView guard;
    return heads_to_output_wait(
        buffers, weight, bias, num_heads, batch, seq_lens, rank, group_name);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const NoAutocast guard;
    auto& data = ctx->saved_data;
    const at::Tensor& grad = grads[0];
    const size_t chunks = data["chunks"].toInt();
    const bool has_bias = data["bias"].toBool();
    const c10::SymInt num_heads = data["num_heads"].toSymInt();
    const auto seq_lens = data["seq_lens"].toSymIntVector();
    const int64_t rank = data["rank"].toInt();
    const std::string& group_name = data["group_name"].toStringRef();
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& weight = saved[0];
    variable_list gradients(chunks + 2 + 5);
    bool some_chunk = false;
    for (size_t chunk = 0; chunk < chunks; ++chunk) {
      some_chunk = some_chunk || ctx->needs_input_grad(chunk);
    }
    if (some_chunk) {
      const at::Tensor by_head = weight.t();
      // The last chunk first: autograd asks for it first.
      const variable_list buffers = project_to_heads_start(
          grad, by_head, {}, num_heads, seq_lens, static_cast<int64_t>(chunks), true, rank,
          group_name);
      std::copy(buffers.begin(), buffers.end(), gradients.begin());
    }
    // While that travels.
    if (ctx->needs_input_grad(chunks)) {
      const variable_list arrived(saved.begin() + 1, saved.end());
      gradients[chunks] = heads_to_output_weight_grad(
          grad, arrived, num_heads, weight.sym_size(1) / num_heads, seq_lens, rank, group_name);
    }
    if (has_bias && ctx->needs_input_grad(chunks + 1)) {
      gradients[chunks + 1] = grad.sum(at::IntArrayRef{0, 1});
    }
    return gradients;
  }
};

// ------------------------------------------------------------------- as kernels

std::vector<at::Tensor> project_to_heads_start_autograd(
    const at::Tensor& x,
    at::TensorList weights,
    at::TensorList biases,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t chunks,
    bool last_first,
    int64_t rank,
    std::string_view group_name) {
  return ProjectToHeadsStart::apply(
      x, weights, biases, num_heads, seq_lens, chunks, last_first, rank, group_name);
}

at::Tensor heads_to_output_wait_autograd(
    at::TensorList buffers,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::SymInt num_heads,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name) {
  return HeadsToOutputWait::apply(
      buffers, weight, bias, num_heads, batch, seq_lens, rank, group_name);
}

// One weight for all projections, or one for each.
std::vector<at::Tensor> split_fused(
    at::TensorList fused, c10::SymIntArrayRef num_heads, const char* name) {
  if (fused.size() != 1 || num_heads.size() == 1) {
    return fused.vec();
  }
  c10::SymInt heads = 0;
  for (const c10::SymInt& count : num_heads) {
    heads = heads + count;
  }
  const c10::SymInt rows = fused[0].dim() > 0 ? fused[0].sym_size(0) : c10::SymInt(0);
  TORCH_CHECK_VALUE(
      heads > 0 && rows % heads == 0, name, "[0] has ", rows, " rows, which its ", heads,
      " heads don't divide; pass one for each projection if head dimensions differ");
  std::vector<c10::SymInt> sizes;
  for (const c10::SymInt& count : num_heads) {
    sizes.push_back(rows / heads * count);
  }
  return fused[0].split_with_sizes_symint(sizes, 0);
}

std::vector<at::Tensor> project_to_heads(
    const at::Tensor& x,
    at::TensorList weights,
    at::TensorList biases,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name) {
  const variable_list each = split_fused(weights, num_heads, "weights");
  const variable_list each_bias = split_fused(biases, num_heads, "biases");
  const variable_list buffers =
      project_to_heads_start(x, each, each_bias, num_heads, seq_lens, 1, false, rank, group_name);
  std::vector<c10::SymInt> head_dims;  // the start has checked them
  for (size_t i = 0; i < each.size(); ++i) {
    head_dims.push_back(each[i].sym_size(0) / num_heads[i]);
  }
  return seq_to_heads_wait(
      buffers[0], num_heads, head_dims, x.sym_size(0), seq_lens, 0, 1, rank, group_name);
}

at::Tensor heads_to_output(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::SymInt num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name) {
  const at::Tensor buffer = heads_to_seq_start(input, num_heads, seq_lens, 0, 1, rank, group_name);
  return heads_to_output_wait(
      buffer, weight, bias, num_heads, input.sym_size(0), seq_lens, rank, group_name);
}

// Under autocast linear layers compute in the lower precision, and so much travels.
template <c10::DeviceType device>
struct Autocast {
  c10::impl::ExcludeDispatchKeyGuard guard{
      c10::DispatchKeySet(at::autocast::get_autocast_dispatch_key_from_device_type(device))};

  std::vector<at::Tensor> cast(at::TensorList tensors, at::ScalarType dtype) const {
    std::vector<at::Tensor> result;
    for (const at::Tensor& t : tensors) {
      result.push_back(at::autocast::cached_cast(dtype, t, device));
    }
    return result;
  }
};

template <c10::DeviceType device>
std::vector<at::Tensor> project_to_heads_autocast(
    const at::Tensor& x,
    at::TensorList weights,
    at::TensorList biases,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t chunks,
    bool last_first,
    int64_t rank,
    std::string_view group_name) {
  const Autocast<device> autocast;
  const auto dtype = at::autocast::get_autocast_dtype(device);
  return project_to_heads_start(
      autocast.cast(x, dtype)[0], autocast.cast(weights, dtype), autocast.cast(biases, dtype),
      num_heads, seq_lens, chunks, last_first, rank, group_name);
}

// What is on its way can't be cast any more: the weight follows it.
template <c10::DeviceType device>
at::Tensor heads_to_output_wait_autocast(
    at::TensorList buffers,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::SymInt num_heads,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name) {
  TORCH_CHECK_VALUE(!buffers.empty(), "buffers is empty; one for each chunk is right");
  const Autocast<device> autocast;
  const auto dtype = buffers[0].scalar_type();
  std::optional<at::Tensor> cast_bias;
  if (bias.has_value()) {
    cast_bias = autocast.cast(*bias, dtype)[0];
  }
  return heads_to_output_wait(
      buffers, autocast.cast(weight, dtype)[0], cast_bias, std::move(num_heads), std::move(batch),
      seq_lens, rank, group_name);
}

template <c10::DeviceType device>
at::Tensor heads_to_output_autocast(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::SymInt num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name) {
  const auto dtype = at::autocast::get_autocast_dtype(device);
  const at::Tensor cast = at::autocast::cached_cast(dtype, input, device);
  return heads_to_output(cast, weight, bias, std::move(num_heads), seq_lens, rank, group_name);
}

template <c10::DeviceType device>
void register_autocast(torch::Library& m) {
  m.impl("project_to_heads_start", project_to_heads_autocast<device>);
  m.impl("heads_to_output", heads_to_output_autocast<device>);
  m.impl("heads_to_output_wait", heads_to_output_wait_autocast<device>);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  m.impl("project_to_heads", project_to_heads);
  m.impl("heads_to_output", heads_to_output);
}

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  m.impl("project_to_heads_start", project_to_heads_start_autograd);
  m.impl("heads_to_output_wait", heads_to_output_wait_autograd);
  // No second derivative: it raises.
  m.impl("project_to_heads_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("heads_to_output_weight_grad", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(deepsp, AutocastCPU, m) {
  register_autocast<at::kCPU>(m);
}

TORCH_LIBRARY_IMPL(deepsp, AutocastCUDA, m) {
  register_autocast<at::kCUDA>(m);
}

}  // namespace deepsp
