#include "checks.h"

#include "../symints.h"

namespace deepsp {
namespace {

std::string name_of(const char* name, size_t i, bool single) {
  return single ? name : std::string(name) + "s[" + std::to_string(i) + "]";
}

bool is_float(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 ||
         dtype == at::kHalf;
}

// The number of ranks that sizes speaks of.
int64_t check_sizes(c10::SymIntArrayRef sizes, size_t tensors, int64_t rank, const char* name) {
  TORCH_CHECK_VALUE(tensors > 0, name, "s is empty; at least one tensor is needed");
  TORCH_CHECK_VALUE(
      !sizes.empty() && sizes.size() % tensors == 0, "sizes has ", sizes.size(), " entries for ",
      tensors, " ", name, "s; for each as many as the group has ranks is right");
  const int64_t parts = static_cast<int64_t>(sizes.size() / tensors);
  TORCH_CHECK_VALUE(
      rank >= 0 && rank < parts, "rank is ", rank, ", but sizes has ", parts, " entries for each ",
      name, ", one a rank; 0 to ", parts - 1, " is right");
  for (size_t n = 0; n < sizes.size(); ++n) {
    TORCH_CHECK_VALUE(
        sizes[n] >= 0, "sizes[", n, "] is ", sizes[n], "; a number of rows can't be negative");
    check_fits(sizes[n], "sizes");
  }
  return parts;
}

void check_tensor(const at::Tensor& x, const at::Tensor& first, const std::string& name) {
  TORCH_CHECK_VALUE(
      x.layout() == at::kStrided, name, " is ", x.layout(), "; a dense tensor is right");
  check_float(x.scalar_type(), name);
  TORCH_CHECK_VALUE(
      x.dim() > 0, name,
      " has no dimensions; at least one is right, whose rows the ranks share: view it as [1]");
  TORCH_CHECK_VALUE(
      x.device() == first.device(), name, " is on ", x.device(), ", but the first is on ",
      first.device(), "; they must be on the same device");
}

SymShardLayout layout_of(
    c10::SymIntArrayRef sizes, int64_t parts, std::vector<c10::SymInt> row_bytes, int64_t rank) {
  SymShardLayout layout{{}, std::move(row_bytes), rank};
  for (size_t n = 0; n < sizes.size(); n += parts) {
    layout.sizes.push_back(sizes.slice(n, parts).vec());
  }
  for (size_t i = 0; i < layout.tensors(); ++i) {
    check_fits({layout.row(i, parts), layout.row_bytes[i]}, "sizes");
  }
  return layout;
}

c10::SymInt row_bytes_of(const at::Tensor& x, at::ScalarType dtype) {
  c10::SymInt bytes = static_cast<int64_t>(c10::elementSize(dtype));
  check_fits(x.sym_sizes().slice(1), "a row");
  for (int64_t d = 1; d < x.dim(); ++d) {
    bytes = bytes * x.sym_size(d);
  }
  return bytes;
}

SymShardLayout check_rows(
    at::TensorList shards, c10::SymIntArrayRef sizes, Dtypes dtypes, int64_t rank, bool single) {
  const int64_t parts = check_sizes(sizes, shards.size(), rank, "shard");
  std::vector<c10::SymInt> row_bytes;
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string name = name_of("shard", i, single);
    check_tensor(shards[i], shards[0], name);
    const size_t mine = i * parts + rank;
    TORCH_CHECK_VALUE(
        shards[i].sym_size(0) == sizes[mine], name, " has ", shards[i].sym_size(0),
        " rows, but sizes[", mine, "], those of this rank, is ", sizes[mine],
        "; they must be the same");
    row_bytes.push_back(row_bytes_of(shards[i], dtypes[i]));
  }
  return layout_of(sizes, parts, std::move(row_bytes), rank);
}

void check_one_each(Dtypes dtypes, size_t tensors, const char* name) {
  TORCH_CHECK_VALUE(
      dtypes.size() == tensors, "dtypes has ", dtypes.size(), " entries for ", tensors, " ", name,
      "; one for each is right");
}

}  // namespace

RowShapes::RowShapes(at::TensorList tensors) {
  for (const at::Tensor& x : tensors) {
    for (int64_t d = 1; d < x.dim(); ++d) {
      shapes.push_back(x.sym_size(d));
    }
    dims.push_back(x.dim() - 1);
  }
}

std::vector<at::ScalarType> dtypes_of(at::TensorList tensors) {
  std::vector<at::ScalarType> dtypes;
  for (const at::Tensor& x : tensors) {
    dtypes.push_back(x.scalar_type());
  }
  return dtypes;
}

void check_float(at::ScalarType dtype, std::string_view what) {
  TORCH_CHECK_VALUE(
      is_float(dtype), what, " is ", dtype, "; float64, float32, bfloat16 or float16 is right",
      c10::isFloat8Type(dtype) ? ", and gather_cast_float8 for float8" : "");
}

SymShardLayout check_shards(
    at::TensorList shards, c10::SymIntArrayRef sizes, Dtypes dtypes, int64_t rank, bool single) {
  check_one_each(dtypes, shards.size(), "shards");
  for (size_t i = 0; i < dtypes.size(); ++i) {
    check_float(dtypes[i], name_of("dtype", i, single));
  }
  return check_rows(shards, sizes, dtypes, rank, single);
}

