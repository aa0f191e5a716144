#include "checks.h"

#include "../symints.h"

namespace deepsp {
namespace {

c10::SymInt total(c10::SymIntArrayRef sizes) {
  c10::SymInt sum = 0;
  for (const c10::SymInt& size : sizes) {
    sum = sum + size;
  }
  return sum;
}

SymAlong layout_of(
    c10::SymIntArrayRef shape, int64_t dim, c10::SymIntArrayRef sizes, int64_t rank) {
  std::vector<c10::SymInt> whole = shape.vec();
  whole[dim] = total(sizes);
  check_fits(whole, "sizes");
  c10::SymInt outer = 1, inner = 1;
  for (int64_t d = 0; d < static_cast<int64_t>(shape.size()); ++d) {
    if (d != dim) {
      (d < dim ? outer : inner) = (d < dim ? outer : inner) * shape[d];
    }
  }
  return {outer, sizes.vec(), inner, rank};
}

void check_sizes(c10::SymIntArrayRef sizes, int64_t rank) {
  const int64_t parts = static_cast<int64_t>(sizes.size());
  TORCH_CHECK_VALUE(parts > 0, "sizes is empty; one entry for each rank is right");
  TORCH_CHECK_VALUE(
      rank >= 0 && rank < parts, "rank is ", rank, ", but sizes has ", parts,
      " entries, one a rank; 0 to ", parts - 1, " is right");
  for (int64_t p = 0; p < parts; ++p) {
    TORCH_CHECK_VALUE(sizes[p] >= 0, "sizes[", p, "] is ", sizes[p], "; a size can't be negative");
    check_fits(sizes[p], "sizes");
  }
}

void check_dense(const at::Tensor& input) {
  TORCH_CHECK_VALUE(
      input.layout() == at::kStrided, "input is ", input.layout(), "; a dense tensor is right");
}

}  // namespace

bool is_partial(std::string_view grad) {
  TORCH_CHECK_VALUE(
      grad == "replicated" || grad == "partial", "grad is '", grad,
      "'; 'replicated' is right where every rank goes on with the whole alike, 'partial' where "
      "the ranks' gradients of it are to be summed");
  return grad == "partial";
}

void check_summed(at::ScalarType dtype, std::string_view what) {
  TORCH_CHECK_VALUE(
      dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf,
      what, " is ", dtype, "; float64, float32, bfloat16 or float16 is right");
}

int64_t wrap_dim(int64_t dim, int64_t dims) {
  TORCH_CHECK_VALUE(
      dims > 0, "input has no dimensions; at least one is right, which the ranks share");
  TORCH_CHECK_VALUE(
      dim >= -dims && dim < dims, "dim is ", dim, ", but the tensor has ", dims, " dimensions; ",
      -dims, " to ", dims - 1, " is right");
  return dim < 0 ? dim + dims : dim;
}

SymAlong check_part(const at::Tensor& input, int64_t dim, c10::SymIntArrayRef sizes, int64_t rank) {
  check_dense(input);
  check_sizes(sizes, rank);
  dim = wrap_dim(dim, input.dim());
  TORCH_CHECK_VALUE(
      input.sym_size(dim) == sizes[rank], "input has size ", input.sym_size(dim), " in dimension ",
      dim, ", but sizes[", rank, "], that of this rank, is ", sizes[rank],
      "; they must be the same");
  return layout_of(input.sym_sizes(), dim, sizes, rank);
}

SymAlong check_entire(
    const at::Tensor& input, int64_t dim, c10::SymIntArrayRef sizes, int64_t rank) {
  check_dense(input);
  check_sizes(sizes, rank);
  dim = wrap_dim(dim, input.dim());
  TORCH_CHECK_VALUE(
      input.sym_size(dim) == total(sizes), "input has size ", input.sym_size(dim), " in dimension ",
      dim, ", but sizes add up to ", total(sizes), "; they must be the same");
  return layout_of(input.sym_sizes(), dim, sizes, rank);
}

SymAlong check_buffer(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    int64_t rank) {
  check_sizes(sizes, rank);
  dim = wrap_dim(dim, static_cast<int64_t>(shape.size()));
  for (const c10::SymInt& n : shape) {
    TORCH_CHECK_VALUE(n >= 0, "shape holds ", n, "; a size can't be negative");
  }
  TORCH_CHECK_VALUE(
      shape[dim] == total(sizes), "shape, the whole's, has ", shape[dim], " in dimension ", dim,
      ", but sizes add up to ", total(sizes), "; they must be the same");
  SymAlong layout = layout_of(shape, dim, sizes, rank);
  TORCH_CHECK_VALUE(
      buffer.dim() == 2 && buffer.sym_size(0) == layout.parts() &&
          buffer.sym_size(1) == layout.slot(),
      "the buffer has shape ", buffer.sym_sizes(), ", but what is described travels in [",
      layout.parts(), ", ", layout.slot(), "]; pass what the start returned, and the same sizes");
  return layout;
}

std::vector<c10::SymInt> resized(
    c10::SymIntArrayRef shape, int64_t dim, const c10::SymInt& length) {
  std::vector<c10::SymInt> result = shape.vec();
  result[wrap_dim(dim, static_cast<int64_t>(shape.size()))] = length;
  return result;
}

std::vector<c10::SymInt> entire_shape(
    c10::SymIntArrayRef shape, int64_t dim, c10::SymIntArrayRef sizes) {
  return resized(shape, dim, total(sizes));
}

}  // namespace deepsp
