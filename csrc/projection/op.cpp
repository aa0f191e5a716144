// Linear layers around the exchange, the same for CPU and CUDA. A GEMM writes
// straight into the block that is sent, and reads straight from the block that
// arrived; while one block travels the next one's GEMM runs.

#include "../exchange/transport.h"
#include "ops.h"
#include "product_sum.h"

#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <torch/library.h>

namespace deepsp {
namespace {

// A GEMM with fewer columns than this runs well below full speed (1.2 times the
// time at 40, 1.7 at 20; none at 64): then the weights of all tensors in a block
// are put together first.
constexpr int64_t kNarrow = 64;
// Products that are added up read and write the sum each time: there, fewer than this.
constexpr int64_t kNarrowSum = 256;

// x [B, S_rank, dim] as a matrix [S_rank·B, dim] that BLAS takes as it is: rows in
// the order of the blocks. A copy only for B > 1 or odd strides.
at::Tensor rows_of(const at::Tensor& x) {
  const at::Tensor rows = x.transpose(0, 1).reshape({x.size(0) * x.size(1), x.size(2)});
  const bool dense = rows.stride(1) == 1 && rows.stride(0) >= rows.size(1);
  return dense ? rows : rows.contiguous();
}

// The way back: [S_rank·B, dim] -> [B, S_rank, dim], contiguous.
at::Tensor batches_of(const at::Tensor& rows, const Layout& layout) {
  const int64_t tokens = layout.seq_lens[layout.rank];
  return layout.batch == 1
             ? rows.view({1, tokens, rows.size(1)})
             : rows.view({tokens, layout.batch, rows.size(1)}).transpose(0, 1).contiguous();
}

// Tensor i's `heads`, which lie in `columns` of a block: rows of its weight.
struct Piece {
  size_t i;
  Range heads;
  Range columns;
};

// What rank p's block of a chunk is made of.
std::vector<Piece> pieces_of(const Layout& layout, int64_t p, int64_t chunk) {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < layout.heads.tensors(); ++i) {
    const Range heads = layout.heads.range(i, p, chunk);
    const int64_t begin = layout.column(i, p, chunk);
    const int64_t width = heads.size() * layout.head_dims[i];
    if (width > 0) {
      pieces.push_back({i, heads, {begin, begin + width}});
    }
  }
  return pieces;
}

bool narrow(const std::vector<Piece>& pieces, int64_t width) {
  return pieces.size() > 1 && std::any_of(pieces.begin(), pieces.end(), [&](const Piece& piece) {
           return piece.columns.size() < width;
         });
}

// The rows of a weight, or of its bias, that belong to these heads.
at::Tensor rows_for(at::TensorList of, const Layout& layout, size_t i, Range heads) {
  const int64_t dim = layout.head_dims[i];
  return of[i].narrow(0, heads.begin * dim, heads.size() * dim);
}

at::Tensor rows_for(at::TensorList of, const Layout& layout, const std::vector<Piece>& pieces) {
  std::vector<at::Tensor> rows;
  for (const Piece& piece : pieces) {
    rows.push_back(rows_for(of, layout, piece.i, piece.heads));
  }
  return at::cat(rows);
}

// ------------------------------------------------------------------- project

struct Projection {
  const at::Tensor& rows;  // [S_rank·B, dim]
  at::TensorList weights;
  at::TensorList biases;
  const Layout& layout;

  void write(const at::Tensor& to, const at::Tensor& weight, const at::Tensor& bias) const {
    at::Tensor out = to;
    at::mm_out(out, rows, weight.t());
    if (bias.defined()) {
      out.add_(bias);
    }
  }

  // Makes the block [S_rank·B, X_p].
  void operator()(int64_t chunk, const Place& place) const {
    const std::vector<Piece> pieces = pieces_of(layout, place.p, chunk);
    const int64_t columns = layout.columns(place.p, chunk);
    const at::Tensor block = at::for_blob(place.block, {rows.size(0), columns})
                                 .target_device(rows.device())
                                 .options(rows.options())
                                 .make_tensor();
    if (narrow(pieces, kNarrow)) {
      write(
          block, rows_for(weights, layout, pieces),
          biases.empty() ? at::Tensor() : rows_for(biases, layout, pieces));
      return;
    }
    for (const Piece& piece : pieces) {
      write(
          block.narrow(1, piece.columns.begin, piece.columns.size()),
          rows_for(weights, layout, piece.i, piece.heads),
          biases.empty() ? at::Tensor() : rows_for(biases, layout, piece.i, piece.heads));
    }
  }
};

std::vector<at::Tensor> project_to_heads_start_kernel(
    const at::Tensor& x,
    at::TensorList weights,
    at::TensorList biases,
    c10::SymIntArrayRef num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t chunks,
    bool last_first,
    int64_t rank,
    std::string_view group_name) {
  const SymBlockLayout shapes =
      check_project(x, weights, biases, num_heads, seq_lens, chunks, rank);
  const Layout layout = concrete(shapes);
  const auto group = group_of("project_to_heads", group_name, layout, x);
  const at::Tensor rows = rows_of(x);
  const Projection project{rows, weights, biases, layout};
  const int64_t count = layout.heads.chunks();
  std::vector<at::Tensor> buffers(count);
  std::vector<std::pair<int64_t, Place>> own;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t chunk = last_first ? count - 1 - n : n;
    buffers[chunk] = buffer_for(shapes, chunk, x);
    const auto make = [&](c10::ArrayRef<Place> places) {
      for (const Place& place : places) {
        project(chunk, place);
      }
    };
    for (const Place& left : launch_to_heads(make, layout, chunk, group.get(), buffers[chunk])) {
      own.emplace_back(chunk, left);
    }
  }
  // What nobody waits for but this rank: while everything else travels.
  for (const auto& [chunk, place] : own) {
    project(chunk, place);
  }
  for (int64_t chunk = 0; chunk < count; ++chunk) {
    settle_if_watched(buffers[chunk], layout, chunk);
  }
  return buffers;
}

