// Gathering in float8: one scale a tensor, from the largest magnitude on any rank.

#include "../common/checks.h"
#include "../transport/agreement.h"
#include "engine.h"
#include "ops.h"

#include <ATen/ops/abs.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/empty.h>
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
  Tensors magnitudes;
  for (const at::Tensor& shard : shards) {
    magnitudes.push_back(
        shard.numel() == 0 ? at::zeros({}, shard.options().dtype(at::kFloat))
                           : shard.abs().max().to(at::kFloat));
  }
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const at::Tensor amax = at::stack(magnitudes).nan_to_num(kInfinity, kInfinity);
  if (!group.alone) {
    wait_for(group, launch_max(group, amax));
  }
  const at::Tensor scales =
      at::mul(amax.reciprocal(), largest(dtype)).clamp_max(std::numeric_limits<float>::max());
  return at::where(amax.gt(0), scales, at::ones_like(scales));
}

std::tuple<Tensors, at::Tensor> float8_kernel(
    at::TensorList shards,
    c10::SymIntArrayRef sizes,
    at::ScalarType dtype,
    int64_t rank,
    std::string_view group_name) {
  const SymShards layout = check_float8(shards, sizes, dtype, rank);
  const std::vector<at::ScalarType> dtypes(shards.size(), dtype);
  const RowShapes rows(shards);
  const std::vector<SymInts> shapes = shapes_of(layout, rows.shapes, rows.dims);
  const at::TensorOptions options = shards[0].options();
  if (shards[0].is_meta()) {
    Tensors data;
    for (const SymInts& shape : shapes) {
      data.push_back(at::empty_symint(shape, options.dtype(dtype)));
    }
    return {data, at::empty({static_cast<int64_t>(data.size())}, options.dtype(at::kFloat))};
  }
  const Reshard reshard =
      reshard_lists("gather_cast_float8", "shards", shards, layout, dtypes, group_name);
  const at::Tensor scales = scales_of(shards, dtype, reshard.group());
  const at::Tensor buffer = reshard.launch_gather(
      [&](const std::vector<Destination>& pieces) {
        for (const auto& [i, to] : pieces) {
          if (shards[i].numel() == 0) {
            continue;  // `to` needn't be memory of the device
          }
          const at::Tensor scaled = at::mul(shards[i].to(at::kFloat), scales.select(0, i));
          at::for_blob(to, shards[i].sizes())
              .target_device(options.device())
              .options(options.dtype(dtype))
              .make_tensor()
              .copy_(scaled.clamp(-largest(dtype), largest(dtype)));
        }
      },
      list_buffer(layout, dtypes, shards[0]));
  // Several views of one buffer would be outputs that alias.
  const bool fresh = shards.size() > 1;
  return {reshard.land_gather(buffer, concrete(shapes), dtypes, fresh), scales.reciprocal()};
}

Tensors through_float8(
    at::TensorList shards,
    c10::SymIntArrayRef sizes,
    at::ScalarType float8_dtype,
    at::ScalarType dtype,
    int64_t rank,
    std::string_view group_name,
    OptionalDtype reduce_dtype) {
  check_float(dtype, "dtype");
  check_reduce_dtype(reduce_dtype);
  const auto [data, inv_scales] =
      gather_cast_float8_coalesced(shards, sizes, float8_dtype, rank, group_name);
  Tensors results;
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

DEEPSP_KERNELS(m) {
  m.impl("gather_cast_float8_coalesced", float8_kernel);
}

DEEPSP_REFUSED_KINDS(m) {
  m.impl("gather_cast_float8_coalesced", float8_kernel);
}

}  // namespace deepsp
