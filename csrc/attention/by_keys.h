#pragma once
// Attention for which keys and values travel instead of heads: queries stay where they are, and
// each rank receives the tokens that its queries see.

#include "cell.h"

namespace deepsp {

// Raises for arguments that it doesn't take.
void check_by_keys(const Asked& asked, const Given& given);

// inputs: q, k and v [B, S_rank, H_i, D_i]. Returns [B, S_rank, H, Dv].
Attention attend_by_keys(
    const Tensors& inputs, const SymPlan& plan, const Asked& asked, const Given& given);

}  // namespace deepsp
