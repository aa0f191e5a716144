#pragma once
// The exchange's ops as C++ calls through the dispatcher: autograd, tracing and
// functionalization see them.

#include <ATen/core/Tensor.h>

#include <string_view>
#include <vector>

namespace deepsp {

std::vector<at::Tensor> seq_to_heads(
    at::TensorList inputs, c10::SymIntArrayRef seq_lens, int64_t rank, std::string_view group_name);

std::vector<at::Tensor> heads_to_seq(
    at::TensorList inputs,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name,
    bool tokens_first = false);

std::vector<at::Tensor> seq_to_heads_start(
    at::TensorList inputs,
    c10::SymIntArrayRef seq_lens,
    int64_t chunks,
    bool last_first,
    int64_t rank,
    std::string_view group_name);

std::vector<at::Tensor> seq_to_heads_wait(
    const at::Tensor& buffer,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank,
    std::string_view group_name);

at::Tensor heads_to_seq_start(
    at::TensorList inputs,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank,
    std::string_view group_name);

std::vector<at::Tensor> heads_to_seq_wait(
    at::TensorList buffers,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name,
    bool tokens_first = false);

}  // namespace deepsp
