#pragma once
// Backward formulas of ops whose backward is an op, too: tensors and arguments are passed by name.

#include "../op.h"

#include <string>
#include <utility>

namespace deepsp {

using Names = std::vector<const char*>;

// An op whose backward is an op, too, and what they share, by name.
struct BackwardOp {
  NamedOp op;                // the backward
  Names inputs;              // the forward's arguments that are tensors, in order
  Names results;             // the forward's results; empty: none of them is saved
  Names saved;               // inputs and results that the backward takes
  Names gradients;           // inputs whose gradients the backward returns, in order
  bool takes_wanted = true;  // whether it returns only those that its argument `wanted` asks for
};

// Saves the tensors of `backward.saved`, undefined ones for arguments that are None.
void save_for(const BackwardOp& backward, Call& call);

// Calls the backward with the saved tensors, `values`, `wanted`, and the forward's arguments for
// the rest. Returns a gradient for each input, undefined where it isn't wanted.
Tensors call_backward(const BackwardOp& backward, const Call& call, std::vector<With> values);

}  // namespace deepsp
