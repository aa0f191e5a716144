#pragma once
// What a rank can see of a wrong call from its own arguments. All raise
// ValueError, before anything is sent; where shapes are right they return the
// layout of the exchange.

#include "../layout/blocks.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace deepsp {

using SymBlockLayout = BlockLayout<c10::SymInt>;

// At least one tensor.
void check_inputs(at::TensorList inputs);
// Four dimensions, which messages list as `dimensions` says.
void check_four(const at::Tensor& x, const std::string& name, const char* dimensions);
// Lengths and rank alone.
void check_seq_lens(c10::SymIntArrayRef seq_lens, int64_t rank);
// x [B, S_rank, ..].
void check_local_length(
    const at::Tensor& x, const std::string& name, c10::SymIntArrayRef seq_lens, int64_t rank);
// As many ranks as query heads at most, and every count divides the first.
// `names(i)` is what messages call the count of tensor i.
void check_num_heads(
    const std::vector<int64_t>& num_heads, int64_t parts, const char* const* names);

struct HeadSizes {
  std::vector<int64_t> num_heads;
  std::vector<c10::SymInt> head_dims;
};

// Inputs [B, S_rank, H_i, D_i], alike but for H and D.
HeadSizes check_inputs_by_tokens(
    at::TensorList inputs, c10::SymIntArrayRef seq_lens, int64_t rank, const char* const* names);

// Their layout, with heads shared out.
SymBlockLayout check_by_tokens(
    at::TensorList inputs,
    c10::SymIntArrayRef seq_lens,
    int64_t chunks,
    int64_t rank,
    const char* const* names = nullptr);

// Inputs [B, S, h_i, D_i] of one chunk, alike but for h and D.
SymBlockLayout check_by_heads(
    at::TensorList inputs,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank);

// What a wait is told of an exchange: one entry for each tensor, none negative.
void check_described(
    c10::SymIntArrayRef num_heads, c10::SymIntArrayRef head_dims, const c10::SymInt& batch);
// Buffer n of an exchange, alike the first one.
void check_buffer(
    const at::Tensor& buffer, size_t n, const at::Tensor& first, const c10::SymInt& elements);

// What a wait says of the buffer that it is given.
SymBlockLayout check_wait(
    at::TensorList buffers,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    const c10::SymInt& batch,
    c10::SymIntArrayRef seq_lens,
    int64_t chunk,
    int64_t chunks,
    int64_t rank);

// Elements of the buffer that an exchange of `chunk` goes into. The same both
// ways: a buffer's gradient is the buffer of the exchange back.
c10::SymInt buffer_elements(const SymBlockLayout& layout, int64_t chunk);

// The layout of plain integers.
BlockLayout<int64_t> concrete(const SymBlockLayout& layout);

}  // namespace deepsp
