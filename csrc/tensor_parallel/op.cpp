// Linear layers with the all-gather before them, or the reduce-scatter after them. Where blocks are
// sent point to point, products are computed rank by rank (rows.h): on a network link that hides
// most of the transfer (benchmarks/results/tensor_parallel.md). On other backends, and for
// Inductor, the ops are made of collectives and products.
//
// The backward of each is the other's forward with the weight transposed, and the weight's gradient
// from what is gathered meanwhile. Only this rank's input and the weight are saved: what was
// gathered is gathered again.

#include "../op.h"
#include "../common/checks.h"
#include "../projection/product_sum.h"
#include "../reshard/checks.h"
#include "../transport/agreement.h"
#include "rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/sum.h>

namespace deepsp {
namespace {

// Which of the two ops, or of their backwards: input is this rank's part and the product is full,
// or input is full and the product this rank's part.
enum class Kind { kGather, kScatter };

// The arguments that all four share, checked: input [.., n, .., K], where dim isn't the last
// dimension, and weight [M, K].
struct LinearCall {
  const Given& given;
  const at::Tensor input, weight;
  const int64_t dim, rank;
  const c10::SymIntArrayRef sizes;
  const std::string_view group_name;
  Shard<c10::SymInt> rows;  // each rank's, as matrices [outer, n·inner, K]
  SymInts shape;            // of the product

  LinearCall(
      const Given& given,
      Kind kind,
      const OptionalTensor& bias = std::nullopt,
      OptionalDtype reduce_dtype = std::nullopt)
      : given(given),
        input(given["input"]),
        weight(given["weight"]),
        dim(given["dim"]),
        rank(given["rank"]),
        sizes(given["sizes"]),
        group_name(given["group_name"]) {
    TORCH_CHECK_VALUE(
        input.dim() >= 2, "expected input to have at least 2 dimensions, got ", input.dim());
    TORCH_CHECK_VALUE(
        wrap_dim(dim, input.dim()) != input.dim() - 1,
        "expected dim to be before the last dimension, which weight multiplies, got ", dim);
    check_float(input.scalar_type(), "input");
    const c10::SymInt columns = input.sym_size(-1);
    TORCH_CHECK_VALUE(
        weight.dim() == 2 && weight.sym_size(1) == columns, "expected weight to have shape [M, ",
        columns, "] for input of shape ", input.sym_sizes(), ", got ", weight.sym_sizes());
    check_like(weight, "weight", input, "input");
    if (bias.has_value()) {
      check_like(*bias, "bias", input, "input");
      check_bias(*bias, "bias", weight, "weight");
    }
    const bool gathers = kind == Kind::kGather;
    rows =
        gathers ? check_part(input, dim, sizes, rank)[0] : check_entire(input, dim, sizes, rank)[0];
    check_reduce_dtype(reduce_dtype);
    rows.inner = columns == 0 ? c10::SymInt(0) : rows.inner / columns;
    shape = resized(input.sym_sizes(), dim, gathers ? rows.begin(rows.parts()) : sizes[rank]);
    shape.back() = weight.sym_size(0);
  }

  at::Tensor gathered(const at::Tensor& x) const {
    const With values[]{{"input", x}, {"grad", "partial"}, {"reduce_dtype", c10::IValue()}};
    return Op("all_gather")(given, values);
  }

