#pragma once
// What a rank can see of a wrong call from its own arguments: ValueError, before anything is sent.

#include "ops.h"

namespace deepsp {

// Inputs [B, S_rank, H_i, D_i], alike but for H and D.
SymShareBlocks check_tokens_to_share(
    at::TensorList inputs,
    int64_t query_parts,
    c10::SymIntArrayRef seq_lens,
    int64_t chunks,
    int64_t rank,
    const char* const* names = nullptr);

// Inputs of one chunk: [B, n, h, D_0] for each cell; with chunk 0, [B, S, h_i, D_i] of the others.
SymShareBlocks check_shares(
    at::TensorList inputs,
    c10::SymIntArrayRef num_heads,
    int64_t query_parts,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank);

// What a wait says of its buffers, those of `chunk` and on.
SymShareBlocks check_share_buffers(
    at::TensorList buffers,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    const c10::SymInt& batch,
    int64_t query_parts,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank);

ShareBlocks<int64_t> concrete(const SymShareBlocks& blocks);

}  // namespace deepsp
