#pragma once
// Collectives along any dimension, without transposes. C++ calls through the dispatcher.
//
// grad, of what becomes whole: "replicated" where every rank goes on with it alike, and so has its
// whole gradient; "partial" where the ranks' gradients are shares, to be summed.

#include <ATen/core/Tensor.h>

#include <string_view>
#include <vector>

namespace deepsp {

using ReduceDtype = std::optional<at::ScalarType>;

at::Tensor all_gather_start(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    std::string_view grad,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype);

std::vector<at::Tensor> all_gather_wait(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    std::string_view grad,
    int64_t rank,
    std::string_view group_name);

at::Tensor reduce_scatter_start(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name);

at::Tensor reduce_scatter_wait(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype);

at::Tensor scatter_start(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name);

std::vector<at::Tensor> scatter_wait(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    int64_t rank,
    std::string_view group_name);

}  // namespace deepsp