  // None where products aren't computed rank by rank.
  std::optional<Rows> point_to_point(const char* op) const {
    if (input.key_set().has(c10::DispatchKey::Python)) {
      return std::nullopt;  // it is being traced
    }
    const int64_t inner = rows.inner.guard_int(__FILE__, __LINE__);
    std::vector<int64_t> counts;
    for (const int64_t size : ints(rows.sizes)) {
      counts.push_back(size * inner);
    }
    Group group = agreed_group(
        op, group_name, rank, rows.parts(), input.device(), "sizes",
        [&]() -> std::vector<std::string> {
          return {to_text(
              "input ", input.scalar_type(), " with rows ", counts, " in ", rows.outer,
              " matrices of ", input.size(-1), " columns")};
        });
    if (!group.point_to_point || group.alone) {
      return std::nullopt;
    }
    return Rows{rows.outer.guard_int(__FILE__, __LINE__), std::move(counts), std::move(group)};
  }
};

at::Tensor flat(const at::Tensor& x) {
  return x.flatten(0, -2);
}

// grad^T [M, rows] by x [rows, K], of all rows at once.
at::Tensor weight_grad(const at::Tensor& grad, const at::Tensor& x) {
  return at::mm(flat(grad).t(), flat(x));
}

// The same, matrix by matrix.
void add_weight_grad(ProductSum& sum, const at::Tensor& grad, const at::Tensor& x) {
  for (int64_t o = 0; o < grad.size(0); ++o) {
    sum.add_product(grad[o].t(), x[o]);
  }
}

// ------------------------------------------------------------------- forward

c10::IValue all_gather_matmul(const Given& given) {
  const OptionalTensor bias = given.optional<at::Tensor>("bias");
  const LinearCall call(given, Kind::kGather, bias, given["reduce_dtype"]);
  if (call.input.is_meta()) {
    return at::empty_symint(call.shape, call.input.options());
  }
  const auto rows = call.point_to_point("all_gather_matmul");
  if (!rows) {
    return at::linear(call.gathered(call.input), call.weight, bias);
  }
  const at::Tensor product = empty_buffer(ints(call.shape), call.input);
  const at::Tensor out = rows->full(product), weight = call.weight.t();
  GatheredRows(rows->part(call.input), *rows).in_order([&](int64_t p, const at::Tensor& block) {
    multiply(rows->rows_of(out, p), block, weight);
  });
  return bias.has_value() ? product.add_(*bias) : product;
}

c10::IValue matmul_reduce_scatter(const Given& given) {
  const OptionalTensor bias = given.optional<at::Tensor>("bias");
  const OptionalDtype reduce_dtype = given["reduce_dtype"];
  const LinearCall call(given, Kind::kScatter, bias, reduce_dtype);
  if (call.input.is_meta()) {
    return at::empty_symint(call.shape, call.input.options());
  }
  const auto rows = call.point_to_point("matmul_reduce_scatter");
  if (!rows) {
    const at::Tensor product = at::linear(call.input, call.weight);
    const at::Tensor sum = Op("reduce_scatter")(given, {{"input", product}});
    return bias.has_value() ? sum.add(*bias) : sum;
  }
  const at::Tensor sum = ScatteredProducts(rows->full(call.input), call.weight.t(), *rows)
                             .sum(reduce_dtype)
                             .view(ints(call.shape));
  return bias.has_value() ? sum.add_(*bias) : sum;
}

// ------------------------------------------------------------------- backward

// Checks, and the gradient of bias. compute(call, grad, wanted): those of input and weight, where
// they are wanted.
template <class Compute>
c10::IValue backward(const Given& given, Kind kind, const Compute& compute) {
  const LinearCall call(given, kind);
  const at::Tensor grad = given["grad"];
  const at::IntArrayRef wanted = given["wanted"];
  TORCH_CHECK_VALUE(
      grad.sym_sizes() == c10::SymIntArrayRef(call.shape) &&
          grad.scalar_type() == call.input.scalar_type(),
      "expected grad to be like the output, ", dtype_name(call.input.scalar_type()), " of shape ",
      c10::SymIntArrayRef(call.shape), ", got ", dtype_name(grad.scalar_type()), " of shape ",
      grad.sym_sizes());
  check_wanted(wanted, 3, "input, weight and bias");
  Tensors found(2);
  if (call.input.is_meta()) {
    found = {
        at::empty_symint(call.input.sym_sizes(), call.input.options()),
        at::empty_symint(call.weight.sym_sizes(), call.input.options())};
  } else {
    compute(call, grad, wanted, found[0], found[1]);
  }
  Tensors results;
  for (size_t i = 0; i < found.size(); ++i) {
    if (wanted[i]) {
      results.push_back(found[i]);
    }
  }
  if (wanted[2]) {
    results.push_back(
        call.input.is_meta() ? at::empty_symint(call.weight.sym_size(0), call.input.options())
                             : flat(grad).sum(0));
  }
  return results;
}

c10::IValue all_gather_matmul_backward(const Given& given) {
  const OptionalDtype reduce_dtype = given["reduce_dtype"];
  return backward(
      given, Kind::kGather,
      [&](const LinearCall& call, const at::Tensor& grad, at::IntArrayRef wanted,
          at::Tensor& of_input, at::Tensor& of_weight) {
        const at::Tensor &input = call.input, &weight = call.weight;
        const auto rows = call.point_to_point("_all_gather_matmul_backward");
        if (rows) {
          const at::Tensor grads = rows->full(grad);
          std::optional<GatheredRows> gathered;
          std::optional<ScatteredProducts> products;
          if (wanted[1]) {
            gathered.emplace(rows->part(input), *rows);
          }
          if (wanted[0]) {
            products.emplace(grads, weight, *rows);
          }
          if (wanted[1]) {
            ProductSum sum(weight.sizes(), weight);
            gathered->in_order([&](int64_t p, const at::Tensor& block) {
              add_weight_grad(sum, rows->rows_of(grads, p), block);
            });
            of_weight = sum.total();
          }
          if (wanted[0]) {
            of_input = products->sum(reduce_dtype).view(input.sizes());
          }
          return;
        }
        // Launches before the products that don't need what is sent.
        at::Tensor gathering, scattering;
        const SymInts entire = entire_shape(input.sym_sizes(), call.dim, call.sizes);
        if (wanted[1]) {
          gathering = Op("all_gather_start")(given, {{"grad", "partial"}});
        }
        if (wanted[0]) {
          const at::Tensor product = at::matmul(grad, weight);
          scattering = Op("reduce_scatter_start")(given, {{"input", product}});
        }
        if (wanted[1]) {
          const With values[]{{"buffer", gathering}, {"shape", entire}, {"grad", "partial"}};
          const Tensors full = Op("all_gather_wait")(given, values);
          of_weight = weight_grad(grad, full[0]);
        }
        if (wanted[0]) {
          const With values[]{{"buffer", scattering}, {"shape", entire}};
          of_input = Op("reduce_scatter_wait")(given, values);
        }
      });
}

c10::IValue matmul_reduce_scatter_backward(const Given& given) {
  return backward(
      given, Kind::kScatter,
      [&](const LinearCall& call, const at::Tensor& grad, at::IntArrayRef wanted,
          at::Tensor& of_input, at::Tensor& of_weight) {
        const at::Tensor &input = call.input, &weight = call.weight;
        const auto rows = call.point_to_point("_matmul_reduce_scatter_backward");
        if (!wanted[0] && !wanted[1]) {
          return;
        }
        if (!rows) {
          const at::Tensor full = call.gathered(grad);
          of_input = wanted[0] ? at::matmul(full, weight) : of_input;
          of_weight = wanted[1] ? weight_grad(full, input) : of_weight;
          return;
        }
        of_input = wanted[0] ? empty_buffer(input.sizes(), input) : at::Tensor();
        const at::Tensor out = wanted[0] ? rows->full(of_input) : at::Tensor();
        const at::Tensor x = wanted[1] ? rows->full(input) : at::Tensor();
        ProductSum sum(weight.sizes(), weight);
        GatheredRows(rows->part(grad), *rows).in_order([&](int64_t p, const at::Tensor& block) {
          if (wanted[0]) {
            multiply(rows->rows_of(out, p), block, weight);
          }
          if (wanted[1]) {
            add_weight_grad(sum, block, rows->rows_of(x, p));
          }
        });
        of_weight = wanted[1] ? sum.total() : of_weight;
      });
}

BackwardOp backward_of(const char* op) {
  return {
      Op(op),
      /*inputs=*/{"input", "weight", "bias"},
      /*results=*/{},
      /*saved=*/{"input", "weight"},
      /*gradients=*/{"input", "weight", "bias"}};
}

const BackwardOp kGatherBackward = backward_of("_all_gather_matmul_backward");
const BackwardOp kScatterBackward = backward_of("_matmul_reduce_scatter_backward");

template <const BackwardOp& op>
void save(Call& call) {
  save_for(op, call);
}

template <const BackwardOp& op>
Tensors gradients_of(const Call& call, const Tensors& gradients) {
  return call_backward(op, call, {{"grad", gradients[0]}});
}

void register_kernels(torch::Library& m) {
  implement<all_gather_matmul>(m, "all_gather_matmul");
  implement<all_gather_matmul_backward>(m, "_all_gather_matmul_backward");
  implement<matmul_reduce_scatter>(m, "matmul_reduce_scatter");
  implement<matmul_reduce_scatter_backward>(m, "_matmul_reduce_scatter_backward");
}

}  // namespace

DEEPSP_KERNELS(m) {
  register_kernels(m);
}

TORCH_LIBRARY_IMPL(deepsp_inductor, CompositeImplicitAutograd, m) {
  register_kernels(m);
}

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  differentiable(m, "all_gather_matmul", gradients_of<kGatherBackward>, save<kGatherBackward>);
  differentiable(
      m, "matmul_reduce_scatter", gradients_of<kScatterBackward>, save<kScatterBackward>);
  not_differentiable(m, "_all_gather_matmul_backward");
  not_differentiable(m, "_matmul_reduce_scatter_backward");
}

}  // namespace deepsp
