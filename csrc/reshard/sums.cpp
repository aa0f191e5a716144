#include "sums.h"

#include "../common/checks.h"
#include "../transport/agreement.h"
#include "../transport/launch.h"
#include "mapped_sum.h"
#include "ops.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

namespace deepsp {
namespace {

void check_call(std::string_view grad, int64_t rank, int64_t size, OptionalDtype reduce_dtype) {
  is_partial(grad);
  check_rank(rank, size);
  check_reduce_dtype(reduce_dtype);
}

}  // namespace

c10::SymInt check_sum(
    at::TensorList inputs,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    OptionalDtype reduce_dtype) {
  check_call(grad, rank, size, reduce_dtype);
  TORCH_CHECK_VALUE(
      !inputs.empty(), "expected inputs to have at least one tensor, got an empty list");
  c10::SymInt elements = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const std::string name = "inputs[" + std::to_string(i) + "]";
    check_dense(inputs[i], name);
    check_like(inputs[i], name, inputs[0], "inputs[0]");
    elements = elements + inputs[i].sym_numel();
  }
  return elements;
}

bool sums_on_arrival(at::ScalarType dtype, OptionalDtype reduce_dtype) {
  return (dtype == at::kBFloat16 || dtype == at::kHalf) &&
         reduce_dtype.value_or(at::kFloat) != dtype;
}

namespace {

c10::SymInt largest_part(const c10::SymInt& elements, int64_t size) {
  constexpr int64_t kUnit = 8;  // 16-bit elements in 16 bytes
  return ((elements + (kUnit * size - 1)) / (kUnit * size) * kUnit).min(elements);
}

}  // namespace

SymInts sum_parts(const c10::SymInt& elements, int64_t size) {
  const c10::SymInt part = largest_part(elements, size);
  SymInts parts;
  for (int64_t p = 0; p < size; ++p) {
    parts.push_back((elements - part * p).max(0).min(part));
  }
  return parts;
}

SymInts sum_buffer_shape(
    const c10::SymInt& elements, int64_t size, at::ScalarType dtype, OptionalDtype reduce_dtype) {
  if (!sums_on_arrival(dtype, reduce_dtype)) {
    return {elements};
  }
  return {size, largest_part(elements, size)};
}

SumShapes check_sum_wait(
    const at::Tensor& buffer,
    c10::SymIntArrayRef shapes,
    at::IntArrayRef dims,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    OptionalDtype reduce_dtype) {
  check_call(grad, rank, size, reduce_dtype);
  SumShapes result;
  size_t at = 0;
  for (const int64_t dim : dims) {
    TORCH_CHECK_VALUE(
        dim >= 0 && at + dim <= shapes.size(),
        "expected dims to be each tensor's number of "
        "dimensions, which add up to the ",
        shapes.size(), " entries of shapes, got ", dims);
    result.of.emplace_back(shapes.begin() + at, shapes.begin() + at + dim);
    at += dim;
    result.elements = result.elements + product(result.of.back());
  }
  const auto shape = sum_buffer_shape(result.elements, size, buffer.scalar_type(), reduce_dtype);
  TORCH_CHECK_VALUE(
      at == shapes.size(), "expected dims to add up to the ", shapes.size(),
      " entries of shapes, got ", dims);
  TORCH_CHECK_VALUE(
      buffer.sym_sizes() == c10::SymIntArrayRef(shape), "expected the buffer of the ",
      result.elements, " elements in shapes to have shape ", c10::SymIntArrayRef(shape), ", got ",
      buffer.sym_sizes(), "; pass what the start returned, with the shapes given to it");
  return result;
}

Tensors views_of(const at::Tensor& flat, const std::vector<SymInts>& shapes) {
  Tensors views;
  c10::SymInt begin = 0;
  for (const auto& shape : shapes) {
    const c10::SymInt numel = product(shape);
    views.push_back(flat.narrow_symint(0, begin, numel).view_symint(shape));
    begin = begin + numel;
  }
  return views;
}

