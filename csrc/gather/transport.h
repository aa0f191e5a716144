#pragma once
// Pieces sent off and landed, in both directions, whatever they hold.

#include "../collectives/exchange.h"
#include "../exchange/copies.h"
#include "checks.h"
#include "plan.h"

#include <functional>

namespace deepsp {

// An uninitialised tensor; a large one on the CPU comes from the pool.
at::Tensor empty_result(at::IntArrayRef sizes, const at::TensorOptions& options);

// The group to talk to.
Group group_of(
    const char* op, std::string_view name, const ShardLayout<int64_t>& layout, c10::Device device);
// With DEEPSP_DEBUG=1: ValueError on every rank unless all pass tensors that fit together.
void check_ranks_agree(
    const Group& group,
    const char* name,
    at::TensorList tensors,
    const ShardLayout<int64_t>& layout,
    Dtypes dtypes);
// How pieces lie in a buffer on that device.
Plan plan_of(const ShardLayout<int64_t>& layout, const Group& group, c10::Device device);

// The buffer of an exchange.
at::Tensor buffer_for(
    const ShardLayout<int64_t>& layout, at::ScalarType dtype, const at::TensorOptions& options);

// Where this rank's rows of tensor i are to be made.
struct Piece {
  size_t tensor;
  char* to;
};
using MakePieces = std::function<void(const std::vector<Piece>&)>;

// Makes this rank's rows where they belong in the buffer, and sends them off from there.
void launch_gather(
    const MakePieces& make, const Plan& plan, const Group& group, const at::Tensor& buffer);
// Tensor i of a buffer that has arrived: a view where it lies whole, else a copy.
std::vector<at::Tensor> land_gather(
    const at::Tensor& buffer,
    const Plan& plan,
    const std::vector<std::vector<int64_t>>& shapes,
    Dtypes dtypes,
    bool fresh);

// Sends every rank's rows of the inputs, contiguous, off to it.
void launch_scatter(
    const std::vector<at::Tensor>& inputs,
    const Plan& plan,
    const Group& group,
    const at::Tensor& buffer);

}  // namespace deepsp
