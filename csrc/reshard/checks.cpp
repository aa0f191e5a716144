#include "checks.h"

#include "../common/checks.h"

#include <algorithm>
#include <numeric>

namespace deepsp {
c10::SymInt product(c10::SymIntArrayRef sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), c10::SymInt(1), std::multiplies<>());
}

namespace {

c10::SymInt total(c10::SymIntArrayRef sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), c10::SymInt(0));
}

std::string name_of(const char* name, size_t i, bool single) {
  return single ? name : std::string(name) + "s[" + std::to_string(i) + "]";
}

// The number of ranks that sizes speaks of.
int64_t check_sizes(c10::SymIntArrayRef sizes, size_t tensors, int64_t rank, const char* name) {
  TORCH_CHECK_VALUE(
      tensors > 0, "expected ", name, "s to have at least one tensor, got an empty list");
  TORCH_CHECK_VALUE(
      !sizes.empty() && sizes.size() % tensors == 0,
      "expected sizes to have one entry for each rank of the group and each of the ", tensors, " ",
      name, "s, got ", sizes.size());
  const int64_t parts = static_cast<int64_t>(sizes.size() / tensors);
  check_rank(rank, parts, " in sizes");
  for (size_t n = 0; n < sizes.size(); ++n) {
    check_at_least(sizes[n], 0, "sizes[", n, "]");
    check_fits(sizes[n], "sizes");
  }
  return parts;
}

void check_tensor(
    const at::Tensor& x, const at::Tensor& first, const std::string& name, const char* first_name) {
  check_dense(x, name);
  check_float(x.scalar_type(), name);
  TORCH_CHECK_VALUE(
      x.dim() > 0, "expected ", name,
      " to have at least one dimension, whose rows are sharded, got a scalar; view it as [1]");
  check_device(x, name, first, first_name);
}

SymShards layout_of(
    c10::SymIntArrayRef sizes, int64_t parts, const SymInts& row_bytes, int64_t rank) {
  SymShards layout{{}, rank};
  for (size_t i = 0; i < row_bytes.size(); ++i) {
    layout.tensors.push_back({1, sizes.slice(i * parts, parts).vec(), row_bytes[i]});
    check_fits({layout[i].begin(parts), row_bytes[i]}, "sizes");
  }
  return layout;
}

c10::SymInt row_bytes_of(c10::SymIntArrayRef row, at::ScalarType dtype, const char* name) {
  check_fits(row, name);
  return product(row) * static_cast<int64_t>(c10::elementSize(dtype));
}

SymShards check_rows(
    at::TensorList shards, c10::SymIntArrayRef sizes, Dtypes dtypes, int64_t rank, bool single) {
  const int64_t parts = check_sizes(sizes, shards.size(), rank, "shard");
  SymInts row_bytes;
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string name = name_of("shard", i, single);
    check_tensor(shards[i], shards[0], name, "shards[0]");
    const size_t mine = i * parts + rank;
    TORCH_CHECK_VALUE(
        shards[i].sym_size(0) == sizes[mine], "expected ", name, " to have ", sizes[mine],
        " rows, which is sizes[", mine, "], this rank's entry, got ", shards[i].sym_size(0));
    row_bytes.push_back(row_bytes_of(shards[i].sym_sizes().slice(1), dtypes[i], "a row"));
  }
  return layout_of(sizes, parts, row_bytes, rank);
}

void check_dtypes(Dtypes dtypes, size_t tensors, const char* name, bool single) {
  TORCH_CHECK_VALUE(
      dtypes.size() == tensors, "expected dtypes to have one entry for each of the ", tensors, " ",
      name, ", got ", dtypes.size());
  for (size_t i = 0; i < dtypes.size(); ++i) {
    check_float(dtypes[i], name_of("dtype", i, single), "; use gather_cast_float8 for float8");
  }
}

// The layout of one tensor that is sharded along any dimension.
SymShards layout_along(
    c10::SymIntArrayRef shape, int64_t dim, c10::SymIntArrayRef sizes, int64_t rank) {
  check_fits(entire_shape(shape, dim, sizes), "sizes");
  c10::SymInt outer = product(shape.slice(0, dim));
  c10::SymInt inner = product(shape.slice(dim + 1));
  if (sizes.size() == 1) {  // nothing is shared out: one block, wherever the dimension is
    inner = outer * inner;
    outer = 1;
  }
  return {{{outer, sizes.vec(), inner}}, rank};
}

}  // namespace

ShardLayout<int64_t> concrete(const SymShards& layout, int64_t item) {
  ShardLayout<int64_t> result{{}, layout.rank};
  for (const Shard<c10::SymInt>& shard : layout.tensors) {
    result.tensors.push_back(
        {shard.outer.guard_int(__FILE__, __LINE__), ints(shard.sizes),
         shard.inner.guard_int(__FILE__, __LINE__) * item});
  }
  return result;
}

std::vector<std::vector<int64_t>> concrete(const std::vector<SymInts>& shapes) {
  std::vector<std::vector<int64_t>> result;
  for (const SymInts& shape : shapes) {
    result.push_back(ints(shape));
  }
  return result;
}

