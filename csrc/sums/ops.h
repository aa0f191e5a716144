#pragma once
// Sums over the group of what every rank has. C++ calls through the dispatcher.

#include "../along_dim/ops.h"

namespace deepsp {

at::Tensor all_reduce(
    const at::Tensor& input,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    std::string_view group_name,
    ReduceDtype reduce_dtype);

at::Tensor all_reduce_start(
    at::TensorList inputs,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    std::string_view group_name,
    ReduceDtype reduce_dtype);

std::vector<at::Tensor> all_reduce_wait(
    const at::Tensor& buffer,
    c10::SymIntArrayRef shapes,
    at::IntArrayRef dims,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    std::string_view group_name,
    ReduceDtype reduce_dtype);

// Shared by the kernels and autograd.

// ValueErrors. The number of elements of all inputs.
c10::SymInt check_sum(
    at::TensorList inputs,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    ReduceDtype reduce_dtype);
// The shape of the buffer of so many elements. 16-bit floats are summed in more bits where they
// arrive: they are scattered, summed and gathered, each rank's part from a slot.
bool sums_on_arrival(at::ScalarType dtype, ReduceDtype reduce_dtype);
std::vector<c10::SymInt> sum_buffer_shape(
    const c10::SymInt& elements, int64_t size, at::ScalarType dtype, ReduceDtype reduce_dtype);
// The elements that each rank sums.
std::vector<c10::SymInt> sum_parts(const c10::SymInt& elements, int64_t size);
// The shape of each tensor in the buffer.
struct SumShapes {
  std::vector<std::vector<c10::SymInt>> of;
  c10::SymInt elements;
};
SumShapes check_sum_wait(
    const at::Tensor& buffer,
    c10::SymIntArrayRef shapes,
    at::IntArrayRef dims,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    ReduceDtype reduce_dtype);
// Views of a flat tensor, one after another.
std::vector<at::Tensor> views_of(
    const at::Tensor& flat, const std::vector<std::vector<c10::SymInt>>& shapes);

}  // namespace deepsp
