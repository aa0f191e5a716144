#pragma once
// Sums over ranks that all write into each other's memory: each rank sums a part, in rank order,
// and writes it to all others. Two exchanges.

#include "../transport/flight.h"
#include "../transport/group.h"

#include <ATen/core/Tensor.h>

#include <memory>

namespace deepsp {

// Whether tensors of that dtype on that device are summed so in the group. The first call for a
// group is made by all its ranks together.
bool sums_by_memory(const Group& group, c10::Device device, at::ScalarType dtype);

// Writes to every rank its part of `flat`, one-dimensional, which must live and stay as it is until
// the sum has landed.
std::unique_ptr<Flight> launch_mapped_sum(const Group& group, const at::Tensor& flat);
// Waits for what was launched. The sum, a new tensor.
at::Tensor land_mapped_sum(const Group& group, const at::Tensor& flat, Flight& flight);

}  // namespace deepsp
