#pragma once
// What is the same for all ops: arguments by name, so that an op's signature stands only in its
// schema; an op as one handle; its autograd from a backward formula. C++ calls ops through the
// dispatcher, as Python does, so that autograd, tracing and functionalization see them.
//
// To add an op: its schema in library.cpp; a kernel, which is its own meta function
// (DEEPSP_KERNELS); where it can be differentiated, a backward formula (differentiable); where C++
// calls it, an Op.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

namespace deepsp {

using Tensors = std::vector<at::Tensor>;
using SymInts = std::vector<c10::SymInt>;
using Dtypes = at::ArrayRef<at::ScalarType>;
using OptionalTensor = std::optional<at::Tensor>;
using OptionalDtype = std::optional<at::ScalarType>;

// A block of m.impl(name, kernel), for each device that kernels are compiled for, and for meta
// tensors: there a kernel returns tensors of the right shapes as soon as its arguments are checked.
#ifdef DEEPSP_CUDA
#define DEEPSP_KERNELS_CUDA(ns, kernels) \
  TORCH_LIBRARY_IMPL(ns, CUDA, m) {      \
    kernels(m);                          \
  }
#else
#define DEEPSP_KERNELS_CUDA(ns, kernels)
#endif
#define DEEPSP_KERNELS_AS(ns, kernels, m) \
  static void kernels(torch::Library&);   \
  TORCH_LIBRARY_IMPL(ns, CPU, m) {        \
    kernels(m);                           \
  }                                       \
  TORCH_LIBRARY_IMPL(ns, Meta, m) {       \
    kernels(m);                           \
  }                                       \
  DEEPSP_KERNELS_CUDA(ns, kernels)        \
  static void kernels([[maybe_unused]] torch::Library& m)
#define DEEPSP_KERNELS_IN(ns, m) \
  DEEPSP_KERNELS_AS(ns, C10_CONCATENATE(register_kernels_, C10_UID), m)
#define DEEPSP_KERNELS(m) DEEPSP_KERNELS_IN(deepsp, m)
// The same for kinds of tensors that kernels refuse, in words.
#define DEEPSP_REFUSED_KINDS_AS(kernels, m)     \
  static void kernels(torch::Library&);         \
  TORCH_LIBRARY_IMPL(deepsp, QuantizedCPU, m) { \
    kernels(m);                                 \
  }                                             \
  TORCH_LIBRARY_IMPL(deepsp, SparseCPU, m) {    \
    kernels(m);                                 \
  }                                             \
  TORCH_LIBRARY_IMPL(deepsp, SparseCsrCPU, m) { \
    kernels(m);                                 \
  }                                             \
  static void kernels([[maybe_unused]] torch::Library& m)
#define DEEPSP_REFUSED_KINDS(m) DEEPSP_REFUSED_KINDS_AS(C10_CONCATENATE(refused_kinds_, C10_UID), m)

// ------------------------------------------------------------------- arguments by name

// An argument or a result, converted to the type that its reader takes.
class Argument {
 public:
  explicit Argument(c10::IValue value) : value_(std::move(value)) {}

  operator int64_t() const { return value_.toInt(); }
  operator double() const { return value_.toDouble(); }
  operator bool() const { return value_.toBool(); }
  operator c10::SymInt() const { return value_.toSymInt(); }
  operator std::string_view() const { return value_.toStringView(); }
  operator at::Tensor() const { return value_.isNone() ? at::Tensor() : value_.toTensor(); }
  operator at::ScalarType() const { return value_.toScalarType(); }
  // Not const: a better match than optional's own constructor, by way of a double.
  operator OptionalDtype() { return value_.toOptional<at::ScalarType>(); }
  operator OptionalTensor() { return value_.toOptional<at::Tensor>(); }
  operator std::optional<double>() { return value_.toOptional<double>(); }
  operator std::optional<bool>() { return value_.toOptional<bool>(); }
  operator std::optional<int64_t>() { return value_.toOptional<int64_t>(); }
  // These last as long as the Argument does: a temporary's, to the end of the call that takes them.
  operator c10::SymIntArrayRef() const {
    return list(&Lists::symints, [&] { return value_.toSymIntVector(); });
  }
  operator at::IntArrayRef() const {
    return list(&Lists::ints, [&] { return value_.toIntVector(); });
  }
  operator at::TensorList() const {
    return list(&Lists::tensors, [&] { return value_.toTensorVector(); });
  }
  operator Dtypes() const;
  operator Tensors() const { return value_.toTensorVector(); }

  const c10::IValue& value() const { return value_; }

 private:
  struct Lists {
    SymInts symints;
    std::vector<int64_t> ints;
    Tensors tensors;
    std::vector<at::ScalarType> dtypes;
  };

  template <class List, class Read>
  const List& list(List Lists::* which, const Read& read) const {
    if (lists_ == nullptr) {
      lists_ = std::make_unique<Lists>();
    }
    List& kept = (*lists_).*which;
    if (kept.empty() && !value_.isNone()) {
      kept = read();
    }
    return kept;
  }

  c10::IValue value_;
  mutable std::unique_ptr<Lists> lists_;
};

// Adds the tensors of a value, and of a list.
void append_tensors(const c10::IValue& value, Tensors& to);

// Calls `change` with every tensor among `values`, which it becomes.
template <class Change>
void change_tensors(at::ArrayRef<c10::IValue> values, const Change& change) {
  for (const c10::IValue& value : values) {
    auto& slot = const_cast<c10::IValue&>(value);
    if (value.isTensor() && value.toTensor().defined()) {
      slot = change(value.toTensor());
    } else if (value.isTensorList()) {
      Tensors changed;
      for (const at::Tensor& x : value.toTensorVector()) {
        changed.push_back(change(x));
      }
      slot = std::move(changed);
    }
  }
}

// What a call was given, by the names of its schema.
class Named {
 public:
  virtual ~Named() = default;
  // None where there is no argument of that name, or where its value isn't known any more.
  virtual std::optional<c10::IValue> find(std::string_view name) const = 0;
};

class Given : public Named {
 public:
  Given(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> values)
      : schema_(schema), values_(values.begin(), values.end()) {}

