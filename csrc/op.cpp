#include "op.h"

#include "common/checks.h"

#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <deque>
#include <map>

namespace deepsp {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::jit::Stack;

namespace {

// The tensors of a value, and of a list.
void append_tensors(const c10::IValue& value, Tensors& to) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) {
      to.push_back(value.toTensor());
    }
  } else if (value.isTensorList()) {
    for (const at::Tensor& x : value.toTensorVector()) {
      to.push_back(x);
    }
  }
}

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

struct Formula {
  Formula(Backward backward, Keep keep) : backward(backward), keep(keep) {}

  Backward backward;
  Keep keep;
  // The op's, from its first call on: what names its arguments.
  std::atomic<const c10::FunctionSchema*> schema = nullptr;
};

// Of all ops; a node of a graph says which is its own. Filled while the library is loaded.
std::deque<Formula>& formulas() {
  static auto* const all = new std::deque<Formula>;
  return *all;
}

bool holds_tensors(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::TensorType) {
    return true;
  }
  const auto contained = type.containedTypes();
  return !contained.empty() && holds_tensors(*contained[0]);
}

// What is kept. Empty lists become None: compiled autograd asks what they are lists of.
c10::IValue as_kept(c10::IValue value) {
  return value.isList() && value.toListRef().empty() ? c10::IValue() : value;
}

// One list is kept of each call: its formula, how many tensors it was given, and its arguments; in
// place of tensors, how many. A dictionary of the arguments would cost microseconds a call.
constexpr const char* kCall = "call";
constexpr size_t kFormula = 0;
constexpr size_t kCount = 1;
constexpr size_t kArguments = 2;

}  // namespace

Argument::operator Dtypes() const {
  return list(dtypes_, [&] {
    std::vector<at::ScalarType> dtypes;
    for (const c10::IValue& code : value_.toList().vec()) {  // boxed as integers
      dtypes.push_back(static_cast<at::ScalarType>(code.toInt()));
    }
    return dtypes;
  });
}

// ------------------------------------------------------------------- arguments by name

Argument* Given::at(std::string_view name) const {
  const auto& arguments = schema_.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == name) {
      return &values_[i];
    }
  }
  return nullptr;
}

Argument& Given::operator[](std::string_view name) const {
  Argument* found = at(name);
  TORCH_INTERNAL_ASSERT(found != nullptr, schema_.name(), " has no argument ", name);
  return *found;
}

std::optional<c10::IValue> Given::find(std::string_view name) const {
  const Argument* found = at(name);
  return found ? std::make_optional(found->value()) : std::nullopt;
}

int64_t Given::get(std::string_view name, int64_t otherwise) const {
  const Argument* found = at(name);
  return found ? static_cast<int64_t>(*found) : otherwise;
}

void push_results(const c10::FunctionSchema& schema, c10::IValue result, Stack* stack) {
  const size_t count = schema.returns().size();
  if (count == 1) {
    stack->push_back(std::move(result));
  } else if (count > 1) {
    const auto results =
        result.isTuple() ? result.toTuple()->elements().vec() : result.toListRef().vec();
    stack->insert(stack->end(), results.begin(), results.end());
  }
}

Argument NamedOp::operator()(at::ArrayRef<With> arguments) const {
  return call(nullptr, arguments);
}

Argument NamedOp::operator()(const Named& given, at::ArrayRef<With> arguments) const {
  return call(&given, arguments);
}

namespace {

// Looking an op up takes as long as a small op does. Names are literals: an address finds it again.
c10::OperatorHandle handle_of(const char* ns, const char* name) {
  thread_local std::map<std::pair<const char*, const char*>, c10::OperatorHandle> handles;
  const auto known = handles.find({ns, name});
  if (known != handles.end()) {
    return known->second;
  }
  const std::string qualified = std::string(ns) + "::" + name;
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(qualified.c_str(), "");
  handles.emplace(std::pair(ns, name), op);
  return op;
}

// An empty list that was kept as None.
c10::IValue as_given(c10::IValue value, const c10::Type& type) {
  if (!value.isNone() || type.kind() != c10::TypeKind::ListType) {
    return value;
  }
  return type.castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType
             ? c10::IValue(Tensors())
             : c10::IValue(std::vector<int64_t>());
}

}  // namespace

