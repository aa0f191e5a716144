#pragma once
// Linear layers around the collectives of tensor parallelism, pipelined: while one rank's part
// travels, another's product is computed. C++ calls through the dispatcher.
//
// input [.., n, .., K], of which dim is not the last; weight [M, K]; bias [M].

#include "../along_dim/checks.h"

namespace deepsp {

at::Tensor all_gather_matmul(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype);

std::vector<at::Tensor> all_gather_matmul_backward(
    const at::Tensor& grad,
    const at::Tensor& input,
    const at::Tensor& weight,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    at::IntArrayRef wanted,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype);

at::Tensor matmul_reduce_scatter(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype);

std::vector<at::Tensor> matmul_reduce_scatter_backward(
    const at::Tensor& grad,
    const at::Tensor& input,
    const at::Tensor& weight,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    at::IntArrayRef wanted,
    int64_t rank,
    std::string_view group_name);

// ---- checks: ValueError, or who has which rows, as matrices: [outer, n·inner, K]

SymAlong check_gather_matmul(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    ReduceDtype reduce_dtype);
SymAlong check_matmul_scatter(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    ReduceDtype reduce_dtype);
// input has sizes[rank], and grad all (gathers), or the other way round.
SymAlong check_matmul_backward(
    const at::Tensor& grad,
    const at::Tensor& input,
    const at::Tensor& weight,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    at::IntArrayRef wanted,
    int64_t rank,
    bool gathers);

// The shape of the product: another size in dim, and the last from the weight.
std::vector<c10::SymInt> product_shape(
    const at::Tensor& input, int64_t dim, const c10::SymInt& length, const c10::SymInt& columns);

}  // namespace deepsp