// ------------------------------------------------------------------- sums of parts

// What arrives in the buffers of all chunks. Calls visit(chunk, p) for every block
// in the order of arrival: this rank's own, which are there, then the others' as
// they were sent. Where blocks travel together, so do a chunk's.
class Landing {
 public:
  Landing(at::TensorList buffers, const Layout& layout, bool last_first)
      : buffers_(buffers), layout_(layout), last_first_(last_first), chunks_(buffers.size()) {}

  Arrivals& operator[](int64_t chunk) {
    if (!chunks_[chunk].has_value()) {
      chunks_[chunk].emplace(buffers_[chunk], layout_, chunk);
    }
    return *chunks_[chunk];
  }

  template <class Visit>
  void in_order(const Visit& visit) {
    const bool own_first = buffers_[0].is_cpu();
    const auto visit_own = [&](int64_t chunk) {
      (*this)[chunk].wait(layout_.rank);
      visit(chunk, layout_.rank);
    };
    for (int64_t n = 0; own_first && n < count(); ++n) {
      visit_own(nth(n));
    }
    for (int64_t n = 0; n < count(); ++n) {
      if (!own_first) {
        visit_own(nth(n));
      }
      for (int64_t step = 1; step < layout_.parts(); ++step) {
        const int64_t p = (layout_.rank - step + layout_.parts()) % layout_.parts();
        (*this)[nth(n)].wait(p);
        visit(nth(n), p);
      }
      (*this)[nth(n)].finish();
    }
  }

 private:
  int64_t count() const { return layout_.heads.chunks(); }
  int64_t nth(int64_t n) const { return last_first_ ? count() - 1 - n : n; }

  at::TensorList buffers_;
  const Layout& layout_;
  bool last_first_;
  std::vector<std::optional<Arrivals>> chunks_;
};

// ------------------------------------------------------------------- its backward

// Gradients of x, weights and biases from those of a projection's outputs, which
// are on their way.
struct ProjectionGradients {
  const Layout& layout;
  at::TensorList weights;
  at::Tensor rows;  // of x [S_rank·B, dim], where weights' gradients are wanted
  std::optional<ProductSum> x;
  std::vector<at::Tensor> weight;
  std::vector<at::Tensor> bias;

  // `grad` [S_rank·B, h·D_i] is all there is of these heads.
  void add_weight(const at::Tensor& grad, size_t i, Range heads) {
    const int64_t dim = layout.head_dims[i];
    const auto mine = [&](const at::Tensor& of) {
      return of.narrow(0, heads.begin * dim, heads.size() * dim);
    };
    if (weight[i].defined()) {
      at::Tensor out = mine(weight[i]);
      at::mm_out(out, grad.t(), rows);
    }
    if (bias[i].defined()) {
      at::Tensor out = mine(bias[i]);
      at::sum_out(out, grad, at::IntArrayRef{0});
    }
  }

  void add(const at::Tensor& grad, size_t i, Range heads) {
    if (x.has_value()) {
      x->add_product(grad, rows_for(weights, layout, i, heads));
    }
    add_weight(grad, i, heads);
  }
};

