#include "decomposition.h"

#include <ATen/ops/cat.h>

namespace deepsp::inductor {

using torch::jit::Stack;

namespace {

constexpr const char* kNamespace = "deepsp_inductor";

at::Tensor call(const char* op, Stack arguments) {
  // Boxed: the type of group_name differs between versions of torch.
  c10::Dispatcher::singleton()
      .findSchemaOrThrow(("_c10d_functional::" + std::string(op)).c_str(), "")
      .callBoxed(arguments);
  return arguments[0].toTensor();
}

}  // namespace

void define_decompositions() {
  static torch::Library m(torch::Library::DEF, kNamespace, std::nullopt, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& op :
       dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
    if (op.getNamespace() == kNamespace) {
      const std::string name = "deepsp" + op.name.substr(op.name.find("::"));
      m.def(dispatcher.findSchemaOrThrow(name.c_str(), "").schema().cloneWithName(op.name, ""));
    }
  }
}

at::Tensor launch(
    const char* collective,
    int64_t parts,
    const at::Tensor& sent,
    std::vector<c10::IValue> how,
    std::string_view group_name) {
  if (parts == 1) {
    return sent.clone();
  }
  how.insert(how.begin(), sent.contiguous());
  how.emplace_back(group_name);
  return call(collective, std::move(how));
}

at::Tensor landed(const at::Tensor& buffer, int64_t parts) {
  return parts == 1 ? buffer : call("wait_tensor", {buffer});
}

bool is_zero(const c10::SymInt& size) {
  return TORCH_STATICALLY_KNOWN_TRUE(size.sym_eq(0));
}

at::Tensor joined(const Tensors& tensors, int64_t dim) {
  return tensors.size() == 1 ? tensors[0] : at::cat(tensors, dim);
}

at::Tensor sum_in_order(
    const Tensors& parts, OptionalDtype reduce_dtype, at::ScalarType result_dtype) {
  const auto wide = [](at::ScalarType dtype) {
    return dtype == at::kDouble ? at::kDouble : at::kFloat;
  };
  const at::ScalarType kept = reduce_dtype.value_or(wide(parts[0].scalar_type()));
  at::Tensor sum = parts[0].to(wide(kept)).to(kept);
  for (size_t n = 1; n < parts.size(); ++n) {
    sum = sum.to(wide(kept)).add(parts[n].to(wide(kept))).to(kept);
  }
  return sum.to(result_dtype);
}

}  // namespace deepsp::inductor
