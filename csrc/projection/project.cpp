// Linear layers in front of the exchange, the same for CPU and CUDA.

#include "product_sum.h"
#include "linear.h"

#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/sum.h>

#include <algorithm>

namespace deepsp {
namespace {

// A GEMM with fewer columns than this runs well below full speed (1.2 times the
// time at 40, 1.7 at 20; none at 64): then the weights of all tensors in a block
// are put together first.
constexpr int64_t kNarrow = 64;
// Products that are added up read and write the sum each time: there, fewer than this.
constexpr int64_t kNarrowSum = 256;

std::string weight_name(size_t i) {
  return "weights[" + std::to_string(i) + "]";
}

// D_i of weights [H_i·D_i, dim].
SymInts head_dims_of(
    at::TensorList weights, c10::SymIntArrayRef num_heads, const std::optional<c10::SymInt>& dim) {
  TORCH_CHECK_VALUE(
      !weights.empty() && weights.size() == num_heads.size(),
      "expected weights and num_heads to have one entry for each projection, got ", weights.size(),
      " and ", num_heads.size(), " entries");
  SymInts dims;
  for (size_t i = 0; i < weights.size(); ++i) {
    const at::Tensor& w = weights[i];
    TORCH_CHECK_VALUE(
        w.dim() == 2, "expected ", weight_name(i),
        " to have 2 dimensions [heads * head_dim, features of x], got ", w.dim());
    TORCH_CHECK_VALUE(
        !dim.has_value() || w.sym_size(1) == *dim, "expected ", weight_name(i), " to have ",
        dim.value_or(0), " columns, the number of features of x, got ", w.sym_size(1));
    TORCH_CHECK_VALUE(
        num_heads[i] > 0 && w.sym_size(0) % num_heads[i] == 0, "expected the rows of ",
        weight_name(i), " to be a multiple of num_heads[", i, "] = ", num_heads[i], ", got ",
        w.sym_size(0));
    dims.push_back(w.sym_size(0) / num_heads[i]);
  }
  return dims;
}

// Heads of some tensors whose columns lie side by side, in rows of consecutive tokens.
struct Slab {
  Range tokens;
  int64_t offset;  // in a block
  int64_t columns;
  std::vector<SectionHeads<int64_t>> pieces;
};

// What rank p's block of a chunk is made of: one slab, where heads are whole.
std::vector<Slab> slabs_of(const Layout& plan, int64_t p, int64_t chunk) {
  std::vector<Slab> slabs;
  for (const auto& part : plan.parts(plan.rank, p, chunk)) {
    if (slabs.empty() || part.column == 0) {
      slabs.push_back({{part.begin, part.end}, part.offset, part.columns, {}});
    }
    const int64_t columns = part.heads.size() * plan.head_dims[part.tensor];
    if (columns > 0) {
      slabs.back().pieces.push_back({part.tensor, part.heads, part.column, columns});
    }
  }
  return slabs;
}

bool narrow(const Slab& slab, int64_t width) {
  return slab.pieces.size() > 1 && std::any_of(
                                       slab.pieces.begin(), slab.pieces.end(),
                                       [&](const auto& piece) { return piece.columns < width; });
}

at::Tensor rows_for(
    at::TensorList of, const Layout& plan, const std::vector<SectionHeads<int64_t>>& pieces) {
  Tensors rows;
  for (const auto& piece : pieces) {
    rows.push_back(rows_for(of, plan, piece.tensor, piece.heads));
  }
  return at::cat(rows);
}

// ------------------------------------------------------------------- project

SymPlan check_project(const Given& given) {
  const at::Tensor x = given["x"];
  const at::TensorList weights = given["weights"], biases = given["biases"];
  check_tokens(x, "x", given["seq_lens"], given["rank"]);
  const SymInts dims = head_dims_of(weights, given["num_heads"], x.sym_size(2));
  TORCH_CHECK_VALUE(
      biases.empty() || biases.size() == weights.size(),
      "expected biases to be empty or to have one entry for each of the ", weights.size(),
      " weights, got ", biases.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    check_like(weights[i], weight_name(i), x, "x", kAutocast);
    if (!biases.empty()) {
      const std::string name = "biases[" + std::to_string(i) + "]";
      check_like(biases[i], name, x, "x", kAutocast);
      check_bias(biases[i], name, weights[i], weight_name(i));
    }
  }
  return plan_of_wait({}, given["num_heads"], dims, x.sym_size(0), given, 0, given["chunks"]);
}

struct Projection {
  const at::Tensor& rows;  // [S_rank·B, dim]
  at::TensorList weights;
  at::TensorList biases;
  const Layout& plan;

  void write(
      const at::Tensor& to,
      const at::Tensor& of,
      const at::Tensor& weight,
      const at::Tensor& bias) const {
    at::Tensor out = to;
    at::mm_out(out, of, weight.t());
    if (bias.defined()) {
      out.add_(bias);
    }
  }

  at::Tensor over(char* block, at::IntArrayRef sizes) const {
    return at::for_blob(block, sizes)
        .target_device(rows.device())
        .options(rows.options())
        .make_tensor();
  }

