// The backward of each is the other's forward with the weight transposed, and the weight's gradient
// from what arrives meanwhile. Kept are the input, a part of it where it was gathered, and the
// weight: what was gathered is gathered again.

#include "../op.h"

namespace deepsp {
namespace {

const Op<Tensors(
    const at::Tensor& grad,
    const at::Tensor& input,
    const at::Tensor& weight,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    at::IntArrayRef wanted,
    int64_t rank,
    std::string_view group_name,
    OptionalDtype reduce_dtype)>
    all_gather_matmul_backward("all_gather_matmul_backward");

const Op<Tensors(
    const at::Tensor& grad,
    const at::Tensor& input,
    const at::Tensor& weight,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    at::IntArrayRef wanted,
    int64_t rank,
    std::string_view group_name)>
    matmul_reduce_scatter_backward("matmul_reduce_scatter_backward");

void keep_factors(Call& call) {
  call.keep_tensors(call.inputs().slice(0, 2).vec());
}

Tensors all_gather_matmul_gradients(const Call& call, const Tensors& gradients) {
  const Tensors kept = call.kept_tensors();
  const auto wanted = call.wanted(3);
  return call.placed(
      all_gather_matmul_backward(
          gradients[0], kept[0], kept[1], call["dim"], call["sizes"], wanted, call["rank"],
          call["group_name"], call["reduce_dtype"]),
      wanted);
}

Tensors matmul_reduce_scatter_gradients(const Call& call, const Tensors& gradients) {
  const Tensors kept = call.kept_tensors();
  const auto wanted = call.wanted(3);
  return call.placed(
      matmul_reduce_scatter_backward(
          gradients[0], kept[0], kept[1], call["dim"], call["sizes"], wanted, call["rank"],
          call["group_name"]),
      wanted);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  differentiable(m, "all_gather_matmul", all_gather_matmul_gradients, keep_factors);
  differentiable(m, "matmul_reduce_scatter", matmul_reduce_scatter_gradients, keep_factors);
  not_differentiable(m, "all_gather_matmul_backward");
  not_differentiable(m, "matmul_reduce_scatter_backward");
}

}  // namespace deepsp
