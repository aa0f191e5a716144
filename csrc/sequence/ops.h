#pragma once
// What else crosses the sequence group: whole tensors from their shards, and
// sums of losses and gradients. C++ calls through the dispatcher.

#include <ATen/core/Tensor.h>

#include <string_view>

namespace deepsp {

at::Tensor all_reduce(
    const at::Tensor& input,
    double grad_scale,
    int64_t rank,
    int64_t size,
    std::string_view group_name);

at::Tensor unshard(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name);

// Shared by the kernels: ValueErrors, and dim counted from the front.
int64_t check_unshard(
    const at::Tensor& input, int64_t dim, c10::SymIntArrayRef seq_lens, int64_t rank);

}  // namespace deepsp
