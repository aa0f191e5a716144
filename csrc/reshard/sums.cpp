#include "sums.h"

#include "../op.h"
#include "../common/checks.h"
#include "../transport/agreement.h"
#include "../transport/choice.h"
#include "../transport/launch.h"
#include "engine.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

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

const Op reduce_scatter_start("reduce_scatter_start");
const Op reduce_scatter_wait("reduce_scatter_wait");
const Op all_gather("all_gather");

at::Tensor gather_sums(const SumShapes& sums, const Given& given) {
  const SymInts parts = sum_parts(sums.elements, given["size"]);
  const at::Tensor mine =
      reduce_scatter_wait(given, {{"dim", 0}, {"sizes", parts}, {"shape", SymInts{sums.elements}}});
  return all_gather(given, {{"input", mine}, {"dim", 0}, {"sizes", parts}, {"grad", "replicated"}});
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

// The tensors flattened, one after another.
at::Tensor flattened(at::TensorList tensors, int64_t elements) {
  at::Tensor flat = empty_buffer({elements}, tensors[0]);
  remember_stream(flat);
  Tensors parts;
  for (const at::Tensor& x : tensors) {
    parts.push_back(x.reshape({-1}));
  }
  at::cat_out(flat, parts);
  return flat;
}

// Whether the ranks sum parts of `flat` in rank order, since they write into each other's memory.
// The first call for a group is made by all its ranks together.
bool sums_by_parts(const Group& group, const at::Tensor& flat) {
  const at::ScalarType dtype = flat.scalar_type();
  if (!flat.is_cpu() || !at::isFloatingType(dtype) || c10::elementSize(dtype) == 1) {
    return false;
  }
  const auto mapped = mapped_of(group);
  return mapped != nullptr && mapped->reaches_all();
}

Reshard parts_of(const Group& group, const at::Tensor& flat) {
  const std::vector<int64_t> sizes = ints(sum_parts(flat.numel(), group.size));
  return Reshard({{{1, sizes, item_of(flat)}}, group.rank}, group, flat.device());
}

// Launches the sum of a flat tensor over the group: into the tensor itself or, where ranks sum
// parts, the scatter of these. The tensor must stay as it is until finish_sum.
void start_sum(const Group& group, const at::Tensor& flat) {
  if (group.alone || flat.numel() == 0) {
    return;
  }
  if (!sums_by_parts(group, flat)) {
    return attach(group, flat, launch_sum(group, unowned(flat)), flat);
  }
  const SymInts shape = {group.size, largest_part(flat.numel(), group.size)};
  // Lent: this flight is freed with the tensor, so it must not own the tensor.
  const at::Tensor slots =
      parts_of(group, flat).launch_scatter({unowned(flat)}, {shape, flat.options()});
  auto scattering = take_flight(slots);
  auto flight = std::make_unique<Flight>();
  flight->exchange = scattering->exchange;
  flight->holds.push_back(slots);
  attach(slots, std::move(scattering));
  attach(flat, std::move(flight));
}

// Waits for the sum. `group()` is called only if ranks sum parts.
template <class GroupOf>
at::Tensor finish_sum(const at::Tensor& flat, const GroupOf& group) {
  const auto flight = take_flight(flat);
  if (flight == nullptr) {
    return flat;
  }
  at::Tensor sum = flat;
  if (flight->collective == nullptr && !flight->holds.empty()) {
    const Group& of = group();
    const Reshard parts = parts_of(of, flat);
    const int64_t mine = ints(sum_parts(flat.numel(), of.size))[of.rank];
    // One exchange ends before the next begins.
    const at::Tensor& slots = flight->holds[0];
    auto scattering = take_flight(slots);
    scattering->wait_all();
    attach(slots, std::move(scattering));
    // The number of the first exchange: ranks that wait for their sums in different orders would
    // mix them up.
    const BufferShape shape{{flat.numel()}, flat.options(), /*kind=*/flight->exchange + 1};
    const at::Tensor all = parts.launch_gather(
        [&](const std::vector<Destination>& place) {
          const at::Tensor to = at::from_blob(place[0].to, {mine}, flat.options());
          parts.finish_scatter(slots, {to}, flat.scalar_type(), std::nullopt);
        },
        shape);
    sum = parts.finish_gather(all, {std::vector<int64_t>{flat.numel()}}, flat.scalar_type())[0];
  } else {
    flight->wait_all();
  }
  mark_waited(flat, *flight);
  return sum;
}

c10::IValue all_reduce_start(const Given& given) {
  const at::TensorList inputs = given["inputs"];
  const int64_t rank = given["rank"], size = given["size"];
  const std::string_view group_name = given["group_name"];
  const OptionalDtype reduce_dtype = given["reduce_dtype"];
  const c10::SymInt counted = check_sum(inputs, given["grad"], rank, size, reduce_dtype);
  if (inputs[0].is_meta()) {
    return at::empty_symint(
        sum_buffer_shape(counted, size, inputs[0].scalar_type(), reduce_dtype),
        inputs[0].options());
  }
  const int64_t elements = counted.expect_int();
  const Group group = agreed_group(
      "all_reduce", group_name, rank, size, inputs[0].device(), /*sizes=*/nullptr,
      [&]() -> std::vector<std::string> {
        return {to_text("inputs of ", elements, " elements, ", inputs[0].scalar_type())};
      });
  const at::Tensor flat = flattened(inputs, elements);
  if (sums_on_arrival(flat.scalar_type(), reduce_dtype)) {
    return reduce_scatter_start(
               given, {{"input", flat}, {"dim", 0}, {"sizes", sum_parts(elements, size)}})
        .value();
  }
  start_sum(group, flat);
  return flat;
}

c10::IValue all_reduce_wait(const Given& given) {
  const at::Tensor buffer = given["buffer"];
  const int64_t rank = given["rank"], size = given["size"];
  const std::string_view group_name = given["group_name"];
  const OptionalDtype reduce_dtype = given["reduce_dtype"];
  const SumShapes sums = check_sum_wait(
      buffer, given["shapes"], given["dims"], given["grad"], rank, size, reduce_dtype);
  const bool on_arrival = sums_on_arrival(buffer.scalar_type(), reduce_dtype);
  if (buffer.is_meta()) {
    return views_of(
        on_arrival ? at::empty_symint({sums.elements}, buffer.options()) : buffer, sums.of);
  }
  if (!on_arrival) {
    return views_of(
        finish_sum(
            buffer,
            [&] { return resolve_group("all_reduce", group_name, rank, size, buffer.device()); }),
        sums.of);
  }
  return views_of(gather_sums(sums, given), sums.of);
}

// Gradients are summed in flat buckets of about this size, each in flight while the next is filled.
constexpr int64_t kBucketBytes = int64_t(25) << 20;

struct Bucket {
  Tensors gradients;
  int64_t bytes = 0;
  int64_t elements = 0;
  at::Tensor flat;

  bool takes(const at::Tensor& gradient) const {
    return bytes < kBucketBytes && gradients[0].scalar_type() == gradient.scalar_type() &&
           gradients[0].device() == gradient.device();
  }

  void add(const at::Tensor& gradient) {
    gradients.push_back(gradient);
    bytes += static_cast<int64_t>(gradient.nbytes());
    elements += gradient.numel();
  }

  void start(const Group& group) {
    flat = flattened(gradients, elements);
    start_sum(group, flat);
  }

  void finish(const Group& group) {
    const at::Tensor sum = finish_sum(flat, [&] { return group; });
    int64_t begin = 0;
    for (const at::Tensor& gradient : gradients) {
      gradient.copy_(sum.narrow(0, begin, gradient.numel()).view(gradient.sizes()));
      begin += gradient.numel();
    }
    *this = {};
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
      agreed_group("_sum_gradients_", group_name, rank, size, gradients[0].device(), nullptr, [&] {
        std::vector<std::string> arguments;
        for (size_t i = 0; i < gradients.size(); ++i) {
          arguments.push_back(to_text(
              "gradients[", i, "] of shape ", gradients[i].sizes(), ", ",
              gradients[i].scalar_type()));
        }
        return arguments;
      });
  if (group.alone) {
    return;
  }
  // Two are in flight: all at once would hold the gradients a second time.
  for (size_t n = 0; n < buckets.size(); ++n) {
    buckets[n].start(group);
    if (n > 0) {
      buckets[n - 1].finish(group);
    }
  }
  buckets.back().finish(group);
}

c10::IValue all_reduce(const Given& given) {
  const at::Tensor input = given["input"];
  if (input.is_meta()) {
    check_sum({input}, given["grad"], given["rank"], given["size"], given["reduce_dtype"]);
    return at::empty_symint(input.sym_sizes(), input.options());
  }
  const at::Tensor buffer = Op("all_reduce_start")(given, {{"inputs", Tensors{input}}});
  const Tensors sums = Op("all_reduce_wait")(
      given, {{"buffer", buffer},
              {"shapes", input.sym_sizes()},
              {"dims", std::vector<int64_t>{input.dim()}}});
  return sums[0];
}

}  // namespace

DEEPSP_KERNELS(m) {
  implement<all_reduce>(m, "all_reduce");
  implement<all_reduce_start>(m, "all_reduce_start");
  implement<all_reduce_wait>(m, "all_reduce_wait");
  m.impl("_sum_gradients_", sum_gradients_kernel);
}

TORCH_LIBRARY_IMPL(deepsp_inductor, CompositeImplicitAutograd, m) {
  implement<all_reduce>(m, "all_reduce");
}

TORCH_LIBRARY_IMPL(deepsp, Functionalize, m) {
  cuts_alias(m, "all_reduce_wait");
}

}  // namespace deepsp
