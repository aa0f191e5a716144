#pragma once
// What a rank can see of a wrong call from its own arguments. All raise ValueError, before
// anything is sent.

#include "../layout/shards.h"
#include "../op.h"

namespace deepsp {

using SymShards = ShardLayout<c10::SymInt>;

// The elements of a shape.
c10::SymInt product(c10::SymIntArrayRef sizes);

// In bytes, of which `item` are one of what the layout counts.
ShardLayout<int64_t> concrete(const SymShards& layout, int64_t item);
std::vector<std::vector<int64_t>> concrete(const std::vector<SymInts>& shapes);

// What is summed here: float64, float32, bfloat16 or float16. `what` names it in the message, to
// which `float8` is added for such dtypes.
void check_float(at::ScalarType dtype, std::string_view what, const char* float8 = "");
void check_reduce_dtype(OptionalDtype reduce_dtype);
void check_dense(const at::Tensor& x, const std::string& name);
// "replicated", or "partial": whether it is the second.
bool is_partial(std::string_view grad);

// ------------------------------------------------------------------- lists, along dimension 0

// Layouts of lists count bytes.

// The shapes of several tensors without dimension 0, as the ops pass them.
struct RowShapes {
  SymInts shapes;             // one after another
  std::vector<int64_t> dims;  // how many of them each tensor has

  explicit RowShapes(at::TensorList tensors);
};

// Their shapes, with the rows of all ranks, or with rank `of`'s.
std::vector<SymInts> shapes_of(
    const SymShards& layout,
    c10::SymIntArrayRef row_shapes,
    at::IntArrayRef row_dims,
    std::optional<int64_t> of = std::nullopt);

std::vector<at::ScalarType> dtypes_of(at::TensorList tensors);

// Shards [sizes[i][rank], ...], that will have dtypes[i] on the wire. `single`: messages name it
// without a number.
SymShards check_shards(
    at::TensorList shards,
    c10::SymIntArrayRef sizes,
    Dtypes dtypes,
    int64_t rank,
    bool single = false);
// The same for a target of one byte an element, which check_float refuses.
SymShards check_float8(
    at::TensorList shards, c10::SymIntArrayRef sizes, at::ScalarType dtype, int64_t rank);

// Full inputs [sum of sizes[i], ...].
SymShards check_full(
    at::TensorList inputs, c10::SymIntArrayRef sizes, int64_t rank, bool single = false);

// What a wait says of the buffer that it is given.
SymShards check_wait(
    const at::Tensor& buffer,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef row_shapes,
    at::IntArrayRef row_dims,
    Dtypes dtypes,
    int64_t rank);

// What the sums of a reduce-scatter are to become.
void check_results(
    Dtypes dtypes,
    OptionalDtype reduce_dtype,
    OptionalDtype backend_sums,
    size_t tensors,
    bool single = false);
// In which dtype they are kept: one of the two, or none.
void check_sum_dtypes(OptionalDtype reduce_dtype, OptionalDtype backend_sums);

// The widest of the dtypes on the wire is the buffer's.
at::ScalarType buffer_dtype(Dtypes dtypes);
c10::SymInt buffer_elements(const SymShards& layout, Dtypes dtypes);

// The same blocks in `dtype`, as the backend sums them: in slots of whole 16 bytes, each of this
// size.
template <class Int>
ShardLayout<Int> in_dtype(ShardLayout<Int> layout, Dtypes wire_dtypes, at::ScalarType dtype) {
  for (size_t i = 0; i < layout.size(); ++i) {
    const auto item = static_cast<int64_t>(c10::elementSize(wire_dtypes[i]));
    layout.tensors[i].inner =
        layout[i].inner / item * static_cast<int64_t>(c10::elementSize(dtype));
  }
  return layout;
}
template <class Int>
Int even_slot(const ShardLayout<Int>& layout) {
  return (layout.slot() + 15) / 16 * 16;
}

// ------------------------------------------------------------------- one tensor, along a dimension

// These layouts count elements.

// dim, counted from the front.
int64_t wrap_dim(int64_t dim, int64_t dims);

// input is local, or full.
SymShards check_part(const at::Tensor& input, int64_t dim, c10::SymIntArrayRef sizes, int64_t rank);
SymShards check_entire(
    const at::Tensor& input, int64_t dim, c10::SymIntArrayRef sizes, int64_t rank);
// What a wait says of the buffer that it is given; shape: the full tensor's.
SymShards check_buffer(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    int64_t rank);

// `shape` with another size in dim.
SymInts resized(c10::SymIntArrayRef shape, int64_t dim, const c10::SymInt& length);
// The shape of the full tensor, of which `shape` is local.
SymInts entire_shape(c10::SymIntArrayRef shape, int64_t dim, c10::SymIntArrayRef sizes);

}  // namespace deepsp
