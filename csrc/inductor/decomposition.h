#pragma once
// The ops as Inductor sees them: aten ops and collectives of _c10d_functional, which it knows as
// asynchronous. An op's decomposition is an op of the same name and schema in the namespace
// deepsp_inductor, which only Inductor calls, while it traces.

#include "../op.h"

namespace deepsp::inductor {

constexpr const char* kNamespace = "deepsp_inductor";

// To be called when all schemas and all decompositions are registered.
void define_decompositions();

// Launches a collective: what it returns is in flight until waited() is called. In a group of one
// it is a copy, for an op never returns its input itself.
at::Tensor launch(
    const char* collective,
    int64_t parts,
    const at::Tensor& sent,
    std::vector<c10::IValue> how,
    std::string_view group_name);
at::Tensor waited(const at::Tensor& buffer, int64_t parts);

// Whether a size is known to be zero. Not size == 0: that would tie the graph to lengths where it
// happens to be.
bool is_zero(const c10::SymInt& size);

// at::cat, where there is something to put together.
at::Tensor joined(const Tensors& tensors, int64_t dim = 0);

// What the ranks sent, added up in their order as the kernels do: in float32 (float64 for float64),
// or rounded to reduce_dtype after every step.
at::Tensor sum_in_order(
    const Tensors& parts, OptionalDtype reduce_dtype, at::ScalarType result_dtype);

}  // namespace deepsp::inductor
