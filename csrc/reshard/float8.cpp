// Gathering in float8: one scale a tensor, from the largest magnitude on any rank.

#include "../common/checks.h"
#include "../transport/agreement.h"
#include "engine.h"

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

c10::IValue gather_cast_float8_coalesced(const Given& given) {
  const at::TensorList shards = given["shards"];
  const at::ScalarType dtype = *OptionalDtype(given["dtype"]);
  const SymShards layout = check_float8(shards, given["sizes"], dtype, given["rank"]);
  const std::vector<at::ScalarType> dtypes(shards.size(), dtype);
  const RowShapes rows(shards);
  const std::vector<SymInts> shapes = shapes_of(layout, rows.shapes, rows.dims);
  const at::TensorOptions options = shards[0].options();
  if (shards[0].is_meta()) {
    Tensors data;
    for (const SymInts& shape : shapes) {
      data.push_back(at::empty_symint(shape, options.dtype(dtype)));
    }
    const int64_t count = static_cast<int64_t>(data.size());
    return std::make_tuple(data, at::empty({count}, options.dtype(at::kFloat)));
  }
  const Reshard reshard =
      reshard_lists("gather_cast_float8", "shards", shards, layout, dtypes, given);
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
  return std::make_tuple(
      reshard.finish_gather(buffer, concrete(shapes), dtypes, fresh), scales.reciprocal());
}

// Calls it: the data of each tensor, and the inverses of their scales.
std::pair<Tensors, at::Tensor> gathered(const Given& given, at::ArrayRef<With> values) {
  Tensors data = Op("_gather_cast_float8_coalesced")(given, values);
  const at::Tensor inv_scales = data.back();
  data.pop_back();
  return {std::move(data), inv_scales};
}

c10::IValue gather_cast_float8(const Given& given) {
  const auto [data, inv_scales] = gathered(given, {{"shards", Tensors{given["shard"]}}});
  return Tensors{data[0], inv_scales.select(0, 0)};
}

c10::IValue gather_through_float8(const Given& given) {
  const at::ScalarType dtype = *OptionalDtype(given["dtype"]);
  check_float(dtype, "dtype");
  check_reduce_dtype(given["reduce_dtype"]);
  const auto [data, inv_scales] = gathered(given, {{"dtype", given["float8_dtype"].value()}});
  Tensors results;
  for (size_t i = 0; i < data.size(); ++i) {
    const at::Tensor wide = data[i].to(at::kFloat).mul_(inv_scales.select(0, i));
    results.push_back(dtype == at::kFloat ? wide : wide.to(dtype));
  }
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  implement<gather_cast_float8>(m, "gather_cast_float8");
}

TORCH_LIBRARY_IMPL(deepsp, CompositeExplicitAutograd, m) {
  implement<gather_through_float8>(m, "gather_through_float8");
}

DEEPSP_KERNELS(m) {
  implement<gather_cast_float8_coalesced>(m, "_gather_cast_float8_coalesced");
}

DEEPSP_REFUSED_KINDS(m) {
  implement<gather_cast_float8_coalesced>(m, "_gather_cast_float8_coalesced");
}

}  // namespace deepsp
