// The kernels of gather_cast and reduce_scatter_cast, the same for CPU and CUDA.

#include "../symints.h"
#include "ops.h"
#include "transport.h"

#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>
#include <torch/library.h>

namespace deepsp {
namespace {

void cast(at::TensorList shards, Dtypes dtypes, const std::vector<Piece>& pieces) {
#ifdef DEEPSP_CUDA
  if (shards[0].is_cuda()) {
    std::vector<Cast> casts;
    std::vector<at::Tensor> alive;  // what isn't contiguous is copied once more
    for (const auto& [i, to] : pieces) {
      alive.push_back(shards[i].contiguous());
      casts.push_back(
          {data_of(alive.back()), to, shards[i].numel(), float_type(shards[i].scalar_type()),
           float_type(dtypes[i])});
    }
    return run(casts, shards[0].device());
  }
#endif
  for (const auto& [i, to] : pieces) {
    at::from_blob(to, shards[i].sizes(), shards[i].options().dtype(dtypes[i])).copy_(shards[i]);
  }
}

at::Tensor gather_start(
    at::TensorList shards,
    c10::SymIntArrayRef sizes,
    Dtypes dtypes,
    int64_t rank,
    std::string_view group_name,
    std::optional<at::ScalarType> reduce_dtype) {
  const auto layout = concrete(check_shards(shards, sizes, dtypes, rank));
  if (reduce_dtype) {
    check_float(*reduce_dtype, "reduce_dtype");
  }
  const c10::Device device = shards[0].device();
  const Group group = group_of("gather_cast", group_name, layout, device);
  check_ranks_agree(group, "shard", shards, layout, dtypes);
  const at::Tensor buffer = buffer_for(layout, buffer_dtype(dtypes), shards[0].options());
  launch_gather(
      [&](const std::vector<Piece>& pieces) { cast(shards, dtypes, pieces); },
      plan_of(layout, group, device), group, buffer);
  return buffer;
}

std::vector<at::Tensor> gather_wait(
    const at::Tensor& buffer,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef row_shapes,
    at::IntArrayRef row_dims,
    Dtypes dtypes,
    int64_t rank,
    std::string_view group_name) {
  const auto layout = concrete(check_wait(buffer, sizes, row_shapes, row_dims, dtypes, rank));
  const Group group = group_of("gather_cast", group_name, layout, buffer.device());
  std::vector<std::vector<int64_t>> shapes;
  for (size_t i = 0; i < layout.tensors(); ++i) {
    shapes.push_back(ints(shape_of(layout.row(i, layout.parts()), row_shapes, row_dims, i)));
  }
  land(buffer);
  const Plan plan = plan_of(layout, group, buffer.device());
  return land_gather(buffer, plan, shapes, dtypes, /*fresh=*/false);
}

at::Tensor scatter_start(
    at::TensorList inputs, c10::SymIntArrayRef sizes, int64_t rank, std::string_view group_name) {
  const auto layout = concrete(check_whole(inputs, sizes, rank));
  const std::vector<at::ScalarType> dtypes = dtypes_of(inputs);
  const c10::Device device = inputs[0].device();
  const Group group = group_of("reduce_scatter_cast", group_name, layout, device);
  check_ranks_agree(group, "input", inputs, layout, dtypes);
  const at::Tensor buffer = buffer_for(layout, buffer_dtype(dtypes), inputs[0].options());
  std::vector<at::Tensor> whole;
  for (const at::Tensor& x : inputs) {
    whole.push_back(x.contiguous());
  }
  launch_scatter(whole, plan_of(layout, group, device), group, buffer);
  return buffer;
}

std::vector<at::Tensor> scatter_wait(
    const at::Tensor& buffer,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef row_shapes,
    at::IntArrayRef row_dims,
    Dtypes wire_dtypes,
    Dtypes dtypes,
    std::optional<at::ScalarType> reduce_dtype,
    int64_t rank,
    std::string_view group_name) {
  const auto layout = concrete(check_wait(buffer, sizes, row_shapes, row_dims, wire_dtypes, rank));
  check_results(dtypes, reduce_dtype, layout.tensors());
  const Group group = group_of("reduce_scatter_cast", group_name, layout, buffer.device());
  const Plan plan = plan_of(layout, group, buffer.device());
  const auto flight = land(buffer);
  const bool own_apart = flight && !flight->own.empty();
  RECORD_FUNCTION("deepsp::sum", {});
  std::vector<at::Tensor> results;
  std::vector<StridedSum> sums;
  for (size_t i = 0; i < layout.tensors(); ++i) {
    results.push_back(empty_result(
        ints(shape_of(layout.sizes[i][rank], row_shapes, row_dims, i)),
        buffer.options().dtype(dtypes[i])));
    const Float wire = float_type(wire_dtypes[i]);
    StridedSum sum{
        wire,
        float_type(dtypes[i]),
        reduce_dtype ? float_type(*reduce_dtype) : wide(wire),
        data_of(results[i]),
        {},
        {},
        {}};
    for (int64_t p = 0; p < layout.parts(); ++p) {
      const char* from = p == rank && own_apart
                             ? data_of(flight->own[i]) + layout.row(i, p) * layout.row_bytes[i]
                             : data_of(buffer) + plan.scattered(i, p);
      sum.sources.push_back({from, {}});
    }
    const std::vector<int64_t> rows(layout.parts(), results[i].numel());
    add_sum(std::move(sum), 1, results[i].numel(), rows, sums);
  }
  run(sums, buffer.device());
  return results;
}

void register_kernels(torch::Library& m) {
  m.impl("gather_cast_coalesced_start", gather_start);
  m.impl("gather_cast_coalesced_wait", gather_wait);
  m.impl("reduce_scatter_cast_coalesced_start", scatter_start);
  m.impl("reduce_scatter_cast_coalesced_wait", scatter_wait);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CPU, m) {
  register_kernels(m);
}

// Tensors that the kernels refuse, in words.
TORCH_LIBRARY_IMPL(deepsp, QuantizedCPU, m) {
  register_kernels(m);
}
TORCH_LIBRARY_IMPL(deepsp, SparseCPU, m) {
  register_kernels(m);
}
TORCH_LIBRARY_IMPL(deepsp, SparseCsrCPU, m) {
  register_kernels(m);
}

#ifdef DEEPSP_CUDA
TORCH_LIBRARY_IMPL(deepsp, CUDA, m) {
  register_kernels(m);
}
#endif

}  // namespace deepsp
