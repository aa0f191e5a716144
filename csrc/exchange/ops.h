#pragma once
// The exchange's ops as C++ calls them.

#include "../op.h"

namespace deepsp {

inline const Op<Tensors(
    at::TensorList inputs, c10::SymIntArrayRef seq_lens, int64_t rank, std::string_view group_name)>
    seq_to_heads("seq_to_heads");

inline const Op<Tensors(
    at::TensorList inputs,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name,
    bool tokens_first)>
    heads_to_seq("heads_to_seq");

inline const Op<Tensors(
    at::TensorList inputs,
    c10::SymIntArrayRef seq_lens,
    int64_t chunks,
    bool last_first,
    int64_t rank,
    std::string_view group_name)>
    seq_to_heads_start("seq_to_heads_start");

inline const Op<Tensors(
    const at::Tensor& buffer,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank,
    std::string_view group_name,
    std::optional<bool> tokens_first)>
    seq_to_heads_wait("seq_to_heads_wait");

inline const Op<at::Tensor(
    at::TensorList inputs,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank,
    std::string_view group_name,
    std::optional<bool> tokens_first)>
    heads_to_seq_start("heads_to_seq_start");

inline const Op<Tensors(
    at::TensorList buffers,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name,
    bool tokens_first)>
    heads_to_seq_wait("heads_to_seq_wait");

}  // namespace deepsp
