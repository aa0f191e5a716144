#pragma once
// Weights whose rows are sharded: cast and gathered, and their gradients' sums scattered.
// C++ calls through the dispatcher.

#include <ATen/core/Tensor.h>

#include <string_view>
#include <tuple>
#include <vector>

namespace deepsp {

using Dtypes = at::ArrayRef<at::ScalarType>;

at::Tensor gather_cast_coalesced_start(
    at::TensorList shards,
    c10::SymIntArrayRef sizes,
    Dtypes dtypes,
    int64_t rank,
    std::string_view group_name,
    std::optional<at::ScalarType> reduce_dtype);

std::vector<at::Tensor> gather_cast_coalesced_wait(
    const at::Tensor& buffer,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef row_shapes,
    at::IntArrayRef row_dims,
    Dtypes dtypes,
    int64_t rank,
    std::string_view group_name);

at::Tensor reduce_scatter_cast_coalesced_start(
    at::TensorList inputs, c10::SymIntArrayRef sizes, int64_t rank, std::string_view group_name);

std::vector<at::Tensor> reduce_scatter_cast_coalesced_wait(
    const at::Tensor& buffer,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef row_shapes,
    at::IntArrayRef row_dims,
    Dtypes wire_dtypes,
    Dtypes dtypes,
    std::optional<at::ScalarType> reduce_dtype,
    int64_t rank,
    std::string_view group_name);

std::tuple<std::vector<at::Tensor>, at::Tensor> gather_cast_float8_coalesced(
    at::TensorList shards,
    c10::SymIntArrayRef sizes,
    at::ScalarType dtype,
    int64_t rank,
    std::string_view group_name);

std::vector<at::Tensor> gather_through_float8(
    at::TensorList shards,
    c10::SymIntArrayRef sizes,
    at::ScalarType float8_dtype,
    at::ScalarType dtype,
    int64_t rank,
    std::string_view group_name,
    std::optional<at::ScalarType> reduce_dtype);

}  // namespace deepsp