void check_float(at::ScalarType dtype, std::string_view what, const char* float8) {
  TORCH_CHECK_VALUE(
      is_summable(dtype), "expected ", what, " to be float64, float32, bfloat16 or float16, got ",
      dtype_name(dtype), c10::isFloat8Type(dtype) ? float8 : "");
}

void check_dense(const at::Tensor& x, const std::string& name) {
  TORCH_CHECK_VALUE(
      x.layout() == at::kStrided, "expected ", name, " to be a dense tensor, got layout ",
      x.layout());
}

void check_reduce_dtype(OptionalDtype reduce_dtype) {
  if (reduce_dtype) {
    check_float(*reduce_dtype, "reduce_dtype");
  }
}

bool is_partial(std::string_view grad) {
  TORCH_CHECK_VALUE(
      grad == "replicated" || grad == "partial",
      "expected grad to be 'replicated' or 'partial', "
      "got '",
      grad,
      "'; pass 'replicated' if every rank uses the full tensor in the same way, "
      "and 'partial' if the gradients of the ranks are to be summed");
  return grad == "partial";
}

// ------------------------------------------------------------------- lists, along dimension 0

RowShapes::RowShapes(at::TensorList tensors) {
  for (const at::Tensor& x : tensors) {
    const auto row = x.sym_sizes().slice(1);
    shapes.insert(shapes.end(), row.begin(), row.end());
    dims.push_back(x.dim() - 1);
  }
}

std::vector<SymInts> shapes_of(
    const SymShards& layout,
    c10::SymIntArrayRef row_shapes,
    at::IntArrayRef row_dims,
    std::optional<int64_t> of) {
  std::vector<SymInts> shapes;
  size_t begin = 0;
  for (size_t i = 0; i < row_dims.size(); ++i) {
    shapes.push_back({of ? layout[i].sizes[*of] : layout[i].begin(layout.parts())});
    const auto row = row_shapes.slice(begin, row_dims[i]);
    shapes[i].insert(shapes[i].end(), row.begin(), row.end());
    begin += row_dims[i];
  }
  return shapes;
}

std::vector<at::ScalarType> dtypes_of(at::TensorList tensors) {
  std::vector<at::ScalarType> dtypes;
  for (const at::Tensor& x : tensors) {
    dtypes.push_back(x.scalar_type());
  }
  return dtypes;
}

SymShards check_shards(
    at::TensorList shards, c10::SymIntArrayRef sizes, Dtypes dtypes, int64_t rank, bool single) {
  check_dtypes(dtypes, shards.size(), "shards", single);
  return check_rows(shards, sizes, dtypes, rank, single);
}

SymShards check_float8(
    at::TensorList shards, c10::SymIntArrayRef sizes, at::ScalarType dtype, int64_t rank) {
  TORCH_CHECK_VALUE(
      dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2,
      "expected dtype to be float8_e4m3fn or float8_e5m2, got ", dtype_name(dtype));
  const std::vector<at::ScalarType> dtypes(shards.size(), dtype);
  return check_rows(shards, sizes, dtypes, rank, /*single=*/false);
}

SymShards check_full(at::TensorList inputs, c10::SymIntArrayRef sizes, int64_t rank, bool single) {
  const int64_t parts = check_sizes(sizes, inputs.size(), rank, "input");
  SymInts row_bytes;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(inputs[i], inputs[0], name_of("input", i, single), "inputs[0]");
    row_bytes.push_back(
        row_bytes_of(inputs[i].sym_sizes().slice(1), inputs[i].scalar_type(), "a row"));
  }
  SymShards layout = layout_of(sizes, parts, row_bytes, rank);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const c10::SymInt rows = layout[i].begin(parts);
    TORCH_CHECK_VALUE(
        inputs[i].sym_size(0) == rows, "expected ", name_of("input", i, single), " to have ", rows,
        " rows, the sum of its sizes, got ", inputs[i].sym_size(0));
  }
  return layout;
}

SymShards check_wait(
    const at::Tensor& buffer,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef row_shapes,
    at::IntArrayRef row_dims,
    Dtypes dtypes,
    int64_t rank) {
  const int64_t parts = check_sizes(sizes, row_dims.size(), rank, "shard");
  check_dtypes(dtypes, row_dims.size(), "shards", /*single=*/false);
  for (const c10::SymInt& n : row_shapes) {
    check_at_least(n, 0, "every size in row_shapes");
  }
  SymInts row_bytes;
  int64_t next = 0;
  const int64_t all = static_cast<int64_t>(row_shapes.size());
  for (size_t i = 0; i < row_dims.size(); ++i) {
    TORCH_CHECK_VALUE(
        row_dims[i] >= 0 && row_dims[i] <= all - next, "expected row_dims[", i,
        "] to be from 0 to ", all - next, ", the sizes left of the ", all, " in row_shapes, got ",
        row_dims[i]);
    row_bytes.push_back(row_bytes_of(row_shapes.slice(next, row_dims[i]), dtypes[i], "row_shapes"));
    next += row_dims[i];
  }
  TORCH_CHECK_VALUE(
      next == all, "expected row_shapes to have ", next, " entries, the sum of row_dims, got ",
      all);
  SymShards layout = layout_of(sizes, parts, row_bytes, rank);
  const c10::SymInt elements = buffer_elements(layout, dtypes);
  TORCH_CHECK_VALUE(
      buffer.dim() == 1 && buffer.sym_size(0) == elements &&
          buffer.scalar_type() == buffer_dtype(dtypes),
      "expected the buffer of the shards described to be ", dtype_name(buffer_dtype(dtypes)),
      " of shape [", elements, "], got ", dtype_name(buffer.scalar_type()), " of shape ",
      buffer.sym_sizes(), "; pass what the start returned, with the sizes given to it");
  return layout;
}

