#pragma once
// Kernels that read their arguments by name, and backward formulas that pass them by name: the
// signature of such an op stands only in its schema.

#include "../op.h"

#include <string>
#include <utility>

namespace deepsp {

// The arguments of one call.
class Given {
 public:
  Given(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> values)
      : schema_(schema), arguments_(values.begin(), values.end()) {}

  // By its name in the schema. A list that it converts to lives as long as this Given.
  Argument& operator[](const char* name) const {
    return arguments_[*schema_.argumentIndexWithName(name)];
  }
  template <class T>
  std::optional<T> optional(const char* name) const {
    return (*this)[name].value().toOptional<T>();
  }

 private:
  const c10::FunctionSchema& schema_;
  mutable std::vector<Argument> arguments_;
};

// Returns the result, or of several results a tuple, or Tensors with one for each.
using NamedKernel = c10::IValue (*)(const Given& given);

template <NamedKernel kernel>
void run_by_name(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  c10::IValue result = kernel(Given(op.schema(), torch::jit::last(*stack, count)));
  torch::jit::drop(*stack, count);
  if (op.schema().returns().size() == 1) {
    stack->push_back(std::move(result));
    return;
  }
  const auto results =
      result.isTuple() ? result.toTuple()->elements().vec() : result.toListRef().vec();
  stack->insert(stack->end(), results.begin(), results.end());
}

template <NamedKernel kernel>
void impl_by_name(torch::Library& m, const char* op) {
  m.impl(op, torch::CppFunction::makeFromBoxedFunction<&run_by_name<kernel>>());
}

using NamedValues = std::vector<std::pair<const char*, c10::IValue>>;

// Calls an op of the library with `values`, and for its other arguments with their defaults, those
// that a kernel was given, or those that a call saved. Several results are a tuple.
c10::IValue call_by_name(const char* op, const NamedValues& values);
c10::IValue call_by_name(const char* op, const NamedValues& values, const Given& given);
c10::IValue call_by_name(const char* op, const NamedValues& values, const Call& call);

// ------------------------------------------------------------------- backward

using Names = std::vector<const char*>;

// An op whose backward is an op, too, and what they share, by name.
struct BackwardOp {
  const char* op;            // the backward
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
Tensors call_backward(const BackwardOp& backward, const Call& call, NamedValues values);

}  // namespace deepsp