Argument NamedOp::call(const Named* given, at::ArrayRef<With> arguments) const {
  const c10::OperatorHandle op = handle_of(ns_, name_);
  Stack stack;
  stack.reserve(op.schema().arguments().size());
  size_t used = 0;
  for (const c10::Argument& argument : op.schema().arguments()) {
    const auto listed = std::find_if(arguments.begin(), arguments.end(), [&](const With& with) {
      return argument.name() == with.name;
    });
    std::optional<c10::IValue> value;
    if (listed != arguments.end()) {
      value = listed->value;
      ++used;
    } else if (given != nullptr) {
      value = given->find(argument.name());
    }
    value = value.has_value() ? value : argument.default_value();
    TORCH_INTERNAL_ASSERT(value.has_value(), name_, " is called without ", argument.name());
    stack.push_back(as_given(std::move(*value), *argument.real_type()));
  }
  TORCH_INTERNAL_ASSERT(used == arguments.size(), name_, " is called with an unknown argument");
  op.callBoxed(&stack);
  if (stack.size() == 1) {
    return Argument(std::move(stack[0]));
  }
  Tensors results;
  for (const c10::IValue& value : stack) {
    append_tensors(value, results);
  }
  return Argument(std::move(results));
}

// ------------------------------------------------------------------- autograd

struct Differentiated : Function<Differentiated> {
  static Tensors forward(
      AutogradContext* ctx,
      at::TensorList inputs,
      const c10::OperatorHandle& op,
      Stack* stack,
      int64_t formula) {
    const auto given = torch::jit::last(*stack, op.schema().arguments().size());
    c10::impl::GenericList kept(c10::AnyType::get());
    kept.reserve(kArguments + given.size());
    kept.push_back(formula);
    kept.push_back(static_cast<int64_t>(inputs.size()));
    for (const c10::IValue& value : given) {
      kept.push_back(
          value.isTensorList() ? c10::IValue(static_cast<int64_t>(value.toTensorList().size()))
          : value.isTensor()   ? c10::IValue(static_cast<int64_t>(value.toTensor().defined()))
                               : as_kept(value));
    }
    ctx->saved_data[kCall] = std::move(kept);
    formulas()[formula].schema = &op.schema();
    {
      at::AutoDispatchBelowADInplaceOrView guard;
      op.callBoxed(stack);
    }
    Tensors outputs;
    for (const c10::IValue& value : torch::jit::last(*stack, op.schema().returns().size())) {
      append_tensors(value, outputs);
    }
    if (const Keep keep = formulas()[formula].keep) {
      Call call(ctx);
      call.inputs_ = inputs;
      call.outputs_ = outputs;
      keep(call);
    }
    return outputs;
  }

  static Tensors backward(AutogradContext* ctx, Tensors gradients) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
    const Call call(ctx);
    // All nodes have one name: what ran is said here.
    RECORD_FUNCTION(call.op() + "_backward", {});
    Tensors found = formulas()[call.to_text(kFormula)].backward(call, gradients);
    constexpr size_t others = 3;  // forward's arguments that aren't tensors
    found.resize(call.count() + others);
    return found;
  }
};

const std::string& Call::op() const {
  return formulas()[to_text(kFormula)].schema.load()->name();
}

int64_t Call::to_text(size_t what) const {
  return static_cast<AutogradContext*>(context_)->saved_data.at(kCall).toList().get(what).toInt();
}

c10::IValue Call::kept(const char* name) const {
  const auto& data = static_cast<AutogradContext*>(context_)->saved_data;
  const auto& arguments = formulas()[to_text(kFormula)].schema.load()->arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == name) {
      return data.at(kCall).toList().get(kArguments + i);
    }
  }
  return data.at(name);
}

std::optional<c10::IValue> Call::find(std::string_view name) const {
  const auto& data = static_cast<AutogradContext*>(context_)->saved_data;
  const auto& arguments = formulas()[to_text(kFormula)].schema.load()->arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == name) {
      return holds_tensors(*arguments[i].type())
                 ? std::nullopt
                 : std::make_optional(data.at(kCall).toList().get(kArguments + i));
    }
  }
  const auto other = data.find(std::string(name));
  return other == data.end() ? std::nullopt : std::make_optional(other->second);
}

void Call::keep(const char* name, c10::IValue value) {
  static_cast<AutogradContext*>(context_)->saved_data[name] = as_kept(std::move(value));
}

void Call::keep_dtypes(const char* name, Dtypes dtypes) {
  std::vector<int64_t> codes;  // IValues know no lists of dtypes
  for (const at::ScalarType dtype : dtypes) {
    codes.push_back(static_cast<int64_t>(dtype));
  }
  keep(name, c10::IValue(codes));
}

void Call::keep_tensors(Tensors tensors) {
  static_cast<AutogradContext*>(context_)->save_for_backward(std::move(tensors));
}

Tensors Call::kept_tensors() const {
  return static_cast<AutogradContext*>(context_)->get_saved_variables();
}

size_t Call::count() const {
  return to_text(kCount);
}

size_t Call::count(const char* argument) const {
  const c10::IValue value = kept(argument);
  return value.isNone() ? 0 : value.toInt();
}

bool Call::wants(size_t input) const {
  return input < count() && static_cast<AutogradContext*>(context_)->needs_input_grad(input);
}

