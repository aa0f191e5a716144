#include "backward.h"

#include <algorithm>
#include <string_view>

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
