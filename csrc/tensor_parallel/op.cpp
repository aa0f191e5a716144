// The kernels, the same for CPU and CUDA. Point to point, products are computed rank by rank: a
// part that arrived while another travels, a part that is to leave before the next. Nothing is
// packed or copied out: products read and write blocks as they travel. On other backends the
// collective and the product follow one another.

#include "../collectives/agreement.h"
#include "../collectives/exchange.h"
#include "../exchange/copies.h"
#include "../projection/product_sum.h"
#include "../symints.h"
#include "ops.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <functional>
#include <sstream>

namespace deepsp {
namespace {

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
  int64_t of(int64_t p) const { return outer * counts[p]; }

  at::Tensor matrices(const at::Tensor& x, int64_t rows) const {
    return x.contiguous().view({outer, rows, x.size(-1)});
  }
  at::Tensor whole(const at::Tensor& x) const { return matrices(x, total()); }
  at::Tensor part(const at::Tensor& x) const { return matrices(x, counts[group.rank]); }
  // Rank p's rows of whole matrices.
  at::Tensor rows_of(const at::Tensor& whole, int64_t p) const {
    return whole.narrow(1, begin(p), counts[p]);
  }
};

Rows rows_of(
    const SymAlong& layout, const at::Tensor& like, std::string_view group_name, const char* op) {
  const int64_t inner = layout.inner.guard_int(__FILE__, __LINE__);
  std::vector<int64_t> counts;
  for (const int64_t size : ints(layout.sizes)) {
    counts.push_back(size * inner);
  }
  Group group = resolve_group(op, group_name, layout.rank, layout.parts(), like.device(), "sizes");
  if (debugging()) {
    std::ostringstream text;
    text << "input " << like.scalar_type() << " with rows " << at::IntArrayRef(counts) << " in "
         << layout.outer << " matrices of " << like.size(-1) << " columns";
    check_agreement(group, like.device(), {text.str()});
  }
  return {layout.outer.guard_int(__FILE__, __LINE__), std::move(counts), std::move(group)};
}

bool pipelined(const Rows& rows) {
  return rows.group.point_to_point && rows.group.size > 1;
}

// out [outer, rows, M] = x [outer, rows, K] by weight [K, M].
void multiply(const at::Tensor& out, const at::Tensor& x, const at::Tensor& weight) {
  for (int64_t o = 0; o < out.size(0); ++o) {
    at::Tensor to = out[o];
    at::mm_out(to, x[o], weight);
  }
}

// Every rank's matrices, as they arrive.
class Arriving {
 public:
  Arriving(const at::Tensor& part, const Rows& rows) : rows_(rows), part_(part) {
    const int64_t rank = rows.group.rank;
    const int64_t columns = part.size(2);
    for (int64_t p = 0; p < rows.group.size; ++p) {
      blocks_.push_back(
          p == rank ? part : empty_buffer({rows.outer, rows.counts[p], columns}, part));
    }
    const auto bytes = [](const at::Tensor& x) {
      return Bytes{data_of(x), static_cast<int64_t>(x.nbytes())};
    };
    exchange_point_to_point(
        rows.group, [&](int64_t p) { return bytes(blocks_[p]); },
        [&](int64_t) { return bytes(part_); }, flight_);
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
  std::vector<at::Tensor> blocks_;
  Flight flight_;  // last: it ends before what it fills goes
};

// The sum over ranks of products, of which each gets its rows: sent as they are computed.
class Leaving {
 public:
  // x [outer, all rows, K], weight [K, M].
  Leaving(const at::Tensor& x, const at::Tensor& weight, const Rows& rows) : rows_(rows) {
    const int64_t rank = rows.group.rank;
    const int64_t columns = weight.size(1);
    for (int64_t p = 0; p < rows.group.size; ++p) {
      products_.push_back(empty_buffer({rows.outer, rows.counts[p], columns}, x));
      received_.push_back(
          p == rank ? products_[rank] : empty_buffer({rows.outer, rows.counts[rank], columns}, x));
    }
    const auto bytes = [](const at::Tensor& t) {
      return Bytes{data_of(t), static_cast<int64_t>(t.nbytes())};
    };
    const auto make = [&](int64_t p) { multiply(products_[p], rows.rows_of(x, p), weight); };
    exchange_point_to_point(
        rows.group, [&](int64_t p) { return bytes(received_[p]); },
        [&](int64_t p) {
          make(p);
          return bytes(products_[p]);
        },
        flight_);
    make(rank);  // what nobody waits for but this rank
  }

  // [outer, this rank's rows, M], in rank order.
  at::Tensor sum(ReduceDtype reduce_dtype) {
    flight_.wait_all();
    RECORD_FUNCTION("deepsp::sum", {});
    const at::Tensor result = empty_buffer(received_[0].sizes(), received_[0]);
    const Float dtype = float_type(result.scalar_type());
    StridedSum sum{
        dtype, dtype, reduce_dtype ? float_type(*reduce_dtype) : wide(dtype), data_of(result), {},
        {},    {}};
    for (const at::Tensor& block : received_) {
      sum.sources.push_back({data_of(block), {}});
    }
    const std::vector<int64_t> rows(received_.size(), result.numel());
    std::vector<StridedSum> sums;
    add_sum(std::move(sum), 1, result.numel(), rows, sums);
    run(sums, result.device());
    return result;
  }

