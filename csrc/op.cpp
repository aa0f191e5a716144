#include "op.h"

#include "common/checks.h"

#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <map>

namespace deepsp {

using torch::jit::Stack;

// ------------------------------------------------------------------- arguments by name

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

Argument::operator Dtypes() const {
  return list(&Lists::dtypes, [&] {
    std::vector<at::ScalarType> dtypes;
    for (const c10::IValue& code : value_.toList().vec()) {  // boxed as integers
      dtypes.push_back(static_cast<at::ScalarType>(code.toInt()));
    }
    return dtypes;
  });
}

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

Argument Op::operator()(at::ArrayRef<With> arguments) const {
  return call(nullptr, arguments);
}

Argument Op::operator()(const Named& given, at::ArrayRef<With> arguments) const {
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

Argument Op::call(const Named* given, at::ArrayRef<With> arguments) const {
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

// ------------------------------------------------------------------- functionalization, autocast

namespace {

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

// Linear layers and attention compute in the lower precision under autocast, and so much is sent.
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
       {"all_gather_matmul", "_attention_of_cell", "distributed_attention",
        "distributed_attention_with_lse", "heads_to_output", "_heads_to_output_wait",
        "linear_cross_entropy", "linear_kl", "matmul_reduce_scatter", "_project_to_heads_start",
        "token_log_probs"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&autocast<device>>());
  }
}

}  // namespace

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
