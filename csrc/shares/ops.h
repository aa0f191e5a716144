#pragma once
// The exchange between tokens and shares of attention, as C++ calls it.

#include "../layout/shares.h"
#include "../op.h"

#include <string>

namespace deepsp {

using SymShareBlocks = ShareBlocks<c10::SymInt>;

inline const Op<Tensors(
    at::TensorList inputs,
    int64_t query_parts,
    c10::SymIntArrayRef seq_lens,
    int64_t chunks,
    bool last_first,
    int64_t rank,
    std::string_view group_name)>
    seq_to_shares_start("seq_to_shares_start");

inline const Op<Tensors(
    const at::Tensor& buffer,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    c10::SymInt batch,
    int64_t query_parts,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank,
    std::string_view group_name)>
    seq_to_shares_wait("seq_to_shares_wait");

inline const Op<at::Tensor(
    at::TensorList inputs,
    c10::SymIntArrayRef num_heads,
    int64_t query_parts,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank,
    std::string_view group_name)>
    shares_to_seq_start("shares_to_seq_start");

inline const Op<Tensors(
    at::TensorList buffers,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    c10::SymInt batch,
    int64_t query_parts,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name)>
    shares_to_seq_wait("shares_to_seq_wait");

// Raises ValueError where no shares can be made. `names`: what messages call the tensors.
ShareLayout share_layout(
    const std::vector<int64_t>& num_heads,
    int64_t ranks,
    int64_t query_parts,
    const char* const* names = nullptr);

}  // namespace deepsp
