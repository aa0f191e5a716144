// Gathering in float8: one scale a tensor, from the largest magnitude on any rank.

#include "ops.h"
#include "transport.h"

#include <ATen/ops/abs.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <limits>

namespace deepsp {
namespace {

double largest(at::ScalarType dtype) {
  return dtype == at::kFloat8_e4m3fn ? std::numeric_limits<c10::Float8_e4m3fn>::max()
                                     : std::numeric_limits<c10::Float8_e5m2>::max();
}

// What to multiply each tensor with, so that the largest of all ranks' magnitudes becomes
// the largest float8: one small all-reduce for all tensors. NaN counts as infinite, and
// makes everything NaN: a maximum over ranks might lose it.
at::Tensor scales_of(at::TensorList shards, at::ScalarType dtype, const Group& group) {
  std::vector<at::Tensor> magnitudes;
  for (const at::Tensor& shard : shards) {
    magnitudes.push_back(
        shard.numel() == 0 ? at::zeros({}, shard.options().dtype(at::kFloat))
                           : shard.abs().max().to(at::kFloat));
  }
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const at::Tensor amax = at::stack(magnitudes).nan_to_num(kInfinity, kInfinity);
  if (group.size > 1) {
    wait_for(group, all_reduce_max(group, amax));
  }
  const at::Tensor scales =
      at::mul(amax.reciprocal(), largest(dtype)).clamp_max(std::numeric_limits<float>::max());
  return at::where(amax > 0, scales, at::ones_like(scales));
}

std::tuple<std::vector<at::Tensor>, at::Tensor> float8_kernel(
    at::TensorList shards,
    c10::SymIntArrayRef sizes,
    at::ScalarType dtype,
    int64_t rank,
    std::string_view group_name) {
  const auto layout = concrete(check_float8(shards, sizes, dtype, rank));
  const c10::Device device = shards[0].device();
  const Group group = group_of("gather_cast_float8", group_name, layout, device);
  const std::vector<at::ScalarType> dtypes(shards.size(), dtype);
  check_ranks_agree(group, "shard", shards, layout, dtypes);
  const Plan plan = plan_of(layout, group, device);
  const at::Tensor scales = scales_of(shards, dtype, group);
  const at::Tensor buffer = buffer_for(layout, dtype, shards[0].options());
  launch_gather(
      [&](const std::vector<Piece>& pieces) {
        for (const auto& [i, to] : pieces) {
          const at::Tensor scaled = at::mul(shards[i].to(at::kFloat), scales.select(0, i));
          at::from_blob(to, shards[i].sizes(), shards[i].options().dtype(dtype))
              .copy_(scaled.clamp(-largest(dtype), largest(dtype)));
        }
      },
      plan, group, buffer);
  land(buffer);
  std::vector<std::vector<int64_t>> shapes;
  for (size_t i = 0; i < shards.size(); ++i) {
    shapes.push_back(shards[i].sizes().vec());
    shapes.back()[0] = layout.row(i, layout.parts());
  }
  // Several views of one buffer would be outputs that alias.
  const bool fresh = shards.size() > 1;
  return {land_gather(buffer, plan, shapes, dtypes, fresh), scales.reciprocal()};
}

std::vector<at::Tensor> through_float8(
    at::TensorList shards,
    c10::SymIntArrayRef sizes,
    at::ScalarType float8_dtype,
    at::ScalarType dtype,
    int64_t rank,
    std::string_view group_name,
    std::optional<at::ScalarType> reduce_dtype) {
  check_float(dtype, "dtype");
  if (reduce_dtype) {
    check_float(*reduce_dtype, "reduce_dtype");
  }
  const auto [data, inv_scales] =
      gather_cast_float8_coalesced(shards, sizes, float8_dtype, rank, group_name);
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < data.size(); ++i) {
    const at::Tensor wide = data[i].to(at::kFloat).mul_(inv_scales.select(0, i));
    results.push_back(dtype == at::kFloat ? wide : wide.to(dtype));
  }
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeExplicitAutograd, m) {
  m.impl("gather_through_float8", through_float8);
}

TORCH_LIBRARY_IMPL(deepsp, CPU, m) {
  m.impl("gather_cast_float8_coalesced", float8_kernel);
}

// Tensors that the kernel refuses, in words.
TORCH_LIBRARY_IMPL(deepsp, QuantizedCPU, m) {
  m.impl("gather_cast_float8_coalesced", float8_kernel);
}
TORCH_LIBRARY_IMPL(deepsp, SparseCPU, m) {
  m.impl("gather_cast_float8_coalesced", float8_kernel);
}
TORCH_LIBRARY_IMPL(deepsp, SparseCsrCPU, m) {
  m.impl("gather_cast_float8_coalesced", float8_kernel);
}

#ifdef DEEPSP_CUDA
TORCH_LIBRARY_IMPL(deepsp, CUDA, m) {
  m.impl("gather_cast_float8_coalesced", float8_kernel);
}
#endif

}  // namespace deepsp
