#pragma once
// Launching what travels between ranks. Nothing else talks to c10d but this folder.

#include "flight.h"

#include <functional>

namespace deepsp {

struct Bytes {
  char* data = nullptr;
  int64_t size = 0;
};

// An uninitialised tensor for blocks that travel, or that are made of them.
at::Tensor empty_buffer(at::IntArrayRef sizes, const at::TensorOptions& options);
inline at::Tensor empty_buffer(at::IntArrayRef sizes, const at::Tensor& like) {
  return empty_buffer(sizes, like.options());
}

// One exchange, point to point: receives are posted first, then each block is
// produced and sent in turn. `receive(p)` says where p's block goes, `send(p)`
// produces the block for p; empty: nothing travels. This rank's own block
// doesn't, nor what others get that aren't `among`. The caller keeps the memory until the flight
// has landed.
void exchange_point_to_point(
    const Group& group,
    const std::function<bool(int64_t)>& among,
    const std::function<Bytes(int64_t)>& receive,
    const std::function<Bytes(int64_t)>& send,
    Flight& flight);

// A contiguous tensor for a collective whose work will belong to the tensor's own memory
// (launch_into): on the CPU it doesn't own that, lest both live forever where nobody waits.
at::Tensor lent(const at::Tensor& tensor);

// One exchange as a collective of one-dimensional tensors; counts in elements.
Work launch_all_to_all(
    const Group& group,
    const at::Tensor& received,
    const at::Tensor& sent,
    const std::vector<int64_t>& receive_counts,
    const std::vector<int64_t>& send_counts);

// Asynchronous; `out` holds every rank's `in`, in rank order.
Work launch_all_gather(const Group& group, const at::Tensor& out, const at::Tensor& in);
// Asynchronous, in place: the sum, or the largest, over the group.
Work launch_sum(const Group& group, const at::Tensor& tensor);
Work launch_max(const Group& group, const at::Tensor& tensor);

// `out` holds every rank's contiguous `in`, in rank order. For what ranks tell each other before
// their first exchange: an error names every rank that hasn't come, where the backend knows.
void gather_from_all(const Group& group, const at::Tensor& out, const at::Tensor& in);

// Waits for what was launched on its own; an error names the group's op.
void wait_for(const Group& group, const Work& work);

}  // namespace deepsp
