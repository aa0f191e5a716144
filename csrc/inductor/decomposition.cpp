#include "decomposition.h"

#include "../common/wide.h"

#include <ATen/ops/cat.h>

namespace deepsp::inductor {

using torch::jit::Stack;

namespace {

// Ops that decompositions are made of (exchange/op.cpp).
constexpr const char* kParts[] = {
    "pack_blocks(Tensor[] inputs, SymInt[] num_heads, SymInt[] seq_lens, int chunk, int chunks, "
    "bool to_heads, int rank, int query_parts, int levels=1) -> Tensor",
    "merge_to_heads(Tensor buffer, SymInt[] num_heads, SymInt[] head_dims, SymInt batch, "
    "SymInt[] seq_lens, int chunk, int chunks, int rank, int query_parts, int levels=1) -> "
    "Tensor[]",
    "merge_to_seq(Tensor[] buffers, SymInt[] num_heads, SymInt[] head_dims, SymInt batch, "
    "SymInt[] seq_lens, int rank, bool tokens_first, int query_parts, int levels=1) -> Tensor[]"};

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
  for (const c10::OperatorName& name :
       dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
    if (name.getNamespace() == kNamespace) {
      const std::string op = name.name.substr(name.name.find("::") + 2);
      const auto& schema = dispatcher.findSchemaOrThrow(("deepsp::" + op).c_str(), "").schema();
      m.def(schema.cloneWithName(std::string(kNamespace) + "::" + op, ""));
    }
  }
  for (const char* schema : kParts) {
    m.def(schema);
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

at::Tensor waited(const at::Tensor& buffer, int64_t parts) {
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
  const at::ScalarType kept = reduce_dtype.value_or(wide_dtype(parts[0].scalar_type()));
  const at::ScalarType wide = wide_dtype(kept);
  at::Tensor sum = parts[0].to(wide).to(kept);
  for (size_t n = 1; n < parts.size(); ++n) {
    sum = sum.to(wide).add(parts[n].to(wide)).to(kept);
  }
  return sum.to(result_dtype);
}

}  // namespace deepsp::inductor
