// The ops that are made of others: a start and a wait make one op, and an op on one tensor calls
// that on a list. They check everything before the start sends.

#include "../op.h"
#include "checks.h"

namespace deepsp {
namespace {

// Calls an op that returns a tensor, or a list, with `values`, and with `given` for the rest.
at::Tensor one(const char* op, const Given& given, at::ArrayRef<With> values = {}) {
  return Op(op)(given, values);
}
Tensors list(const char* op, const Given& given, at::ArrayRef<With> values) {
  return Op(op)(given, values);
}

c10::IValue gather_cast_coalesced(const Given& given) {
  const at::TensorList shards = given["shards"];
  if (shards.empty()) {  // no kernel is called
    check_shards(shards, given["sizes"], given["dtypes"], given["rank"]);
  }
  const at::Tensor buffer = one("_gather_cast_coalesced_start", given);
  const RowShapes rows(shards);
  return list(
      "_gather_cast_coalesced_wait", given,
      {{"buffer", buffer}, {"row_shapes", rows.shapes}, {"row_dims", rows.dims}});
}

// A list of one dtype, as ops take it.
c10::IValue list_of(const Argument& dtype) {
  return std::vector<int64_t>{dtype};
}

c10::IValue gather_cast_start(const Given& given) {
  const at::Tensor shard = given["shard"];
  const at::ScalarType dtype = *OptionalDtype(given["dtype"]);
  check_shards(shard, given["sizes"], dtype, given["rank"], /*single=*/true);
  return one(
      "_gather_cast_coalesced_start", given,
      {{"shards", Tensors{shard}}, {"dtypes", list_of(given["dtype"])}});
}

c10::IValue gather_cast_wait(const Given& given) {
  const c10::SymIntArrayRef row_shape = given["row_shape"];
  return list(
      "_gather_cast_coalesced_wait", given,
      {{"row_shapes", row_shape},
       {"row_dims", std::vector<int64_t>{static_cast<int64_t>(row_shape.size())}},
       {"dtypes", list_of(given["dtype"])}})[0];
}

c10::IValue gather_cast(const Given& given) {
  const at::Tensor buffer = one("gather_cast_start", given);
  return one(
      "gather_cast_wait", given,
      {{"buffer", buffer}, {"row_shape", RowShapes(at::Tensor(given["shard"])).shapes}});
}

Tensors scattered_sums(
    const Given& given, at::TensorList inputs, const Argument& dtypes, bool single) {
  if (single || inputs.empty()) {  // the start names it by a number, or isn't called
    check_full(inputs, given["sizes"], given["rank"], single);
  }
  check_results(dtypes, given["reduce_dtype"], given["backend_sums"], inputs.size(), single);
  const at::Tensor buffer =
      one("_reduce_scatter_cast_coalesced_start", given, {{"inputs", inputs}});
  const RowShapes rows(inputs);
  std::vector<int64_t> wire;
  for (const at::Tensor& x : inputs) {
    wire.push_back(static_cast<int64_t>(x.scalar_type()));
  }
  return list(
      "_reduce_scatter_cast_coalesced_wait", given,
      {{"buffer", buffer},
       {"row_shapes", rows.shapes},
       {"row_dims", rows.dims},
       {"wire_dtypes", wire},
       {"dtypes", dtypes.value()}});
}

c10::IValue reduce_scatter_cast(const Given& given) {
  const Argument dtypes(list_of(given["dtype"]));
  return scattered_sums(given, at::Tensor(given["input"]), dtypes, /*single=*/true)[0];
}

c10::IValue reduce_scatter_cast_coalesced(const Given& given) {
  return scattered_sums(given, given["inputs"], given["dtypes"], /*single=*/false);
}

c10::IValue all_gather(const Given& given) {
  const at::Tensor input = given["input"];
  check_part(input, given["dim"], given["sizes"], given["rank"]);
  return list(
      "all_gather_wait", given,
      {{"buffer", one("all_gather_start", given)},
       {"shape", entire_shape(input.sym_sizes(), given["dim"], given["sizes"])}})[0];
}

c10::IValue reduce_scatter(const Given& given) {
  check_reduce_dtype(given["reduce_dtype"]);
  const at::Tensor buffer = one("reduce_scatter_start", given);
  return one(
      "reduce_scatter_wait", given,
      {{"buffer", buffer}, {"shape", at::Tensor(given["input"]).sym_sizes()}});
}

c10::IValue scatter(const Given& given) {
  const at::Tensor input = given["input"];
  const int64_t dim = given["dim"], rank = given["rank"];
  if (is_partial(given["grad"])) {
    const Shard<c10::SymInt> part = check_entire(input, dim, given["sizes"], rank)[0];
    return input.narrow_symint(dim, part.begin(rank), part.sizes[rank])
        .clone(at::MemoryFormat::Contiguous);
  }
  return list(
      "scatter_wait", given,
      {{"buffer", one("scatter_start", given)}, {"shape", input.sym_sizes()}})[0];
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeImplicitAutograd, m) {
  implement<gather_cast>(m, "gather_cast");
  implement<gather_cast_start>(m, "gather_cast_start");
  implement<gather_cast_wait>(m, "gather_cast_wait");
  implement<gather_cast_coalesced>(m, "gather_cast_coalesced");
  implement<reduce_scatter_cast>(m, "reduce_scatter_cast");
  implement<reduce_scatter_cast_coalesced>(m, "_reduce_scatter_cast_coalesced");
  implement<all_gather>(m, "all_gather");
  implement<reduce_scatter>(m, "reduce_scatter");
  implement<scatter>(m, "scatter");
}

}  // namespace deepsp
