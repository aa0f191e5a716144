// The kernels, the same for CPU and CUDA. Point to point, products are computed rank by rank: a
// part that arrived while another travels, a part that is to leave before the next. Nothing is
// packed or copied out: products read and write blocks as they travel. On other backends, and for
// Inductor, the ops are made of collectives and products.

#include "../common/checks.h"
#include "../common/copies.h"
#include "../common/product_sum.h"
#include "../reshard/checks.h"
#include "../reshard/ops.h"
#include "../transport/agreement.h"
#include "../transport/departure.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <ATen/record_function.h>

#include <functional>

namespace deepsp {
namespace {

// ------------------------------------------------------------------- checks

struct Product {
  Shard<c10::SymInt> rows;  // who has which, as matrices: [outer, n·inner, K]
  SymInts shape;
};

// input [.., n, .., K], of which dim is not the last; weight [M, K]; bias [M]. gathers: input is
// local, and the product full; or the other way round.
Product check_product(
    const at::Tensor& input,
    const at::Tensor& weight,
    const OptionalTensor& bias,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    OptionalDtype reduce_dtype,
    bool gathers) {
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
  Shard<c10::SymInt> rows = gathers ? check_part(input, dim, sizes, rank).tensors[0]
                                    : check_entire(input, dim, sizes, rank).tensors[0];
  check_reduce_dtype(reduce_dtype);
  rows.inner = columns == 0 ? c10::SymInt(0) : rows.inner / columns;
  SymInts shape = resized(input.sym_sizes(), dim, gathers ? rows.begin(rows.parts()) : sizes[rank]);
  shape.back() = weight.sym_size(0);
  return {rows, shape};
}

// grad is the product's.
Shard<c10::SymInt> check_product_backward(
    const at::Tensor& grad,
    const at::Tensor& input,
    const at::Tensor& weight,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    at::IntArrayRef wanted,
    int64_t rank,
    bool gathers) {
  const auto [rows, shape] = check_product(input, weight, {}, dim, sizes, rank, {}, gathers);
  TORCH_CHECK_VALUE(
      grad.sym_sizes() == c10::SymIntArrayRef(shape) && grad.scalar_type() == input.scalar_type(),
      "expected grad to be like the output, ", dtype_name(input.scalar_type()), " of shape ",
      c10::SymIntArrayRef(shape), ", got ", dtype_name(grad.scalar_type()), " of shape ",
      grad.sym_sizes());
  check_wanted(wanted, 3, "input, weight and bias");
  return rows;
}

// ------------------------------------------------------------------- what travels

// Rows of several matrices [outer, n·inner], shared out along n.
struct Rows {
  int64_t outer;
  std::vector<int64_t> counts;  // of each rank, in one matrix
  Group group;

  int64_t begin(int64_t p) const {
    int64_t sum = 0;
    for (int64_t r = 0; r < p; ++r) {
      sum += counts[r];
    }
    return sum;
  }
  int64_t total() const { return begin(group.size); }