std::vector<int64_t> Call::wanted(size_t count) const {
  std::vector<int64_t> result;
  for (size_t i = 0; i < count; ++i) {
    result.push_back(wants(i));
  }
  return result;
}

Tensors Call::placed(const Tensors& found, at::IntArrayRef wanted) const {
  Tensors gradients(count());
  size_t next = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i]) {
      gradients[i] = found[next++];
    }
  }
  return gradients;
}

void Call::only_first_is_differentiable() {
  static_cast<AutogradContext*>(context_)->mark_non_differentiable(outputs_.slice(1).vec());
}

void Call::leave_undefined() {
  static_cast<AutogradContext*>(context_)->set_materialize_grads(false);
}

namespace {

struct AutogradKernel : c10::OperatorKernel {
  int64_t formula;

  explicit AutogradKernel(int64_t formula) : formula(formula) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) const {
    Tensors inputs;
    for (const c10::IValue& value : torch::jit::last(*stack, op.schema().arguments().size())) {
      append_tensors(value, inputs);
    }
    const bool recording = at::GradMode::is_enabled();
    const bool plain = std::none_of(inputs.begin(), inputs.end(), [&](const at::Tensor& x) {
      return (recording && x.requires_grad()) || x._fw_grad(/*level=*/0).defined();
    });
    if (plain) {
      at::AutoDispatchBelowADInplaceOrView guard;
      return op.callBoxed(stack);
    }
    // The results on the stack were made below autograd.
    Tensors outputs = Differentiated::apply(at::TensorList(inputs), op, stack, formula);
    size_t next = 0;
    change_tensors(torch::jit::last(*stack, op.schema().returns().size()), [&](const at::Tensor&) {
      return outputs[next++];
    });
  }
};

void cut_alias(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  namespace functional = at::functionalization::impl;
  change_tensors(torch::jit::last(*stack, op.schema().arguments().size()), [](const at::Tensor& x) {
    if (!functional::isFunctionalTensor(x)) {
      return x;
    }
    functional::sync(x);
    return functional::from_functional_tensor(x);
  });
  {
    at::AutoDispatchSkipFunctionalize guard;
    op.callBoxed(stack);
  }
  change_tensors(torch::jit::last(*stack, op.schema().returns().size()), [](const at::Tensor& x) {
    return functional::to_functional_tensor(x);
  });
}

// Linear layers and attention compute in the lower precision under autocast, and so much travels.
template <c10::DeviceType device>
void autocast(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard guard{
      c10::DispatchKeySet(at::autocast::get_autocast_dispatch_key_from_device_type(device))};
  const auto& arguments = op.schema().arguments();
  const auto given = torch::jit::last(*stack, arguments.size());
  at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  const bool arriving = arguments[0].name() == "buffers";
  if (arriving) {
    // What is on its way can't be cast any more: the others follow it.
    const auto buffers = given[0].toTensorVector();
    check_buffers(buffers);
    dtype = buffers[0].scalar_type();
  }
  // Weights of tokens are numbers to count by, and stay as exact as they are.
  const bool weighs = arguments.back().name() == "token_weights";
  const auto cast = given.slice(arriving, given.size() - arriving - weighs);
  change_tensors(cast, [&](const at::Tensor& x) {
    return at::autocast::cached_cast(dtype, x, device);  // leaves integers as they are
  });
  op.callBoxed(stack);
}

template <c10::DeviceType device>
void register_autocast(torch::Library& m) {
  for (const char* op :
       {"all_gather_matmul", "_attention_of_cell", "distributed_attention", "heads_to_output",
        "heads_to_output_wait", "linear_cross_entropy", "matmul_reduce_scatter",
        "project_to_heads_start", "token_log_probs"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&autocast<device>>());
  }
}

}  // namespace

void differentiable(torch::Library& m, const char* op, Backward backward, Keep keep) {
  const auto formula = static_cast<int64_t>(formulas().size());
  formulas().emplace_back(backward, keep);
  m.impl(
      op, torch::CppFunction::makeFromBoxedKernel(
              c10::BoxedKernel::makeFromFunctor(std::make_unique<AutogradKernel>(formula))));
}

void not_differentiable(torch::Library& m, const char* op) {
  m.impl(op, torch::autograd::autogradNotImplementedFallback());
}

void cuts_alias(torch::Library& m, const char* op) {
  m.impl(op, torch::CppFunction::makeFromBoxedFunction<&cut_alias>());
}

TORCH_LIBRARY_IMPL(deepsp, AutocastCPU, m) {
  register_autocast<at::kCPU>(m);
}

TORCH_LIBRARY_IMPL(deepsp, AutocastCUDA, m) {
  register_autocast<at::kCUDA>(m);
}

}  // namespace deepsp