namespace {

at::Tensor all_reduce_start_kernel(
    at::TensorList inputs,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    std::string_view group_name,
    OptionalDtype reduce_dtype) {
  const c10::SymInt counted = check_sum(inputs, grad, rank, size, reduce_dtype);
  if (inputs[0].is_meta()) {
    return at::empty_symint(
        sum_buffer_shape(counted, size, inputs[0].scalar_type(), reduce_dtype),
        inputs[0].options());
  }
  const int64_t elements = counted.expect_int();
  const Group group = agreed_group(
      "all_reduce", group_name, rank, size, inputs[0].device(), /*sizes=*/nullptr,
      [&]() -> std::vector<std::string> {
        return {said("inputs of ", elements, " elements, ", inputs[0].scalar_type())};
      });
  at::Tensor flat = empty_buffer({elements}, inputs[0]);
  made_here(flat);
  Tensors parts;
  for (const at::Tensor& input : inputs) {
    parts.push_back(input.reshape({-1}));
  }
  at::cat_out(flat, parts);
  if (sums_on_arrival(flat.scalar_type(), reduce_dtype)) {
    return reduce_scatter_start(flat, 0, sum_parts(elements, size), rank, group_name);
  }
  if (group.alone || elements == 0) {
    return flat;
  }
  if (sums_by_memory(group, flat.device(), flat.scalar_type())) {
    auto flight = launch_mapped_sum(group, flat);
    launch_into(flat, std::move(flight));
  } else {
    launch_into(group, flat, launch_sum(group, lent(flat)), flat);
  }
  return flat;
}

Tensors all_reduce_wait_kernel(
    const at::Tensor& buffer,
    c10::SymIntArrayRef shapes,
    at::IntArrayRef dims,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    std::string_view group_name,
    OptionalDtype reduce_dtype) {
  const SumShapes sums = check_sum_wait(buffer, shapes, dims, grad, rank, size, reduce_dtype);
  const bool on_arrival = sums_on_arrival(buffer.scalar_type(), reduce_dtype);
  if (buffer.is_meta()) {
    return views_of(
        on_arrival ? at::empty_symint({sums.elements}, buffer.options()) : buffer, sums.of);
  }
  if (!on_arrival) {
    auto flight = flight_into(buffer);
    at::Tensor sum = buffer;
    if (flight && flight->mapped) {
      const Group group = resolve_group("all_reduce", group_name, rank, size, buffer.device());
      sum = land_mapped_sum(group, buffer, *flight);
    } else if (flight) {
      flight->wait_all();
    }
    if (flight) {
      mark_landed(buffer, *flight);
    }
    return views_of(sum, sums.of);
  }
  const auto parts = sum_parts(sums.elements, size);
  const SymInts full{sums.elements};
  const at::Tensor mine =
      reduce_scatter_wait(buffer, 0, parts, full, rank, group_name, reduce_dtype);
  return views_of(
      all_gather_wait(
          all_gather_start(mine, 0, parts, "replicated", rank, group_name, {}), 0, parts, full,
          "replicated", rank, group_name)[0],
      sums.of);
}

// Gradients travel in flat buckets of about this size, each in flight while the
// next is filled.
constexpr int64_t kBucketBytes = int64_t(25) << 20;

struct Bucket {
  Tensors gradients;
  int64_t bytes = 0;
  at::Tensor flat;
  std::unique_ptr<Flight> flight;  // by memory
  Work work;                       // or by the backend

  bool takes(const at::Tensor& gradient) const {
    return bytes < kBucketBytes && gradients[0].scalar_type() == gradient.scalar_type() &&
           gradients[0].device() == gradient.device();
  }

  void add(const at::Tensor& gradient) {
    gradients.push_back(gradient);
    bytes += static_cast<int64_t>(gradient.nbytes());
  }
};

void sum_gradients_kernel(
    at::TensorList gradients, int64_t rank, int64_t size, std::string_view group_name) {
  if (gradients.empty() || gradients[0].is_meta()) {
    return;
  }
  std::vector<Bucket> buckets;
  for (const at::Tensor& gradient : gradients) {
    TORCH_CHECK_VALUE(
        gradient.layout() == at::kStrided, "expected gradients to be dense tensors, got layout ",
        gradient.layout());
    if (buckets.empty() || !buckets.back().takes(gradient)) {
      buckets.emplace_back();
    }
    buckets.back().add(gradient);
  }
  const Group group =
      agreed_group("sum_gradients_", group_name, rank, size, gradients[0].device(), nullptr, [&] {
        std::vector<std::string> arguments;
        for (size_t i = 0; i < gradients.size(); ++i) {
          arguments.push_back(said(
              "gradients[", i, "] of shape ", gradients[i].sizes(), ", ",
              gradients[i].scalar_type()));
        }
        return arguments;
      });
  if (group.alone) {
    return;
  }
  const auto finish = [&](Bucket& bucket) {
    if (bucket.flight) {
      bucket.flat = land_mapped_sum(group, bucket.flat, *bucket.flight);
    } else {
      wait_for(group, bucket.work);
    }
    int64_t offset = 0;
    for (const at::Tensor& gradient : bucket.gradients) {
      gradient.copy_(bucket.flat.narrow(0, offset, gradient.numel()).view(gradient.sizes()));
      offset += gradient.numel();
    }
    bucket = {};
  };
  // Two are in flight: all at once would be the gradients once more.
  for (size_t n = 0; n < buckets.size(); ++n) {
    Tensors flat;
    for (const at::Tensor& gradient : buckets[n].gradients) {
      flat.push_back(gradient.reshape({-1}));
    }
    Bucket& bucket = buckets[n];
    bucket.flat = at::cat(flat);
    const bool by_memory = sums_by_memory(group, bucket.flat.device(), bucket.flat.scalar_type()) &&
                           bucket.flat.numel() > 0;
    if (by_memory) {
      bucket.flight = launch_mapped_sum(group, bucket.flat);
    } else {
      bucket.work = launch_sum(group, bucket.flat);
    }
    if (n > 0) {
      finish(buckets[n - 1]);
    }
  }
  finish(buckets.back());
}

at::Tensor all_reduce_kernel(
    const at::Tensor& input,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    std::string_view group_name,
    OptionalDtype reduce_dtype) {
  if (input.is_meta()) {
    check_sum({input}, grad, rank, size, reduce_dtype);
    return at::empty_symint(input.sym_sizes(), input.options());
  }
  return all_reduce_wait(
      all_reduce_start({input}, grad, rank, size, group_name, reduce_dtype), input.sym_sizes(),
      {input.dim()}, grad, rank, size, group_name, reduce_dtype)[0];
}

}  // namespace

DEEPSP_KERNELS(m) {
  m.impl("all_reduce", all_reduce_kernel);
  m.impl("all_reduce_start", all_reduce_start_kernel);
  m.impl("all_reduce_wait", all_reduce_wait_kernel);
  m.impl("sum_gradients_", sum_gradients_kernel);
}

TORCH_LIBRARY_IMPL(deepsp_inductor, CompositeImplicitAutograd, m) {
  m.impl("all_reduce", all_reduce_kernel);
}

TORCH_LIBRARY_IMPL(deepsp, Functionalize, m) {
  cuts_alias(m, "all_reduce_wait");
}

}  // namespace deepsp