 private:
  const Rows& rows_;
  std::vector<at::Tensor> products_;
  std::vector<at::Tensor> received_;
  Flight flight_;
};

at::Tensor gathered(
    const at::Tensor& x,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name) {
  return all_gather_wait(
      all_gather_start(x, dim, sizes, "partial", rank, group_name, {}), dim, sizes,
      entire_shape(x.sym_sizes(), dim, sizes), "partial", rank, group_name)[0];
}

at::Tensor reduce_scattered(
    const at::Tensor& x,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  return reduce_scatter_wait(
      reduce_scatter_start(x, dim, sizes, rank, group_name), dim, sizes, x.sym_sizes(), rank,
      group_name, reduce_dtype);
}

at::Tensor flat(const at::Tensor& x) {
  return x.reshape({-1, x.size(-1)});
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

at::Tensor all_gather_matmul_kernel(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  const SymAlong layout = check_gather_matmul(input, weight, bias, dim, sizes, rank, reduce_dtype);
  const Rows rows = rows_of(layout, input, group_name, "all_gather_matmul");
  if (!pipelined(rows)) {
    return at::linear(gathered(input, dim, sizes, rank, group_name), weight, bias);
  }
  const auto shape =
      ints(product_shape(input, dim, layout.begin(layout.parts()), weight.sym_size(0)));
  const at::Tensor product = empty_buffer(shape, input);
  const at::Tensor out = rows.whole(product);
  const at::Tensor by = weight.t();
  Arriving(rows.part(input), rows).in_order([&](int64_t p, const at::Tensor& block) {
    multiply(rows.rows_of(out, p), block, by);
  });
  if (bias.has_value()) {
    product.add_(*bias);
  }
  return product;
}

std::vector<at::Tensor> all_gather_matmul_backward_kernel(
    const at::Tensor& grad,
    const at::Tensor& input,
    const at::Tensor& weight,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    at::IntArrayRef wanted,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  const SymAlong layout =
      check_matmul_backward(grad, input, weight, dim, sizes, wanted, rank, /*gathers=*/true);
  const Rows rows = rows_of(layout, input, group_name, "all_gather_matmul_backward");
  std::vector<at::Tensor> results;
  if (!pipelined(rows)) {
    if (wanted[0]) {
      results.push_back(
          reduce_scattered(at::matmul(grad, weight), dim, sizes, rank, group_name, reduce_dtype));
    }
    if (wanted[1]) {
      results.push_back(weight_grad(grad, gathered(input, dim, sizes, rank, group_name)));
    }
  } else {
    const at::Tensor grads = rows.whole(grad);
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

at::Tensor matmul_reduce_scatter_kernel(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  const SymAlong layout = check_matmul_scatter(input, weight, bias, dim, sizes, rank, reduce_dtype);
  const Rows rows = rows_of(layout, input, group_name, "matmul_reduce_scatter");
  at::Tensor result;
  if (!pipelined(rows)) {
    result =
        reduce_scattered(at::linear(input, weight), dim, sizes, rank, group_name, reduce_dtype);
  } else {
    const auto shape = ints(product_shape(input, dim, sizes[rank], weight.sym_size(0)));
    result = Leaving(rows.whole(input), weight.t(), rows).sum(reduce_dtype).view(shape);
  }
  if (bias.has_value()) {
    result.add_(*bias);
  }
  return result;
}

std::vector<at::Tensor> matmul_reduce_scatter_backward_kernel(
    const at::Tensor& grad,
    const at::Tensor& input,
    const at::Tensor& weight,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    at::IntArrayRef wanted,
    int64_t rank,
    std::string_view group_name) {
  const SymAlong layout =
      check_matmul_backward(grad, input, weight, dim, sizes, wanted, rank, /*gathers=*/false);
  const Rows rows = rows_of(layout, input, group_name, "matmul_reduce_scatter_backward");
  std::vector<at::Tensor> results;
  if (!pipelined(rows)) {
    const at::Tensor whole = gathered(grad, dim, sizes, rank, group_name);
    if (wanted[0]) {
      results.push_back(at::matmul(whole, weight));
    }
    if (wanted[1]) {
      results.push_back(weight_grad(whole, input));
    }
  } else if (wanted[0] || wanted[1]) {
    const at::Tensor of_input = wanted[0] ? empty_buffer(input.sizes(), input) : at::Tensor();
    const at::Tensor out = wanted[0] ? rows.whole(of_input) : at::Tensor();
    const at::Tensor x = wanted[1] ? rows.whole(input) : at::Tensor();
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

void register_kernels(torch::Library& m) {
  m.impl("all_gather_matmul", all_gather_matmul_kernel);
  m.impl("all_gather_matmul_backward", all_gather_matmul_backward_kernel);
  m.impl("matmul_reduce_scatter", matmul_reduce_scatter_kernel);
  m.impl("matmul_reduce_scatter_backward", matmul_reduce_scatter_backward_kernel);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CPU, m) {
  register_kernels(m);
}

#ifdef DEEPSP_CUDA
TORCH_LIBRARY_IMPL(deepsp, CUDA, m) {
  register_kernels(m);
}
#endif

}  // namespace deepsp