  // Makes the blocks of all ranks, which lie behind one another: by one product, of whole heads.
  void together(int64_t chunk, c10::ArrayRef<PackedBlock> places) const {
    std::vector<SectionHeads<int64_t>> pieces;
    std::vector<int64_t> widths;
    for (const PackedBlock& place : places) {
      if (plan.cuts_queries()) {
        (*this)(chunk, place);
        continue;
      }
      const Slab slab = slabs_of(plan, place.p, chunk)[0];
      pieces.insert(pieces.end(), slab.pieces.begin(), slab.pieces.end());
      widths.push_back(slab.columns);
    }
    if (widths.empty()) {
      return;
    }
    const at::Tensor weight = rows_for(weights, plan, pieces);
    const int64_t n = rows.size(0), dim = rows.size(1);
    const auto ranks = static_cast<int64_t>(places.size());
    if (std::all_of(widths.begin(), widths.end(), [&](int64_t w) { return w == widths[0]; })) {
      at::Tensor blocks = over(places[0].block, {ranks, n, widths[0]});
      at::bmm_out(
          blocks, rows.expand({ranks, n, dim}),
          weight.view({ranks, widths[0], dim}).transpose(1, 2));
      if (!biases.empty()) {
        blocks.add_(rows_for(biases, plan, pieces).view({ranks, 1, widths[0]}));
      }
      return;
    }
    at::Tensor product = at::mm(rows, weight.t());
    if (!biases.empty()) {
      product.add_(rows_for(biases, plan, pieces));
    }
    const int64_t item = item_of(rows), all = product.size(1) * item;
    const char* from = data_of(product);
    std::vector<StridedCopy> copies;
    for (size_t i = 0; i < places.size(); ++i) {
      const int64_t row = widths[i] * item;
      copies.push_back(
          coalesce({from, places[i].block, {1, 1, 1, n}, {0, 0, 0, all}, {0, 0, 0, row}, row}));
      from += row;
    }
    run(copies, rows.device());
  }

  // Makes the block for a rank.
  void operator()(int64_t chunk, const PackedBlock& place) const {
    for (const Slab& slab : slabs_of(plan, place.p, chunk)) {
      const int64_t tokens = slab.tokens.size() * plan.batch;
      const at::Tensor of =
          rows.narrow(0, (slab.tokens.begin - plan.first(plan.rank)) * plan.batch, tokens);
      const at::Tensor block =
          over(place.block + slab.offset * item_of(rows), {tokens, slab.columns});
      if (narrow(slab, kNarrow)) {
        write(
            block, of, rows_for(weights, plan, slab.pieces),
            biases.empty() ? at::Tensor() : rows_for(biases, plan, slab.pieces));
        continue;
      }
      for (const auto& [tensor, heads, column, columns] : slab.pieces) {
        write(
            block.narrow(1, column, columns), of, rows_for(weights, plan, tensor, heads),
            biases.empty() ? at::Tensor() : rows_for(biases, plan, tensor, heads));
      }
    }
  }
};

c10::IValue project_to_heads_start(const Given& given) {
  const SymPlan shapes = check_project(given);
  const at::Tensor x = given["x"];
  const at::TensorList weights = given["weights"], biases = given["biases"];
  if (x.is_meta()) {
    return meta_buffers(shapes, x);
  }
  const Layout plan = concrete(shapes);
  const Group group = group_of("project_to_heads", given["group_name"], plan, x);
  const bool last_first = given["last_first"];
  const at::Tensor rows = rows_of(x);
  const Projection project{rows, weights, biases, plan};
  const int64_t count = plan.chunks();
  Tensors buffers(count);
  std::vector<std::pair<int64_t, PackedBlock>> own;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t chunk = last_first ? count - 1 - n : n;
    Transfer transfer = transfer_of(group, plan, chunk, x);
    buffers[chunk] = transfer.buffer();
    const auto make = [&](c10::ArrayRef<PackedBlock> places) {
      if (places.size() > 1) {
        return project.together(chunk, places);
      }
      project(chunk, places[0]);
    };
    for (const PackedBlock& left : launch_to_heads(make, {}, plan, chunk, transfer)) {
      own.emplace_back(chunk, left);
    }
  }
  // This rank's own blocks, which no other rank waits for, while the others are in flight.
  for (const auto& [chunk, place] : own) {
    project(chunk, place);
  }
  for (int64_t chunk = 0; chunk < count; ++chunk) {
    settle_if_watched(buffers[chunk], plan, chunk);
  }
  return buffers;
}

// ------------------------------------------------------------------- its backward

SymPlan check_project_backward(const Given& given) {
  const at::TensorList buffers = given["buffers"], weights = given["weights"];
  const OptionalTensor x = given["x"];
  const at::IntArrayRef wanted = given["wanted"];
  check_buffers(buffers);
  check_wanted(wanted, 1 + 2 * weights.size(), "x, each weight and each bias");
  const auto dims = head_dims_of(weights, given["num_heads"], std::nullopt);
  for (size_t i = 0; i < weights.size(); ++i) {
    TORCH_CHECK_VALUE(
        !wanted[1 + i] || x.has_value(), "expected x, which the gradient of ", weight_name(i),
        " needs, got None");
  }
  if (x.has_value()) {
    check_tokens(*x, "x", given["seq_lens"], given["rank"]);
  }
  return plan_of_wait(
      buffers, given["num_heads"], dims, given["batch"], given, 0,
      static_cast<int64_t>(buffers.size()));
}

// Gradients of x, weights and biases from those of a projection's outputs, which
// are on their way.
struct ProjectionGradients {
  const Layout& plan;
  at::TensorList weights;
  at::Tensor rows;  // of x [S_rank·B, dim], where weights' gradients are wanted
  std::optional<ProductSum> x;
  Tensors weight;
  Tensors bias;