  at::Tensor matrices(const at::Tensor& x, int64_t rows) const {
    return x.contiguous().view({outer, rows, x.size(-1)});
  }
  at::Tensor full(const at::Tensor& x) const { return matrices(x, total()); }
  at::Tensor part(const at::Tensor& x) const { return matrices(x, counts[group.rank]); }
  // Rank p's rows of full matrices.
  at::Tensor rows_of(const at::Tensor& full, int64_t p) const {
    return full.narrow(1, begin(p), counts[p]);
  }
};

// None where products aren't computed part by part.
std::optional<Rows> rows_in_parts(
    const Shard<c10::SymInt>& shard,
    const at::Tensor& like,
    int64_t rank,
    std::string_view group_name,
    const char* op) {
  if (like.key_set().has(c10::DispatchKey::Python)) {
    return std::nullopt;  // it is being traced
  }
  const int64_t inner = shard.inner.guard_int(__FILE__, __LINE__);
  std::vector<int64_t> counts;
  for (const int64_t size : ints(shard.sizes)) {
    counts.push_back(size * inner);
  }
  Group group = agreed_group(
      op, group_name, rank, shard.parts(), like.device(), "sizes",
      [&]() -> std::vector<std::string> {
        return {said(
            "input ", like.scalar_type(), " with rows ", counts, " in ", shard.outer,
            " matrices of ", like.size(-1), " columns")};
      });
  if (!group.point_to_point || group.alone) {
    return std::nullopt;
  }
  return Rows{shard.outer.guard_int(__FILE__, __LINE__), std::move(counts), std::move(group)};
}

// out [outer, rows, M] = x [outer, rows, K] by weight [K, M].
void multiply(const at::Tensor& out, const at::Tensor& x, const at::Tensor& weight) {
  for (int64_t o = 0; o < out.size(0); ++o) {
    at::Tensor to = out[o];
    at::mm_out(to, x[o], weight);
  }
}

Bytes bytes_of(const at::Tensor& x) {
  return {data_of(x), static_cast<int64_t>(x.nbytes())};
}

// Every rank's matrices, as they arrive.
class Arriving {
 public:
  Arriving(const at::Tensor& part, const Rows& rows) : rows_(rows), part_(part) {
    const int64_t rank = rows.group.rank;
    const int64_t columns = part.size(2);
    const auto elements = [&](int64_t p) { return rows.outer * rows.counts[p] * columns; };
    const auto others = [&](int64_t p) {
      return rows.outer * rows.total() * columns - elements(p);
    };
    Departure departure(&rows.group, others, {others(rank)}, part.options());
    // Where the block of `source` begins in p's buffer, in elements.
    const auto place = [&](int64_t source, int64_t p) {
      return rows.outer * rows.begin(source) * columns - (p < source ? elements(p) : 0);
    };
    for (int64_t p = 0; p < rows.group.size; ++p) {
      blocks_.push_back(
          p == rank ? part
                    : departure.buffer()
                          .narrow(0, place(p, rank), elements(p))
                          .view({rows.outer, rows.counts[p], columns}));
    }
    departure.send(
        [&](int64_t p) { return bytes_of(blocks_[p]); }, [&](int64_t) { return bytes_of(part_); },
        flight_);
    departure.write(
        [&](int64_t p, char* theirs) {
          const auto bytes = static_cast<int64_t>(part_.nbytes());
          if (bytes > 0) {
            char* const to = theirs + place(rank, p) * item_of(part_);
            run({copy_of_bytes(data_of(part_), to, bytes)}, part_.device());
          }
        },
        flight_);
  }

  // Calls visit(p, block), this rank's own first.
  void in_order(const std::function<void(int64_t, const at::Tensor&)>& visit) {
    const int64_t rank = rows_.group.rank, size = rows_.group.size;
    visit(rank, part_);
    for (int64_t step = 1; step < size; ++step) {
      const int64_t p = (rank - step + size) % size;
      flight_.wait_receive(p);
      visit(p, blocks_[p]);
    }
    flight_.wait_sends();
  }

 private:
  const Rows& rows_;
  at::Tensor part_;
  Tensors blocks_;
  Flight flight_;  // last: it ends before what it fills goes
};

// The sum over ranks of products, of which each gets its rows: sent as they are computed.
class Leaving {
 public:
  // x [outer, all rows, K], weight [K, M].
  Leaving(const at::Tensor& x, const at::Tensor& weight, const Rows& rows) : rows_(rows) {
    const int64_t rank = rows.group.rank, size = rows.group.size;
    const int64_t columns = weight.size(1);
    const auto shape = [&](int64_t p) {
      return std::vector<int64_t>{rows.outer, rows.counts[p], columns};
    };
    const auto elements = [&](int64_t p) { return c10::multiply_integers(shape(p)); };
    Departure departure(
        &rows.group, [&](int64_t p) { return size * elements(p); }, {size, elements(rank)},
        x.options());
    for (int64_t p = 0; p < size; ++p) {
      received_.push_back(departure.buffer()[p].view(shape(rank)));
    }
    const auto make = [&](int64_t p, const at::Tensor& to) {
      multiply(to, rows.rows_of(x, p), weight);
    };
    departure.send(
        [&](int64_t p) { return bytes_of(received_[p]); },
        [&](int64_t p) {
          products_.push_back(empty_buffer(shape(p), x));
          make(p, products_.back());
          return bytes_of(products_.back());
        },
        flight_);
    departure.write(
        [&](int64_t p, char* theirs) {
          if (elements(p) > 0) {
            make(
                p, at::for_blob(theirs + rank * elements(p) * item_of(x), shape(p))
                       .options(x.options())
                       .make_tensor());
          }
        },
        flight_);
    make(rank, received_[rank]);  // what nobody waits for but this rank
  }