  // The lists that it converts to last as long as this does.
  Argument& operator[](std::string_view name) const;
  std::optional<c10::IValue> find(std::string_view name) const override;
  template <class T>
  std::optional<T> optional(std::string_view name) const {
    return (*this)[name].value().toOptional<T>();
  }
  // For checks that serve several ops: `otherwise` where the op has no such argument.
  int64_t get(std::string_view name, int64_t otherwise) const;

 private:
  Argument* at(std::string_view name) const;

  const c10::FunctionSchema& schema_;
  mutable std::vector<Argument> values_;
};

// A kernel that reads its arguments by name. It returns a tensor or Tensors: a list, or one tensor
// for each of several results.
using Kernel = c10::IValue (*)(const Given& given);

void push_results(const c10::FunctionSchema& schema, c10::IValue result, torch::jit::Stack* stack);

template <Kernel kernel>
void run_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  c10::IValue result = kernel(Given(op.schema(), torch::jit::last(*stack, count)));
  torch::jit::drop(*stack, count);
  push_results(op.schema(), std::move(result), stack);
}

template <Kernel kernel>
void implement(torch::Library& m, const char* op) {
  m.impl(op, torch::CppFunction::makeFromBoxedFunction<&run_kernel<kernel>>());
}

// An argument that is passed on by name.
struct With {
  With(const char* name, c10::IValue value) : name(name), value(std::move(value)) {}
  With(const char* name, const Argument& argument) : With(name, argument.value()) {}

  const char* name;
  c10::IValue value;
};

// An op that is called by the names of its arguments, through the dispatcher. `name` is a literal.
class Op {
 public:
  constexpr explicit Op(const char* name, const char* ns = "deepsp") : ns_(ns), name_(name) {}

  // Arguments that aren't listed have their defaults. Several results are one list of tensors.
  Argument operator()(at::ArrayRef<With> arguments) const;
  // Arguments that aren't listed are those of `given`, where it has any of the same name.
  Argument operator()(const Named& given, at::ArrayRef<With> arguments) const;

 private:
  Argument call(const Named* given, at::ArrayRef<With> arguments) const;

  const char* ns_;
  const char* name_;
};

// ------------------------------------------------------------------- autograd

// A differentiable call: in forward its tensors, and what is to be kept of them; in backward what
// was kept.
class Call : public Named {
 public:
  // None for tensors: only their number is kept.
  std::optional<c10::IValue> find(std::string_view name) const override;

  // Arguments that aren't tensors are kept, by their names in the schema; of tensors, how many.
  Argument operator[](const char* name) const { return Argument(kept(name)); }

  // What else a backward needs, in forward: keep it under a name of its own.
  void keep(const char* name, c10::IValue value);
  void keep_dtypes(const char* name, Dtypes dtypes);
  // Tensors for backward. Undefined ones stay so.
  void keep_tensors(Tensors tensors);
  Tensors kept_tensors() const;

  // The tensors that were given, in the order of the schema, with those of lists; arguments that
  // are None are left out. In forward only, as are the outputs.
  at::TensorList inputs() const { return inputs_; }
  at::TensorList outputs() const { return outputs_; }
  // How many were given, or for one argument; whether the gradient of one is asked for.
  size_t count() const;
  size_t count(const char* argument) const;
  bool wants(size_t input) const;
  // The same for the first `count` of them, as ops take it.
  std::vector<int64_t> wanted(size_t count) const;
  // The gradients of the inputs that are wanted, each at its input's index.
  Tensors placed(const Tensors& found, at::IntArrayRef wanted) const;
  // In forward: gradients that weren't computed stay undefined in backward. No zeros are made for
  // them.
  void leave_undefined();
  // In forward: all outputs but the first have no gradient.
  void only_first_is_differentiable();

 private:
  friend struct Differentiated;
  explicit Call(void* context) : context_(context) {}
  const std::string& op() const;
  int64_t saved_int(size_t what) const;
  // In the schema; null where it has none of that name.
  const c10::Argument* argument(std::string_view name) const;
  c10::IValue kept(std::string_view name) const;

  void* context_;  // torch::autograd::AutogradContext, whose header is large
  at::TensorList inputs_;
  at::TensorList outputs_;
};

// One gradient for every tensor that the call was given; fewer: none for the rest. Runs outside of
// autocast: gradients have the dtype of what they are gradients of, and a cast would read what is
// on its way. Made of ops, so that it traces and can be differentiated.
using Backward = Tensors (*)(const Call& call, const Tensors& gradients);
using Keep = void (*)(Call& call);

// The autograd kernel of an op: below autograd, the op itself; `keep` sees the call afterwards.
void differentiable(torch::Library& m, const char* op, Backward backward, Keep keep = nullptr);
// A gradient asked of the op raises.
void not_differentiable(torch::Library& m, const char* op);

using Names = std::vector<const char*>;

// An op whose backward is an op, too, and what they share, by name.
struct BackwardOp {
  Op op;                     // the backward
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

// ------------------------------------------------------------------- functionalization, autocast

// For a wait that returns views of its buffer: the alias is cut. A wait consumes its buffer, so
// nobody sees the difference.
void cuts_alias(torch::Library& m, const char* op);

}  // namespace deepsp