  // `grad` [S_rank·B, h·D_i] is all there is of these heads.
  void add_weight(const at::Tensor& grad, size_t i, Range heads) {
    const int64_t dim = plan.head_dims[i];
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
      x->add_product(grad, rows_for(weights, plan, i, heads));
    }
    add_weight(grad, i, heads);
  }

  // grads [S_rank·B, Σ H_i·D_i]: all there is.
  Tensors of_rows(const at::Tensor& grads) {
    if (x.has_value()) {
      x->add_product(grads, weights.size() == 1 ? weights[0] : at::cat(weights));
    }
    int64_t column = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
      const int64_t heads = plan.heads.num_heads(i), width = heads * plan.head_dims[i];
      add_weight(grads.narrow(1, column, width), i, {0, heads});
      column += width;
    }
    return all();
  }

  // What was wanted, in order.
  Tensors all() {
    Tensors results;
    if (x.has_value()) {
      results.push_back(batches_of(x->total(), plan));
    }
    for (const auto& of : {weight, bias}) {
      for (const at::Tensor& gradient : of) {
        if (gradient.defined()) {
          results.push_back(gradient);
        }
      }
    }
    return results;
  }
};

c10::IValue project_to_heads_backward(const Given& given) {
  const SymPlan shapes = check_project_backward(given);
  const at::TensorList buffers = given["buffers"], weights = given["weights"];
  const OptionalTensor x = given["x"];
  const at::IntArrayRef wanted = given["wanted"];
  const size_t n = weights.size();
  Tensors results;
  if (buffers[0].is_meta()) {
    const auto add = [&](bool asked, c10::SymIntArrayRef shape, const at::Tensor& like) {
      if (asked) {
        results.push_back(at::empty_symint(shape, like.options()));
      }
    };
    add(wanted[0], {shapes.batch, shapes.tokens(), weights[0].sym_size(1)}, buffers[0]);
    for (size_t i = 0; i < 2 * n; ++i) {
      const at::Tensor& weight = weights[i % n];
      add(wanted[1 + i], weight.sym_sizes().slice(0, i < n ? 2 : 1), weight);
    }
    return results;
  }
  const Layout plan = concrete(shapes);
  ProjectionGradients gradients{plan, weights, {}, std::nullopt, Tensors(n), Tensors(n)};
  if (wanted[0]) {
    gradients.x.emplace(
        std::vector<int64_t>{plan.tokens() * plan.batch, weights[0].size(1)}, buffers[0]);
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
  const Tensors dense_buffers = dense(buffers);
  for (size_t i = 0; i < n; ++i) {
    segments.push_back(plan.heads.segments(i));
    shared = shared || !has_one_reader_each(plan, i);
  }
  if (are_merged(dense_buffers, plan)) {
    return gradients.of_rows(merge_to_rows(dense_buffers, plan));
  }
  ReceivedChunks received(dense_buffers, plan, true);
  received.in_order([&](int64_t chunk, int64_t p) {
    const Slab slab = slabs_of(plan, p, chunk)[0];
    if (!shared && received[chunk].whole() && narrow(slab, kNarrowSum)) {
      if (gradients.x.has_value()) {
        gradients.x->add_product(received[chunk].block(p), rows_for(weights, plan, slab.pieces));
      }
      for (const auto& piece : slab.pieces) {
        gradients.add_weight(
            received[chunk].part(piece.tensor, p, piece.heads), piece.tensor, piece.heads);
      }
      return;
    }
    for (size_t i = 0; i < n; ++i) {
      for (const HeadSegment& segment : segments[i]) {
        if (segment.readers.size() == 1 && segment.readers[0] == p && segment.chunks[0] == chunk) {
          gradients.add(received[chunk].part(i, p, segment.heads), i, segment.heads);
        }
      }
    }
  });
  for (size_t i = 0; shared && i < n; ++i) {
    for (const HeadSegment& segment : segments[i]) {
      if (segment.readers.size() > 1) {
        Tensors parts;
        for (size_t r = 0; r < segment.readers.size(); ++r) {
          parts.push_back(received[segment.chunks[r]].part(i, segment.readers[r], segment.heads));
        }
        gradients.add(sum_of(parts), i, segment.heads);
      }
    }
  }

  return gradients.all();
}

}  // namespace

DEEPSP_KERNELS(m) {
  implement<project_to_heads_start>(m, "_project_to_heads_start");
  implement<project_to_heads_backward>(m, "_project_to_heads_backward");
}

}  // namespace deepsp