  // [outer, this rank's rows, M], in rank order.
  at::Tensor sum(OptionalDtype reduce_dtype) {
    flight_.wait_all();
    RECORD_FUNCTION("deepsp::sum", {});
    const at::Tensor result = empty_buffer(received_[0].sizes(), received_[0]);
    std::vector<Addend> addends;
    for (const at::Tensor& block : received_) {
      addends.push_back({data_of(block), result.numel()});
    }
    std::vector<StridedSum> sums;
    add_sum(result, 1, result.numel(), result.scalar_type(), reduce_dtype, addends, sums);
    run(sums, result.device());
    return result;
  }

 private:
  const Rows& rows_;
  Tensors products_;
  Tensors received_;
  Flight flight_;
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

// ------------------------------------------------------------------- the ops

Tensors empty_gradients(const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef wanted) {
  Tensors gradients;
  const auto add = [&](bool asked, c10::SymIntArrayRef shape) {
    if (asked) {
      gradients.push_back(at::empty_symint(shape, input.options()));
    }
  };
  add(wanted[0], input.sym_sizes());
  add(wanted[1], weight.sym_sizes());
  add(wanted[2], weight.sym_size(0));
  return gradients;
}

at::Tensor all_gather_matmul(
    const at::Tensor& input,
    const at::Tensor& weight,
    const OptionalTensor& bias,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name,
    OptionalDtype reduce_dtype) {
  const Product expected =
      check_product(input, weight, bias, dim, sizes, rank, reduce_dtype, /*gathers=*/true);
  if (input.is_meta()) {
    return at::empty_symint(expected.shape, input.options());
  }
  const auto in_parts = rows_in_parts(expected.rows, input, rank, group_name, "all_gather_matmul");
  if (!in_parts) {
    return at::linear(all_gather(input, dim, sizes, "partial", rank, group_name, {}), weight, bias);
  }
  const Rows& rows = *in_parts;
  const at::Tensor product = empty_buffer(ints(expected.shape), input);
  const at::Tensor out = rows.full(product);
  const at::Tensor by = weight.t();
  Arriving(rows.part(input), rows).in_order([&](int64_t p, const at::Tensor& block) {
    multiply(rows.rows_of(out, p), block, by);
  });
  if (bias.has_value()) {
    product.add_(*bias);
  }
  return product;
}

Tensors all_gather_matmul_backward(
    const at::Tensor& grad,
    const at::Tensor& input,
    const at::Tensor& weight,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    at::IntArrayRef wanted,
    int64_t rank,
    std::string_view group_name,
    OptionalDtype reduce_dtype) {
  const Shard<c10::SymInt> shard =
      check_product_backward(grad, input, weight, dim, sizes, wanted, rank, /*gathers=*/true);
  if (input.is_meta()) {
    return empty_gradients(input, weight, wanted);
  }
  const auto in_parts = rows_in_parts(shard, input, rank, group_name, "all_gather_matmul_backward");
  Tensors results;
  if (!in_parts) {
    // What can be launched is, before products that don't need it.
    at::Tensor arriving, product, leaving, of_weight;
    if (wanted[1]) {
      arriving = all_gather_start(input, dim, sizes, "partial", rank, group_name, {});
    }
    if (wanted[0]) {
      product = at::matmul(grad, weight);
      leaving = reduce_scatter_start(product, dim, sizes, rank, group_name);
    }
    if (wanted[1]) {
      const SymInts shape = entire_shape(input.sym_sizes(), dim, sizes);
      of_weight = weight_grad(
          grad, all_gather_wait(arriving, dim, sizes, shape, "partial", rank, group_name)[0]);
    }
    if (wanted[0]) {
      results.push_back(reduce_scatter_wait(
          leaving, dim, sizes, product.sym_sizes(), rank, group_name, reduce_dtype));
    }
    if (wanted[1]) {
      results.push_back(of_weight);
    }
  } else {
    const Rows& rows = *in_parts;
    const at::Tensor grads = rows.full(grad);
    std::optional<Arriving> arriving;
    if (wanted[1]) {
      arriving.emplace(rows.part(input), rows);
    }
    std::optional<Leaving> leaving;
    if (wanted[0]) {
      leaving.emplace(grads, weight, rows);
    }
    std::optional<ProductSum> of_weight;
    if (wanted[1]) {
      of_weight.emplace(weight.sizes(), weight);
      arriving->in_order([&](int64_t p, const at::Tensor& block) {
        add_weight_grad(*of_weight, rows.rows_of(grads, p), block);
      });
    }
    if (wanted[0]) {
      results.push_back(leaving->sum(reduce_dtype).view(input.sizes()));
    }
    if (wanted[1]) {
      results.push_back(of_weight->total());
    }
  }
  if (wanted[2]) {
    results.push_back(flat(grad).sum(0));
  }
  return results;
}

at::Tensor matmul_reduce_scatter(
    const at::Tensor& input,
    const at::Tensor& weight,
    const OptionalTensor& bias,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name,
    OptionalDtype reduce_dtype) {
  const Product expected =
      check_product(input, weight, bias, dim, sizes, rank, reduce_dtype, /*gathers=*/false);
  if (input.is_meta()) {
    return at::empty_symint(expected.shape, input.options());
  }
  const auto in_parts =
      rows_in_parts(expected.rows, input, rank, group_name, "matmul_reduce_scatter");
  if (!in_parts) {
    const at::Tensor sum =
        reduce_scatter(at::linear(input, weight), dim, sizes, rank, group_name, reduce_dtype);
    return bias.has_value() ? sum.add(*bias) : sum;
  }
  const at::Tensor result = Leaving(in_parts->full(input), weight.t(), *in_parts)
                                .sum(reduce_dtype)
                                .view(ints(expected.shape));
  if (bias.has_value()) {
    result.add_(*bias);
  }
  return result;
}

Tensors matmul_reduce_scatter_backward(
    const at::Tensor& grad,
    const at::Tensor& input,
    const at::Tensor& weight,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    at::IntArrayRef wanted,
    int64_t rank,
    std::string_view group_name) {
  const Shard<c10::SymInt> shard =
      check_product_backward(grad, input, weight, dim, sizes, wanted, rank, /*gathers=*/false);
  if (input.is_meta()) {
    return empty_gradients(input, weight, wanted);
  }
  const auto in_parts =
      rows_in_parts(shard, input, rank, group_name, "matmul_reduce_scatter_backward");
  Tensors results;
  const bool travels = wanted[0] || wanted[1];
  if (travels && !in_parts) {
    const at::Tensor full = all_gather(grad, dim, sizes, "partial", rank, group_name, {});
    if (wanted[0]) {
      results.push_back(at::matmul(full, weight));
    }
    if (wanted[1]) {
      results.push_back(weight_grad(full, input));
    }
  } else if (travels) {
    const Rows& rows = *in_parts;
    const at::Tensor of_input = wanted[0] ? empty_buffer(input.sizes(), input) : at::Tensor();
    const at::Tensor out = wanted[0] ? rows.full(of_input) : at::Tensor();
    const at::Tensor x = wanted[1] ? rows.full(input) : at::Tensor();
    ProductSum of_weight(weight.sizes(), weight);
    Arriving(rows.part(grad), rows).in_order([&](int64_t p, const at::Tensor& block) {
      if (wanted[0]) {
        multiply(rows.rows_of(out, p), block, weight);
      }
      if (wanted[1]) {
        add_weight_grad(of_weight, block, rows.rows_of(x, p));
      }
    });
    if (wanted[0]) {
      results.push_back(of_input);
    }
    if (wanted[1]) {
      results.push_back(of_weight.total());
    }
  }
  if (wanted[2]) {
    results.push_back(flat(grad).sum(0));
  }
  return results;
}

}  // namespace

DEEPSP_KERNELS(m) {
  m.impl("all_gather_matmul", all_gather_matmul);
  m.impl("all_gather_matmul_backward", all_gather_matmul_backward);
  m.impl("matmul_reduce_scatter", matmul_reduce_scatter);
  m.impl("matmul_reduce_scatter_backward", matmul_reduce_scatter_backward);
}

TORCH_LIBRARY_IMPL(deepsp_inductor, CompositeImplicitAutograd, m) {
  m.impl("all_gather_matmul", all_gather_matmul);
  m.impl("all_gather_matmul_backward", all_gather_matmul_backward);
  m.impl("matmul_reduce_scatter", matmul_reduce_scatter);
  m.impl("matmul_reduce_scatter_backward", matmul_reduce_scatter_backward);
}

}  // namespace deepsp
