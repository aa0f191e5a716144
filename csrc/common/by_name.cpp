#include "by_name.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>

namespace deepsp {
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

using Stack = torch::jit::Stack;

// To look an op up takes as long as a small op. Names are literals, so an address finds it again.
c10::OperatorHandle handle_of(const char* name) {
  thread_local std::unordered_map<const char*, c10::OperatorHandle> handles;
  const auto known = handles.find(name);
  if (known != handles.end()) {
    return known->second;
  }
  const std::string qualified = std::string("deepsp::") + name;
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(qualified.c_str(), "");
  handles.emplace(name, op);
  return op;
}

// `rest`: an argument that isn't among `values`.
template <class Rest>
c10::IValue call_op(const char* name, const NamedValues& values, const Rest& rest) {
  const c10::OperatorHandle op = handle_of(name);
  Stack stack;
  stack.reserve(op.schema().arguments().size());
  for (const c10::Argument& argument : op.schema().arguments()) {
    const auto named = std::find_if(values.begin(), values.end(), [&](const auto& value) {
      return argument.name() == value.first;
    });
    c10::IValue value = named != values.end() ? named->second : rest(argument);
    // A call saves an empty list as None.
    if (value.isNone() && argument.type()->kind() == c10::TypeKind::ListType) {
      value = c10::impl::GenericList(argument.type()->containedType(0));
    }
    stack.push_back(std::move(value));
  }
  op.callBoxed(stack);
  return stack.size() == 1 ? std::move(stack[0]) : c10::ivalue::Tuple::create(std::move(stack));
}

}  // namespace

c10::IValue call_by_name(const char* op, const NamedValues& values) {
  return call_op(op, values, [&](const c10::Argument& argument) {
    TORCH_INTERNAL_ASSERT(argument.default_value().has_value(), op, ": ", argument.name());
    return *argument.default_value();
  });
}

c10::IValue call_by_name(const char* op, const NamedValues& values, const Given& given) {
  return call_op(op, values, [&](const c10::Argument& argument) {
    return given[argument.name().c_str()].value();
  });
}

c10::IValue call_by_name(const char* op, const NamedValues& values, const Call& call) {
  return call_op(op, values, [&](const c10::Argument& argument) {
    return call[argument.name().c_str()].value();
  });
}

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

Tensors call_backward(const BackwardOp& backward, const Call& call, NamedValues values) {
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
  const Tensors found = call_by_name(backward.op, values, call).toTensorVector();
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
