#pragma once
// What the kernels of sums over the group share with their autograd and meta functions: checks,
// which raise ValueError, and shapes.

#include "../op.h"
#include "checks.h"

namespace deepsp {

// The number of elements of all inputs.
c10::SymInt check_sum(
    at::TensorList inputs,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    OptionalDtype reduce_dtype);

// 16-bit floats are summed in more bits where they arrive: they are scattered, summed and gathered,
// each rank's part from a slot.
bool sums_on_arrival(at::ScalarType dtype, OptionalDtype reduce_dtype);
// The elements that each rank sums: as many on each, but for what the last ones lack. Those of all
// begin at multiples of 16 bytes, at which a GPU reads and writes them.
SymInts sum_parts(const c10::SymInt& elements, int64_t size);
// The shape of the buffer of so many elements.
SymInts sum_buffer_shape(
    const c10::SymInt& elements, int64_t size, at::ScalarType dtype, OptionalDtype reduce_dtype);

// What a wait says of its buffer: the shape of each tensor in it.
struct SumShapes {
  std::vector<SymInts> of;
  c10::SymInt elements = 0;
};
SumShapes check_sum_wait(
    const at::Tensor& buffer,
    c10::SymIntArrayRef shapes,
    at::IntArrayRef dims,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    OptionalDtype reduce_dtype);
// Returns the sums of all ranks, for a wait whose buffer holds addends.
at::Tensor gather_sums(const SumShapes& sums, const Given& given);
// Views of a flat tensor, one after another.
Tensors views_of(const at::Tensor& flat, const std::vector<SymInts>& shapes);

}  // namespace deepsp
