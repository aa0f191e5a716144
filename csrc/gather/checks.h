#pragma once
// What a rank can see of a wrong call from its own arguments. All raise ValueError, before
// anything is sent.

#include "../layout/shards.h"
#include "ops.h"

#include <ATen/core/Tensor.h>

#include <string_view>
#include <vector>

namespace deepsp {

using SymShardLayout = ShardLayout<c10::SymInt>;

// The shapes of several tensors without dimension 0, as the ops pass them.
struct RowShapes {
  std::vector<c10::SymInt> shapes;  // one after another
  std::vector<int64_t> dims;        // how many of them each tensor has

  explicit RowShapes(at::TensorList tensors);
};

std::vector<at::ScalarType> dtypes_of(at::TensorList tensors);

// float64, float32, bfloat16 or float16. `what` names it in the message.
void check_float(at::ScalarType dtype, std::string_view what);

// Shards [sizes[i][rank], ...], that will have dtypes[i] on the wire. `name` is what
// messages call them; a single one goes without its number.
SymShardLayout check_shards(
    at::TensorList shards,
    c10::SymIntArrayRef sizes,
    Dtypes dtypes,
    int64_t rank,
    bool single = false);
// The same for a target of one byte an element, which check_float refuses.
SymShardLayout check_float8(
    at::TensorList shards, c10::SymIntArrayRef sizes, at::ScalarType dtype, int64_t rank);

// Whole inputs [sum of sizes[i], ...].
SymShardLayout check_whole(
    at::TensorList inputs, c10::SymIntArrayRef sizes, int64_t rank, bool single = false);

// What a wait says of the buffer that it is given.
SymShardLayout check_wait(
    const at::Tensor& buffer,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef row_shapes,
    at::IntArrayRef row_dims,
    Dtypes dtypes,
    int64_t rank);

// What the sums of a reduce-scatter are to become.
void check_results(Dtypes dtypes, std::optional<at::ScalarType> reduce_dtype, size_t tensors);

// The shape of tensor i with that many rows.
std::vector<c10::SymInt> shape_of(
    const c10::SymInt& rows, c10::SymIntArrayRef row_shapes, at::IntArrayRef row_dims, size_t i);

// The widest of the dtypes on the wire is the buffer's.
at::ScalarType buffer_dtype(Dtypes dtypes);
c10::SymInt buffer_elements(const SymShardLayout& layout, Dtypes dtypes);

ShardLayout<int64_t> concrete(const SymShardLayout& layout);

}  // namespace deepsp
