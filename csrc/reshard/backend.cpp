// Sums by the group's backend: one reduce-scatter of even blocks in one dtype.
//
//   sent     a slot for each rank (even_slot), with its block
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
at::Tensor slot_of(const at::Tensor& buffer, int64_t bytes, at::ScalarType dtype) {
  const int64_t item = item_of(buffer);
  return buffer.as_strided({bytes / item}, {1}, buffer.storage_offset() + kHeadBytes / item)
      .view(dtype);
}

}  // namespace

at::Tensor Reshard::launch_backend_sums(const Tensors& inputs, const BufferShape& shape) const {
  const int64_t slot = even_slot(shards_), parts = shards_.parts();
  const auto item = static_cast<int64_t>(shape.options.dtype().itemsize());
  const at::Tensor buffer =
      buffer_for({(kHeadBytes + slot) / item}, shape.options).as_strided(ints(shape.sizes), {0});
  if (slot == 0) {
    return buffer;
  }
  at::Tensor sent = inputs[0];
  if (inputs.size() > 1 || static_cast<int64_t>(sent.nbytes()) != parts * slot) {
    RECORD_FUNCTION("deepsp::pack", {});
    sent = buffer_for({parts * slot / item_of(inputs[0])}, inputs[0].options());
    std::vector<StridedCopy> copies;
    for (int64_t p = 0; p < parts; ++p) {
      char* const to = data_of(sent) + p * slot;
      for (size_t i = 0; i < inputs.size(); ++i) {
        const char* const from = part_of(inputs[i], i, p);
        copies.push_back(copy_of_bytes(from, to + shards_.offset(i, p), shards_[i].part(p)));
      }
    }
    run(copies, buffer.device());
  }
  sent = sent.view({-1});
  const at::Tensor sums = slot_of(buffer, slot, sent.scalar_type());
  if (alone()) {
    sums.copy_(sent);
  } else {
    attach(group_, buffer, launch_reduce_scatter(group_, unowned(sums), sent), sent);
  }
  return buffer;
}

Tensors Reshard::finish_backend_sums(
    const at::Tensor& buffer, const Shapes& shapes, at::ScalarType dtype, Dtypes dtypes) const {
  const int64_t slot = even_slot(shards_);
  TORCH_CHECK_VALUE(
      buffer.stride(0) == 0 && static_cast<int64_t>(buffer.storage().nbytes()) >= kHeadBytes + slot,
      "expected the buffer that the start returned with this backend_sums, got strides ",
      buffer.strides());
  wait_and_take(buffer);
  RECORD_FUNCTION("deepsp::land", {});
  const at::Tensor sums = slot_of(buffer, slot, dtype);
  Tensors results;
  for (size_t i = 0; i < shapes.size(); ++i) {
    results.push_back(empty_result(shapes[i], buffer.options().dtype(dtypes[i])));
    results[i].view({-1}).copy_(
        sums.narrow(0, shards_.offset(i, rank_) / item_of(sums), results[i].numel()));
  }
  return results;
}

}  // namespace deepsp
