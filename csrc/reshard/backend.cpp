// Sums by the group's backend: one reduce-scatter of even blocks in one dtype.
//
//   sent     a slot for each rank (slot_begins)
//   buffer   a head, and the slot in which the sums arrive
//
// A buffer's gradient has the buffer's shape, a slot for each rank in the dtypes of the wire. So
// what a start returns are as many views of the first element of the head: nobody reads them, but
// for anomaly mode, which must find no NaN and nothing on its way.

#include "../common/checks.h"
#include "engine.h"

#include <ATen/record_function.h>

namespace deepsp {
namespace {

constexpr int64_t kHeadBytes = 16;

// The slot of a buffer.
at::Tensor sums_of(const at::Tensor& buffer, int64_t elements, at::ScalarType dtype) {
  const int64_t item = item_of(buffer),
                bytes = elements * static_cast<int64_t>(c10::elementSize(dtype));
  return buffer.as_strided({bytes / item}, {1}, buffer.storage_offset() + kHeadBytes / item)
      .view(dtype);
}

// Of ranks that follow each other and have as many rows, all parts of a tensor are one copy.
void pack_part(
    const Shard<int64_t>& shard, const at::Tensor& full, int64_t begin, const at::Tensor& slots) {
  int64_t row = 0;
  for (int64_t p = 0, end; p < shard.parts(); p = end) {
    const int64_t rows = shard.sizes[p];
    for (end = p + 1; end < shard.parts() && shard.sizes[end] == rows;) {
      ++end;
    }
    const at::Tensor parts = full.narrow(0, row, (end - p) * rows);
    const int64_t elements = parts.numel() / (end - p);
    slots.narrow(0, p, end - p).narrow(1, begin, elements).copy_(parts.view({end - p, elements}));
    row += (end - p) * rows;
  }
}

}  // namespace

at::Tensor Reshard::launch_backend_sums(
    const Tensors& inputs, const BufferShape& shape, at::ScalarType dtype) const {
  const std::vector<int64_t> begins = slot_begins(shards_, dtypes_of(inputs), dtype);
  const int64_t slot = begins.back();
  const auto item = static_cast<int64_t>(shape.options.dtype().itemsize());
  const int64_t bytes = kHeadBytes + slot * static_cast<int64_t>(c10::elementSize(dtype));
  const at::Tensor buffer =
      buffer_for({bytes / item}, shape.options).as_strided(ints(shape.sizes), {0});
  if (slot == 0) {
    return buffer;
  }
  const bool as_it_is = inputs.size() == 1 && inputs[0].scalar_type() == dtype &&
                        inputs[0].numel() == shards_.parts() * slot;
  at::Tensor sent = inputs[0];
  if (!as_it_is) {
    RECORD_FUNCTION("deepsp::pack", {});
    sent = buffer_for({shards_.parts(), slot}, shape.options.dtype(dtype));
    for (size_t i = 0; i < inputs.size(); ++i) {
      pack_part(shards_[i], inputs[i], begins[i], sent);
    }
  }
  sent = sent.view({-1});
  const at::Tensor sums = sums_of(buffer, slot, dtype);
  if (alone()) {
    sums.copy_(sent);
  } else {
    attach(group_, buffer, launch_reduce_scatter(group_, unowned(sums), sent), sent);
  }
  return buffer;
}

Tensors Reshard::land_backend_sums(
    const at::Tensor& buffer,
    const Shapes& shapes,
    Dtypes wire,
    Dtypes dtypes,
    at::ScalarType dtype) const {
  const std::vector<int64_t> begins = slot_begins(shards_, wire, dtype);
  const auto bytes = static_cast<size_t>(kHeadBytes) + begins.back() * c10::elementSize(dtype);
  TORCH_CHECK_VALUE(
      buffer.stride(0) == 0 && buffer.storage().nbytes() >= bytes,
      "expected the buffer that the start returned with this backend_sums, got strides ",
      buffer.strides());
  wait_and_take(buffer);
  RECORD_FUNCTION("deepsp::land", {});
  const at::Tensor sums = sums_of(buffer, begins.back(), dtype);
  Tensors results;
  for (size_t i = 0; i < shapes.size(); ++i) {
    results.push_back(empty_result(shapes[i], buffer.options().dtype(dtypes[i])));
    results[i].view({-1}).copy_(sums.narrow(0, begins[i], results[i].numel()));
  }
  return results;
}

}  // namespace deepsp