std::vector<at::Tensor> project_to_heads_backward_kernel(
    at::TensorList buffers,
    const std::optional<at::Tensor>& x,
    at::TensorList weights,
    c10::SymIntArrayRef num_heads,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    at::IntArrayRef wanted,
    int64_t rank,
    std::string_view /*group_name*/) {
  const Layout layout = concrete(
      check_project_backward(buffers, x, weights, num_heads, batch, seq_lens, wanted, rank));
  const size_t n = weights.size();
  ProjectionGradients gradients{
      layout, weights, {}, std::nullopt, std::vector<at::Tensor>(n), std::vector<at::Tensor>(n)};
  if (wanted[0]) {
    gradients.x.emplace(
        std::vector<int64_t>{layout.seq_lens[rank] * layout.batch, weights[0].size(1)}, buffers[0]);
  }
  for (size_t i = 0; i < n; ++i) {
    if (wanted[1 + i]) {
      gradients.weight[i] = empty_buffer(weights[i].sizes(), weights[i]);
      gradients.rows = gradients.rows.defined() ? gradients.rows : rows_of(*x);
    }
    if (wanted[1 + n + i]) {
      gradients.bias[i] = at::empty({weights[i].size(0)}, weights[i].options());
    }
  }

  // Heads that several ranks read are summed before anything is multiplied.
  std::vector<std::vector<HeadSegment>> segments;
  bool shared = false;
  for (size_t i = 0; i < n; ++i) {
    segments.push_back(layout.heads.segments(i));
    for (const HeadSegment& segment : segments.back()) {
      shared = shared || segment.readers.size() > 1;
    }
  }
  const std::vector<at::Tensor> arriving = dense(buffers);
  Landing arrivals(arriving, layout, true);
  arrivals.in_order([&](int64_t chunk, int64_t p) {
    const std::vector<Piece> pieces = pieces_of(layout, p, chunk);
    if (!shared && arrivals[chunk].whole() && narrow(pieces, kNarrowSum)) {
      if (gradients.x.has_value()) {
        gradients.x->add_product(
            block_of(arriving[chunk], layout, chunk, p), rows_for(weights, layout, pieces));
      }
      for (const Piece& piece : pieces) {
        gradients.add_weight(arrivals[chunk].part(piece.i, p, piece.heads), piece.i, piece.heads);
      }
      return;
    }
    for (size_t i = 0; i < n; ++i) {
      for (const HeadSegment& segment : segments[i]) {
        if (segment.readers.size() == 1 && segment.readers[0] == p && segment.chunks[0] == chunk) {
          gradients.add(arrivals[chunk].part(i, p, segment.heads), i, segment.heads);
        }
      }
    }
  });
  for (size_t i = 0; shared && i < n; ++i) {
    for (const HeadSegment& segment : segments[i]) {
      if (segment.readers.size() > 1) {
        std::vector<at::Tensor> parts;
        for (size_t r = 0; r < segment.readers.size(); ++r) {
          parts.push_back(arrivals[segment.chunks[r]].part(i, segment.readers[r], segment.heads));
        }
        gradients.add(sum_of(parts), i, segment.heads);
      }
    }
  }

  std::vector<at::Tensor> results;
  if (wanted[0]) {
    results.push_back(batches_of(gradients.x->total(), layout));
  }
  for (const auto& of : {gradients.weight, gradients.bias}) {
    for (const at::Tensor& gradient : of) {
      if (gradient.defined()) {
        results.push_back(gradient);
      }
    }
  }
  return results;
}

// ------------------------------------------------------------------- output

at::Tensor heads_to_output_wait_kernel(
    at::TensorList buffers,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::SymInt num_heads,
    c10::SymInt batch,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view /*group_name*/) {
  const Layout layout =
      concrete(check_output(buffers, weight, bias, num_heads, batch, seq_lens, rank));
  const at::Tensor by_head = weight.t();  // [H·D, features]
  ProductSum sum({layout.seq_lens[rank] * layout.batch, weight.size(0)}, buffers[0]);
  const std::vector<at::Tensor> arriving = dense(buffers);
  Landing arrivals(arriving, layout, false);
  arrivals.in_order([&](int64_t chunk, int64_t p) {
    sum.add_product(
        block_of(arriving[chunk], layout, chunk, p),
        rows_for(by_head, layout, 0, layout.heads.range(0, p, chunk)));
  });
  at::Tensor y = sum.total();
  if (bias.has_value()) {
    y.add_(*bias);
  }
  return batches_of(y, layout);
}

at::Tensor heads_to_output_weight_grad_kernel(
    const at::Tensor& grad,
    at::TensorList buffers,
    c10::SymInt num_heads,
    c10::SymInt head_dim,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view /*group_name*/) {
  const Layout layout =
      concrete(check_output_weight_grad(grad, buffers, num_heads, head_dim, seq_lens, rank));
  const at::Tensor rows = rows_of(grad);
  const std::vector<at::Tensor> arrived = dense(buffers);
  const int64_t dim = layout.head_dims[0];
  const at::Tensor result = empty_buffer({grad.size(2), layout.heads.num_heads(0) * dim}, grad);
  for (int64_t chunk = 0; chunk < layout.heads.chunks(); ++chunk) {
    // A graph that computes the forward again has no use for its output, nor a wait.
    ensure_landed(arrived[chunk], layout, chunk);
    for (int64_t p = 0; p < layout.parts(); ++p) {
      const Range heads = layout.heads.range(0, p, chunk);
      at::Tensor out = result.narrow(1, heads.begin * dim, heads.size() * dim);
      at::mm_out(out, rows.t(), block_of(arrived[chunk], layout, chunk, p));
    }
  }
  return result;
}

void register_kernels(torch::Library& m) {
  m.impl("project_to_heads_start", project_to_heads_start_kernel);
  m.impl("project_to_heads_backward", project_to_heads_backward_kernel);
  m.impl("heads_to_output_wait", heads_to_output_wait_kernel);
  m.impl("heads_to_output_weight_grad", heads_to_output_weight_grad_kernel);
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