SymShardLayout check_float8(
    at::TensorList shards, c10::SymIntArrayRef sizes, at::ScalarType dtype, int64_t rank) {
  TORCH_CHECK_VALUE(
      dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2, "dtype is ", dtype,
      "; float8_e4m3fn or float8_e5m2 is right");
  const std::vector<at::ScalarType> dtypes(shards.size(), dtype);
  return check_rows(shards, sizes, dtypes, rank, /*single=*/false);
}

SymShardLayout check_whole(
    at::TensorList inputs, c10::SymIntArrayRef sizes, int64_t rank, bool single) {
  const int64_t parts = check_sizes(sizes, inputs.size(), rank, "input");
  std::vector<c10::SymInt> row_bytes;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const std::string name = name_of("input", i, single);
    check_tensor(inputs[i], inputs[0], name);
    row_bytes.push_back(row_bytes_of(inputs[i], inputs[i].scalar_type()));
  }
  SymShardLayout layout = layout_of(sizes, parts, std::move(row_bytes), rank);
  for (size_t i = 0; i < inputs.size(); ++i) {
    TORCH_CHECK_VALUE(
        inputs[i].sym_size(0) == layout.row(i, parts), name_of("input", i, single), " has ",
        inputs[i].sym_size(0), " rows, but its sizes add up to ", layout.row(i, parts),
        "; they must be the same");
  }
  return layout;
}

SymShardLayout check_wait(
    const at::Tensor& buffer,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef row_shapes,
    at::IntArrayRef row_dims,
    Dtypes dtypes,
    int64_t rank) {
  const int64_t parts = check_sizes(sizes, row_dims.size(), rank, "shard");
  check_one_each(dtypes, row_dims.size(), "shards");
  int64_t dims = 0;
  for (const int64_t n : row_dims) {
    TORCH_CHECK_VALUE(
        n >= 0 && n <= static_cast<int64_t>(row_shapes.size()), "row_dims holds ", n,
        "; a number of dimensions is right, of the ", row_shapes.size(), " in row_shapes");
    dims += n;
  }
  TORCH_CHECK_VALUE(
      dims == static_cast<int64_t>(row_shapes.size()), "row_shapes has ", row_shapes.size(),
      " entries, but row_dims speak of ", dims);
  for (const c10::SymInt& n : row_shapes) {
    TORCH_CHECK_VALUE(n >= 0, "row_shapes holds ", n, "; a size can't be negative");
  }
  std::vector<c10::SymInt> row_bytes;
  for (size_t i = 0; i < row_dims.size(); ++i) {
    check_float(dtypes[i], name_of("dtype", i, false));
    c10::SymInt bytes = static_cast<int64_t>(c10::elementSize(dtypes[i]));
    const std::vector<c10::SymInt> row = shape_of(1, row_shapes, row_dims, i);
    check_fits(row, "row_shapes");
    for (const c10::SymInt& n : row) {
      bytes = bytes * n;
    }
    row_bytes.push_back(bytes);
  }
  SymShardLayout layout = layout_of(sizes, parts, std::move(row_bytes), rank);
  const c10::SymInt elements = buffer_elements(layout, dtypes);
  TORCH_CHECK_VALUE(
      buffer.dim() == 1 && buffer.sym_size(0) == elements &&
          buffer.scalar_type() == buffer_dtype(dtypes),
      "the buffer is ", buffer.scalar_type(), " of shape ", buffer.sym_sizes(),
      ", but what is described travels in ", buffer_dtype(dtypes), " of shape [", elements,
      "]; pass what the start returned, and the same sizes");
  return layout;
}

void check_results(Dtypes dtypes, std::optional<at::ScalarType> reduce_dtype, size_t tensors) {
  check_one_each(dtypes, tensors, "inputs");
  for (size_t i = 0; i < dtypes.size(); ++i) {
    check_float(dtypes[i], name_of("dtype", i, false));
  }
  if (reduce_dtype) {
    check_float(*reduce_dtype, "reduce_dtype");
  }
}

std::vector<c10::SymInt> shape_of(
    const c10::SymInt& rows, c10::SymIntArrayRef row_shapes, at::IntArrayRef row_dims, size_t i) {
  size_t begin = 0;
  for (size_t j = 0; j < i; ++j) {
    begin += row_dims[j];
  }
  std::vector<c10::SymInt> shape{rows};
  const auto rest = row_shapes.slice(begin, row_dims[i]);
  shape.insert(shape.end(), rest.begin(), rest.end());
  return shape;
}

at::ScalarType buffer_dtype(Dtypes dtypes) {
  at::ScalarType widest = dtypes[0];
  for (const at::ScalarType dtype : dtypes) {
    if (c10::elementSize(dtype) > c10::elementSize(widest)) {
      widest = dtype;
    }
  }
  return widest;
}

c10::SymInt buffer_elements(const SymShardLayout& layout, Dtypes dtypes) {
  return layout.buffer_bytes() / static_cast<int64_t>(c10::elementSize(buffer_dtype(dtypes)));
}

ShardLayout<int64_t> concrete(const SymShardLayout& layout) {
  ShardLayout<int64_t> result{{}, ints(layout.row_bytes), layout.rank};
  for (const std::vector<c10::SymInt>& of_tensor : layout.sizes) {
    result.sizes.push_back(ints(of_tensor));
  }
  return result;
}

}  // namespace deepsp
