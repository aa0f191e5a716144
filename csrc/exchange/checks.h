#pragma once
// What a rank can see of a wrong call from its own arguments. All raise ValueError, before anything
// is sent; where shapes are right they return the exchange's plan.
//
// Arguments are read by name: seq_lens and rank; where the op has them chunks, query_parts, levels,
// num_heads, head_dims, batch and chunk.

#include "../layout/plan.h"
#include "../op.h"

#include <string>
#include <vector>

namespace deepsp {

using SymPlan = Plan<c10::SymInt>;

// At least one tensor.
void check_inputs(at::TensorList inputs);
// Four dimensions, which messages list as `dimensions` says.
void check_four(const at::Tensor& x, const std::string& name, const char* dimensions);
// Lengths and rank alone. levels: how many lengths each rank has, by level; returns the number of
// ranks.
int64_t check_seq_lens(c10::SymIntArrayRef seq_lens, int64_t rank, int64_t levels = 1);
// x [B, S_rank, ..].
void check_local_length(
    const at::Tensor& x, const std::string& name, c10::SymIntArrayRef seq_lens, int64_t rank);

// The heads of tensors that messages call `names` (nullptr: inputs[i]): every count divides the
// first, and there are as many as their ranks need.
HeadLayout head_layout(
    const std::vector<int64_t>& num_heads,
    int64_t ranks,
    int64_t chunks,
    int64_t query_parts,
    const char* const* names = nullptr);

// Inputs [B, S_rank, H_i, D_i], alike but for H and D.
SymPlan plan_by_tokens(
    at::TensorList inputs, const Given& given, const char* const* names = nullptr);

// Inputs of one chunk, alike but for heads and D: what an owner gets of each section, [B, S, h_i,
// D_i] of whole heads.
SymPlan plan_by_heads(at::TensorList inputs, const Given& given);

// The exchange that a wait describes. `buffers`: those of `chunk` and on, or none to check.
SymPlan plan_of_wait(at::TensorList buffers, const Given& given, int64_t chunk, int64_t chunks);
SymPlan plan_of_wait(
    at::TensorList buffers,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef head_dims,
    const c10::SymInt& batch,
    const Given& given,
    int64_t chunk,
    int64_t chunks);

// The plan of plain integers.
using Layout = Plan<int64_t>;
Layout concrete(const SymPlan& plan);

}  // namespace deepsp
