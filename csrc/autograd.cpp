// An op's autograd from a backward formula.

#include "op.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <deque>

namespace deepsp {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::jit::Stack;

namespace {

struct Formula {
  Formula(Backward backward, Keep keep) : backward(backward), keep(keep) {}

  Backward backward;
  Keep keep;
  // The op's, from its first call on: what names its arguments.
  std::atomic<const c10::FunctionSchema*> schema = nullptr;
};

// The formulas of all ops, filled while the library is loaded; a node of a graph says which is its
// own.
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
    Tensors found = formulas()[call.saved_int(kFormula)].backward(call, gradients);
    constexpr size_t others = 3;  // forward's arguments that aren't tensors
    found.resize(call.count() + others);
    return found;
  }
};

const std::string& Call::op() const {
  return formulas()[saved_int(kFormula)].schema.load()->name();
}

int64_t Call::saved_int(size_t what) const {
  return static_cast<AutogradContext*>(context_)->saved_data.at(kCall).toList().get(what).toInt();
}

const c10::Argument* Call::argument(std::string_view name) const {
  const auto& arguments = formulas()[saved_int(kFormula)].schema.load()->arguments();
  const auto found = std::find_if(
      arguments.begin(), arguments.end(),
      [&](const c10::Argument& argument) { return argument.name() == name; });
  return found == arguments.end() ? nullptr : &*found;
}

c10::IValue Call::kept(std::string_view name) const {
  const auto& data = static_cast<AutogradContext*>(context_)->saved_data;
  if (const c10::Argument* found = argument(name)) {
    const auto& all = formulas()[saved_int(kFormula)].schema.load()->arguments();
    return data.at(kCall).toList().get(kArguments + (found - all.data()));
  }
  return data.at(std::string(name));
}

std::optional<c10::IValue> Call::find(std::string_view name) const {
  const auto& data = static_cast<AutogradContext*>(context_)->saved_data;
  const c10::Argument* found = argument(name);
  const bool known =
      found ? !holds_tensors(*found->type()) : data.find(std::string(name)) != data.end();
  return known ? std::make_optional(kept(name)) : std::nullopt;
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
  return saved_int(kCount);
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

namespace {

// The place of a name; the number of names if it isn't among them.
size_t place_of(const Names& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) - names.begin();
}

// The place of an input among the tensors that the call was given; none: it was None.
std::optional<size_t> place_given(const BackwardOp& backward, const Call& call, const char* name) {
  const auto input = backward.inputs.begin() + place_of(backward.inputs, name);
  if (call.count(name) == 0) {
    return std::nullopt;
  }
  return std::count_if(
      backward.inputs.begin(), input, [&](const char* before) { return call.count(before) > 0; });
}

}  // namespace

void save_for(const BackwardOp& backward, Call& call) {
  Tensors saved;
  for (const char* name : backward.saved) {
    const size_t result = place_of(backward.results, name);
    if (result < backward.results.size()) {
      saved.push_back(result < call.outputs().size() ? call.outputs()[result] : at::Tensor());
    } else {
      const auto place = place_given(backward, call, name);
      saved.push_back(place ? call.inputs()[*place] : at::Tensor());
    }
  }
  call.keep_tensors(std::move(saved));
}

Tensors call_backward(const BackwardOp& backward, const Call& call, std::vector<With> values) {
  const Tensors saved = call.kept_tensors();
  std::vector<std::optional<size_t>> places;
  std::vector<int64_t> wanted;
  for (const char* name : backward.gradients) {
    places.push_back(place_given(backward, call, name));
    wanted.push_back(places.back() && call.wants(*places.back()));
  }
  for (size_t i = 0; i < saved.size(); ++i) {
    values.emplace_back(
        backward.saved[i], saved[i].defined() ? c10::IValue(saved[i]) : c10::IValue());
  }
  values.emplace_back("wanted", wanted);
  const Tensors found = backward.op(call, values);
  Tensors gradients(call.count());
  size_t next = 0;
  for (size_t i = 0; i < places.size(); ++i) {
    if (places[i] && (!backward.takes_wanted || wanted[i])) {
      gradients[*places[i]] = found[next++];
    }
  }
  return gradients;
}

}  // namespace deepsp
