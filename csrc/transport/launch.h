#pragma once
// Launches messages and collectives. Only this folder calls c10d.

#include "attach.h"

#include <functional>

namespace deepsp {

struct Bytes {
  char* data = nullptr;
  int64_t size = 0;
};

// An uninitialised tensor for blocks that are sent or received, or for what is made of them.
at::Tensor empty_buffer(at::IntArrayRef sizes, const at::TensorOptions& options);
inline at::Tensor empty_buffer(at::IntArrayRef sizes, const at::Tensor& like) {
  return empty_buffer(sizes, like.options());
}

// One exchange of messages: posts all receives, then makes and sends one block after another.
// `receive(p)` is where p's block goes, `send(p)` makes the block for p; empty: no message. Neither
// is called for this rank, nor for ranks that `among` excludes. The caller keeps the memory until
// the wait.
void exchange_point_to_point(
    const Group& group,
    const std::function<bool(int64_t)>& among,
    const std::function<Bytes(int64_t)>& receive,
    const std::function<Bytes(int64_t)>& send,
    Flight& flight);

// The bytes of a dense tensor, flat. One element may have any stride.
at::Tensor bytes_of(const at::Tensor& tensor);

// A contiguous tensor for a collective that will be attached to the tensor's own memory
// (attach). On the CPU it doesn't own that memory: a cycle would leak both if wait is never
// called.
at::Tensor unowned(const at::Tensor& tensor);

// All launches are asynchronous. One exchange as a collective of one-dimensional tensors; counts in
// elements.
Work launch_all_to_all(
    const Group& group,
    const at::Tensor& received,
    const at::Tensor& sent,
    const std::vector<int64_t>& receive_counts,
    const std::vector<int64_t>& send_counts);

// `out` holds every rank's `in`, in rank order.
Work launch_all_gather(const Group& group, const at::Tensor& out, const at::Tensor& in);
// `in` holds a block for every rank, in rank order; `out` the sum of this rank's.
Work launch_reduce_scatter(const Group& group, const at::Tensor& out, const at::Tensor& in);
// In place: the sum, or the largest, over the group.
Work launch_sum(const Group& group, const at::Tensor& tensor);
Work launch_max(const Group& group, const at::Tensor& tensor);

// Waits for a work that isn't attached to a buffer; an error names the group's op.
void wait_for(const Group& group, const Work& work);

// `out` holds every rank's contiguous `in`, in rank order. If messages fail, the error names every
// rank that is missing.
void gather_from_all(const Group& group, const at::Tensor& out, const at::Tensor& in);

}  // namespace deepsp