void check_results(
    Dtypes dtypes,
    OptionalDtype reduce_dtype,
    OptionalDtype backend_sums,
    size_t tensors,
    bool single) {
  check_dtypes(dtypes, tensors, "inputs", single);
  check_sum_dtypes(reduce_dtype, backend_sums);
}

void check_sum_dtypes(OptionalDtype reduce_dtype, OptionalDtype backend_sums) {
  check_reduce_dtype(reduce_dtype);
  if (backend_sums) {
    check_float(*backend_sums, "backend_sums");
    TORCH_CHECK_VALUE(
        !reduce_dtype,
        "expected reduce_dtype to be None with backend_sums=", dtype_name(*backend_sums),
        ", the dtype of these sums, got ", dtype_name(*reduce_dtype));
  }
}

at::ScalarType buffer_dtype(Dtypes dtypes) {
  return *std::max_element(dtypes.begin(), dtypes.end(), [](auto a, auto b) {
    return c10::elementSize(a) < c10::elementSize(b);
  });
}

c10::SymInt buffer_elements(const SymShards& layout, Dtypes dtypes) {
  return layout.slot() * layout.parts() /
         static_cast<int64_t>(c10::elementSize(buffer_dtype(dtypes)));
}

// ------------------------------------------------------------------- one tensor, along a dimension

int64_t wrap_dim(int64_t dim, int64_t dims) {
  TORCH_CHECK_VALUE(dims > 0, "expected at least one dimension, got a scalar");
  TORCH_CHECK_VALUE(
      dim >= -dims && dim < dims, "expected dim to be in [", -dims, ", ", dims - 1,
      "] for a tensor with ", dims, " dimensions, got ", dim);
  return dim < 0 ? dim + dims : dim;
}

SymShards check_part(
    const at::Tensor& input, int64_t dim, c10::SymIntArrayRef sizes, int64_t rank) {
  check_dense(input, "input");
  check_sizes(sizes, 1, rank, "input");
  dim = wrap_dim(dim, input.dim());
  TORCH_CHECK_VALUE(
      input.sym_size(dim) == sizes[rank], "expected input to have size ", sizes[rank],
      " in dimension ", dim, ", which is sizes[", rank, "], this rank's entry, got ",
      input.sym_size(dim));
  return layout_along(input.sym_sizes(), dim, sizes, rank);
}

SymShards check_entire(
    const at::Tensor& input, int64_t dim, c10::SymIntArrayRef sizes, int64_t rank) {
  check_dense(input, "input");
  check_sizes(sizes, 1, rank, "input");
  dim = wrap_dim(dim, input.dim());
  TORCH_CHECK_VALUE(
      input.sym_size(dim) == total(sizes), "expected input to have size ", total(sizes),
      " in dimension ", dim, ", the sum of sizes, got ", input.sym_size(dim));
  return layout_along(input.sym_sizes(), dim, sizes, rank);
}

SymShards check_buffer(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    int64_t rank) {
  check_sizes(sizes, 1, rank, "input");
  dim = wrap_dim(dim, static_cast<int64_t>(shape.size()));
  for (const c10::SymInt& n : shape) {
    check_at_least(n, 0, "every size in shape");
  }
  TORCH_CHECK_VALUE(
      shape[dim] == total(sizes), "expected shape, of the full tensor, to have size ", total(sizes),
      " in dimension ", dim, ", the sum of sizes, got ", shape[dim]);
  SymShards layout = layout_along(shape, dim, sizes, rank);
  TORCH_CHECK_VALUE(
      buffer.dim() == 2 && buffer.sym_size(0) == layout.parts() &&
          buffer.sym_size(1) == layout.slot(),
      "expected the buffer of the tensor described to have shape [", layout.parts(), ", ",
      layout.slot(), "], got ", buffer.sym_sizes(),
      "; pass what the start returned, with the sizes given to it");
  return layout;
}

SymInts resized(c10::SymIntArrayRef shape, int64_t dim, const c10::SymInt& length) {
  SymInts result = shape.vec();
  result[wrap_dim(dim, static_cast<int64_t>(shape.size()))] = length;
  return result;
}

SymInts entire_shape(c10::SymIntArrayRef shape, int64_t dim, c10::SymIntArrayRef sizes) {
  return resized(shape, dim, total(sizes));
}

}  // namespace deepsp
