#pragma once
// Tensors that every rank holds whole and uses for its own tokens: their gradients are shares,
// which are summed in backward. C++ calls through the dispatcher.

#include <ATen/core/Tensor.h>

#include <string_view>
#include <vector>

namespace deepsp {

at::Tensor sum_start(
    at::TensorList inputs, int64_t rank, int64_t size, std::string_view group_name);

std::vector<at::Tensor> sum_wait(
    const at::Tensor& buffer,
    c10::SymIntArrayRef shapes,
    at::IntArrayRef dims,
    int64_t rank,
    int64_t size,
    std::string_view group_name);

// Shared by the kernels: ValueErrors. The number of elements of all inputs.
c10::SymInt check_sum(at::TensorList inputs, int64_t rank, int64_t size);
// The shape of each tensor in the buffer.
std::vector<std::vector<c10::SymInt>> check_sum_wait(
    const at::Tensor& buffer, c10::SymIntArrayRef shapes, at::IntArrayRef dims);
// Views of the buffer, one after another.
std::vector<at::Tensor> views_of(
    const at::Tensor& buffer, const std::vector<std::vector<c10::SymInt>>& shapes);

}  // namespace deepsp
