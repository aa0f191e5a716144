// The exchange's kernels, the same for CPU and CUDA.

#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/library.h>

#include "checks.h"
#include "transport.h"

namespace deepsp {
namespace {

// A buffer for an exchange, of the size that both directions have.
at::Tensor buffer_for(const SymBlockLayout& shapes, int64_t chunk, const at::Tensor& like) {
  const int64_t elements = buffer_elements(shapes, chunk).expect_int();
  const at::Tensor buffer = empty_buffer({elements}, like);
  if (torch::autograd::AnomalyMode::is_enabled()) {
    buffer.zero_();  // it may be larger than what arrives
  }
  return buffer;
}

// Anomaly mode looks for NaN in every gradient, in buffers on their way too: for
// it, an exchange arrives before its start returns.
void settle_if_watched(const at::Tensor& buffer, const Layout& layout, int64_t chunk) {
  if (torch::autograd::AnomalyMode::is_enabled()) {
    settle(buffer, layout, chunk);
  }
}

// Null where there is nobody to talk to.
std::unique_ptr<Group> group_of(
    std::string_view name, const Layout& layout, const at::Tensor& like) {
  auto group =
      std::make_unique<Group>(resolve_group(name, layout.rank, layout.parts(), like.device()));
  return layout.parts() == 1 ? nullptr : std::move(group);
}

std::vector<at::Tensor> heads_to_seq_kernel(
    at::TensorList inputs,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name) {
  const Layout layout = concrete(check_by_heads(inputs, num_heads, seq_lens, 0, 1, 1, rank));
  const auto group = group_of(group_name, layout, inputs[0]);
  const at::Tensor buffer = empty_buffer({layout.elements_by_tokens(0)}, inputs[0]);
  if (group == nullptr && buffer.is_cpu()) {
    // Straight from the inputs to the outputs.
    auto flight = std::make_unique<Flight>();
    flight->own = inputs.vec();
    launch_into(buffer, std::move(flight));
  } else {
    launch_to_seq(inputs, layout, 0, group.get(), buffer);
  }
  return merge_by_tokens({buffer}, layout);
}

std::vector<at::Tensor> seq_to_heads_start_kernel(
    at::TensorList inputs,
    c10::SymIntArrayRef seq_lens,
    int64_t chunks,
    int64_t unit,
    int64_t rank,
    std::string_view group_name) {
  const SymBlockLayout shapes = check_by_tokens(inputs, seq_lens, chunks, unit, rank);
  const Layout layout = concrete(shapes);
  const auto group = group_of(group_name, layout, inputs[0]);
  std::vector<at::Tensor> buffers;
  for (int64_t chunk = 0; chunk < layout.heads.chunks(); ++chunk) {
    buffers.push_back(buffer_for(shapes, chunk, inputs[0]));
    launch_to_heads(inputs, layout, chunk, group.get(), buffers.back());
    settle_if_watched(buffers.back(), layout, chunk);
  }
  return buffers;
}

std::vector<at::Tensor> seq_to_heads_wait_kernel(
    const at::Tensor& buffer,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t unit,
    int64_t rank,
    std::string_view /*group_name*/) {
  const Layout layout = concrete(
      check_wait(buffer, num_heads, head_dims, batch, seq_lens, chunk, chunks, unit, rank));
  if (auto flight = flight_into(buffer)) {
    flight->wait_all();
    mark_landed(buffer);
  }
  return views_by_heads(buffer, layout, chunk);
}

at::Tensor heads_to_seq_start_kernel(
    at::TensorList inputs,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t unit,
    int64_t rank,
    std::string_view group_name) {
  const SymBlockLayout shapes =
      check_by_heads(inputs, num_heads, seq_lens, chunk, chunks, unit, rank);
  const Layout layout = concrete(shapes);
  const auto group = group_of(group_name, layout, inputs[0]);
  const at::Tensor buffer = buffer_for(shapes, chunk, inputs[0]);
  launch_to_seq(inputs, layout, chunk, group.get(), buffer);
  settle_if_watched(buffer, layout, chunk);
  return buffer;
}

std::vector<at::Tensor> heads_to_seq_wait_kernel(
    at::TensorList buffers,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    int64_t unit,
    int64_t rank,
    std::string_view /*group_name*/) {
  const Layout layout = concrete(check_wait(
      buffers, num_heads, head_dims, batch, seq_lens, 0, static_cast<int64_t>(buffers.size()), unit,
      rank));
  std::vector<at::Tensor> dense;
  for (const at::Tensor& buffer : buffers) {
    dense.push_back(buffer.contiguous());  // itself, but for one that never travelled
  }
  return merge_by_tokens(dense, layout);
}

void register_kernels(torch::Library& m) {
  m.impl("heads_to_seq", heads_to_seq_kernel);
  m.impl("seq_to_heads_start", seq_to_heads_start_kernel);
  m.impl("seq_to_heads_wait", seq_to_heads_wait_kernel);
  m.impl("heads_to_seq_start", heads_to_seq_start_kernel);
  m.impl("heads_to_seq_wait", heads_to_seq_wait_kernel);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CPU, m) {
  register_kernels(m);
}

#ifdef DEEPSP_CUDA
TORCH_LIBRARY_IMPL(deepsp, CUDA, m) {
  register_kernels(m);
}
#endif

}  // namespace deepsp
