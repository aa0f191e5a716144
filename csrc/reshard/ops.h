#pragma once
// What every rank has of a tensor, gathered, scattered and summed: weights whose rows are sharded,
// many at once and cast; and single tensors along any dimension. As C++ calls it.
//
// grad says what every rank holds of the full tensor's gradient: "replicated", all of it;
// "partial", a partial gradient, which is summed over ranks.

#include "../op.h"

namespace deepsp {

inline const Op<at::Tensor(
    at::TensorList shards,
    c10::SymIntArrayRef sizes,
    Dtypes dtypes,
    int64_t rank,
    std::string_view group_name,
    OptionalDtype reduce_dtype)>
    gather_cast_coalesced_start("gather_cast_coalesced_start");

inline const Op<Tensors(
    const at::Tensor& buffer,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef row_shapes,
    at::IntArrayRef row_dims,
    Dtypes dtypes,
    int64_t rank,
    std::string_view group_name)>
    gather_cast_coalesced_wait("gather_cast_coalesced_wait");

inline const Op<at::Tensor(
    at::TensorList inputs, c10::SymIntArrayRef sizes, int64_t rank, std::string_view group_name)>
    reduce_scatter_cast_coalesced_start("reduce_scatter_cast_coalesced_start");

inline const Op<Tensors(
    const at::Tensor& buffer,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef row_shapes,
    at::IntArrayRef row_dims,
    Dtypes wire_dtypes,
    Dtypes dtypes,
    OptionalDtype reduce_dtype,
    int64_t rank,
    std::string_view group_name)>
    reduce_scatter_cast_coalesced_wait("reduce_scatter_cast_coalesced_wait");

inline const Op<Tensors(
    at::TensorList inputs,
    c10::SymIntArrayRef sizes,
    Dtypes dtypes,
    int64_t rank,
    std::string_view group_name,
    OptionalDtype reduce_dtype)>
    reduce_scatter_cast_coalesced("reduce_scatter_cast_coalesced");

inline const Op<std::tuple<Tensors, at::Tensor>(
    at::TensorList shards,
    c10::SymIntArrayRef sizes,
    at::ScalarType dtype,
    int64_t rank,
    std::string_view group_name)>
    gather_cast_float8_coalesced("gather_cast_float8_coalesced");

inline const Op<at::Tensor(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    std::string_view grad,
    int64_t rank,
    std::string_view group_name,
    OptionalDtype reduce_dtype)>
    all_gather_start("all_gather_start"), all_gather("all_gather");

inline const Op<Tensors(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    std::string_view grad,
    int64_t rank,
    std::string_view group_name)>
    all_gather_wait("all_gather_wait");

inline const Op<at::Tensor(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name)>
    reduce_scatter_start("reduce_scatter_start"), scatter_start("scatter_start");

inline const Op<at::Tensor(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name,
    OptionalDtype reduce_dtype)>
    reduce_scatter("reduce_scatter");

inline const Op<at::Tensor(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    int64_t rank,
    std::string_view group_name,
    OptionalDtype reduce_dtype)>
    reduce_scatter_wait("reduce_scatter_wait");

inline const Op<Tensors(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    int64_t rank,
    std::string_view group_name)>
    scatter_wait("scatter_wait");

inline const Op<at::Tensor(
    const at::Tensor& input,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    std::string_view group_name,
    OptionalDtype reduce_dtype)>
    all_reduce("all_reduce");

inline const Op<at::Tensor(
    at::TensorList inputs,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    std::string_view group_name,
    OptionalDtype reduce_dtype)>
    all_reduce_start("all_reduce_start");

inline const Op<Tensors(
    const at::Tensor& buffer,
    c10::SymIntArrayRef shapes,
    at::IntArrayRef dims,
    std::string_view grad,
    int64_t rank,
    int64_t size,
    std::string_view group_name,
    OptionalDtype reduce_dtype)>
    all_reduce_wait("all_reduce_wait");

}  // namespace deepsp
