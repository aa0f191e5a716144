// Attention over a sharded sequence whose keys and values are exchanged a part of the tokens at a
// time, so that a rank never holds those of the full sequence (the idea is FPDT's: Yao et al.,
// arXiv:2408.16978). Each part has tokens of every rank, so every exchange moves about as much to
// and from each rank. While attention computes with one part, the next is in flight. Backward
// exchanges k and v again: what is saved is q, the output and the log-sum-exp of this rank's heads,
// and this rank's tokens of k and v.

#include "../common/checks.h"
#include "../exchange/ops.h"
#include "blocks.h"
#include "cell.h"
#include "log_sum.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

namespace deepsp {
namespace {

constexpr const char* kNames[] = {"q", "k", "v"};

// Tokens that are exchanged together: some of each rank's.
struct TokenPart {
  std::vector<c10::SymInt> seq_lens;
  Range mine;                 // among this rank's tokens
  std::vector<Range> tokens;  // each rank's, in the full sequence
};

std::vector<TokenPart> token_parts(
    const std::vector<int64_t>& seq_lens, int64_t rank, int64_t kv_chunk) {
  const auto ranks = static_cast<int64_t>(seq_lens.size());
  const int64_t each = (kv_chunk + ranks - 1) / ranks;
  const int64_t longest = *std::max_element(seq_lens.begin(), seq_lens.end());
  std::vector<TokenPart> parts;
  for (int64_t at = 0; at < longest; at += each) {
    TokenPart part;
    int64_t first = 0;  // a rank's first token
    for (int64_t r = 0; r < ranks; ++r) {
      const Range own = {std::min(at, seq_lens[r]), std::min(at + each, seq_lens[r])};
      part.seq_lens.push_back(own.size());
      part.tokens.push_back({first + own.begin, first + own.end});
      if (r == rank) {
        part.mine = own;
      }
      first += seq_lens[r];
    }
    parts.push_back(std::move(part));
  }
  return parts;
}

constexpr size_t kSaved = 3;  // of each cell: q, the output, the log-sum-exp

// The arguments that the op and its backward share.
struct StreamedCall {
  const Given& given;
  const at::Tensor k, v;
  const BlockArguments how;
  const int64_t kv_chunk, rank;
  const bool return_lse;
  const SymPlan plan;
  const std::vector<Cell> cells = plan.heads.cells(rank);

  // q: what has its shape, but for head_dim.
  StreamedCall(const Given& given, const at::Tensor& q)
      : given(given),
        k(given["k"]),
        v(given["v"]),
        how(given),
        kv_chunk(given["kv_chunk"]),
        rank(given["rank"]),
        return_lse(given["return_lse"]),
        plan(plan_by_tokens({q, k, v}, given, kNames)) {}

  CellOf cell_of(size_t n) const { return {plan.heads, rank, 0, static_cast<int64_t>(n)}; }
  int64_t heads() const { return plan.heads.num_heads(0); }
  // Those of an output that is sent.
  c10::SymInt features(const c10::SymInt& head_dim) const {
    return return_lse ? head_dim + features_of_log_sum(k.scalar_type()) : head_dim;
  }
  // The number of a cell's queries.
  c10::SymInt queries(size_t n) const { return plan.sections(rank, 0)[n].rows(); }
  // How the queries of each cell attend.
  std::vector<Attending> attending() const {
    const int64_t tokens = plan.total().guard_int(__FILE__, __LINE__);
    std::vector<Attending> found;
    for (size_t n = 0; n < cells.size(); ++n) {
      found.push_back(
          deepsp::attending(
              how, k.size(0), tokens, k.size(3), ints(cell_of(n).queries(plan.total()))));
    }
    return found;
  }
  OptionalTensor sinks(size_t n) const {
    return how.sinks.has_value() ? OptionalTensor(of_cell(*how.sinks, n)) : std::nullopt;
  }
  at::Tensor of_cell(const at::Tensor& sinks, size_t n) const {
    return sinks.narrow(0, cells[n].heads.begin, cells[n].heads.size());
  }

  // What every cell gets of x [B, S_rank, H, D].
  Tensors to_heads(const at::Tensor& x) const {
    const Tensors buffers =
        seq_to_heads_start(given, {{"inputs", Tensors{x}}, {"chunks", 1}, {"last_first", false}});
    return seq_to_heads_wait(
        given, {{"buffer", buffers[0]},
                {"num_heads", SymInts{heads()}},
                {"head_dims", SymInts{x.sym_size(3)}},
                {"batch", x.sym_size(0)},
                {"chunk", 0},
                {"chunks", 1}});
  }
  // The way back.
  at::Tensor to_seq(const Tensors& of_cells) const {
    const at::Tensor buffer = heads_to_seq_start(
        given, {{"inputs", of_cells},
                {"num_heads", SymInts{heads()}},
                {"chunk", 0},
                {"chunks", 1},
                {"tokens_first", false}});
    const Tensors merged = heads_to_seq_wait(
        given, {{"buffers", Tensors{buffer}},
                {"num_heads", SymInts{heads()}},
                {"head_dims", SymInts{of_cells[0].sym_size(3)}},
                {"batch", of_cells[0].sym_size(0)}});
    return merged[0];
  }
};

// The exchange of k and v, and of their gradients. q isn't sent, but its heads decide which rank
// reads which heads of k and v.
class KvStream {
 public:
  explicit KvStream(const StreamedCall& call)
      : parts(token_parts(ints(call.plan.seq_lens), call.rank, call.kv_chunk)),
        call_(call),
        read_(call.plan.heads.range(1, call.rank)),
        num_heads_(call.plan.heads.num_heads()),
        head_dims_{0, call.k.size(3), call.v.size(3)} {}

  const std::vector<TokenPart> parts;

  // Calls visit(part, k, v) with k and v of the heads that this rank reads.
  template <class Visit>
  void each(const Visit& visit) const {
    at::Tensor next = start(0);
    for (size_t at = 0; at < parts.size(); ++at) {
      const Tensors found = seq_to_heads_wait(
          call_.given, {{"buffer", next},
                        {"num_heads", num_heads_},
                        {"head_dims", head_dims_},
                        {"batch", call_.k.size(0)},
                        {"seq_lens", parts[at].seq_lens},
                        {"chunk", 0},
                        {"chunks", 1}});
      next = start(at + 1);
      visit(parts[at], found[found.size() - 2], found.back());
    }
  }

  // A part's k or v, or their gradients, with a head for each query head of the cell.
  at::Tensor for_cell(const at::Tensor& x, size_t n) const {
    return kv_of_cell(x, call_.cell_of(n));
  }
  // Adds the gradient of for_cell's result to that of its argument.
  void add_of_cell(const at::Tensor& to, const at::Tensor& gradient, size_t n) const {
    const Readers readers(call_.cells[n].heads, call_.heads() / num_heads_[1]);
    int64_t at = 0;
    for (int64_t head = 0; head < readers.kv.size(); ++head) {
      const int64_t count = readers.uniform() ? 1 : readers.counts[head];
      const at::Tensor of_readers = gradient.narrow(2, at, count);
      to.narrow(2, readers.kv.begin - read_.begin + head, 1)
          .add_(count == 1 ? of_readers : of_readers.sum(at::OptionalIntArrayRef{2}, true));
      at += count;
    }
  }

  at::Tensor start_back(const TokenPart& part, const at::Tensor& dk, const at::Tensor& dv) const {
    Tensors inputs;
    const SymPlan plan(call_.plan.heads, head_dims_, call_.plan.batch, part.seq_lens, call_.rank);
    for (const auto& section : plan.sections(call_.rank, 0)) {
      for (const auto& of : section.tensors) {
        const c10::SymInt none[] = {plan.batch, section.rows(), of.heads.size(), 0};
        inputs.push_back(
            of.tensor == 0   ? at::empty_symint(none, dk.options())
            : of.tensor == 1 ? dk
                             : dv);
      }
    }
    return heads_to_seq_start(
        call_.given, {{"inputs", inputs},
                      {"num_heads", num_heads_},
                      {"seq_lens", part.seq_lens},
                      {"chunk", 0},
                      {"chunks", 1},
                      {"tokens_first", false}});
  }

  // The gradients of this rank's tokens of a part.
  Tensors wait_back(const TokenPart& part, const at::Tensor& buffer) const {
    return heads_to_seq_wait(
        call_.given, {{"buffers", Tensors{buffer}},
                      {"num_heads", num_heads_},
                      {"head_dims", head_dims_},
                      {"batch", call_.k.size(0)},
                      {"seq_lens", part.seq_lens}});
  }

 private:
  at::Tensor start(size_t at) const {
    if (at >= parts.size()) {
      return {};
    }
    const TokenPart& part = parts[at];
    const auto own = [&](const at::Tensor& x) {
      return x.narrow(1, part.mine.begin, part.mine.size());
    };
    const at::Tensor q =
        at::empty({call_.k.size(0), part.mine.size(), call_.heads(), 0}, call_.k.options());
    const Tensors buffers = seq_to_heads_start(
        call_.given, {{"inputs", Tensors{q, own(call_.k), own(call_.v)}},
                      {"seq_lens", part.seq_lens},
                      {"chunks", 1},
                      {"last_first", false}});
    return buffers[0];
  }

  const StreamedCall& call_;
  const Range read_;  // kv heads
  const std::vector<int64_t> num_heads_;
  const SymInts head_dims_;
};

// Visits the ranges of a part that hold tokens, and where each begins among the part's tokens.
template <class Visit>
void each_range(const TokenPart& part, const Visit& visit) {
  int64_t at = 0;
  for (const Range& tokens : part.tokens) {
    if (tokens.size() > 0) {
      visit(tokens, at);
    }
    at += tokens.size();
  }
}

c10::IValue streamed_attention_kernel(const Given& given) {
  const at::Tensor q = given["q"];
  const StreamedCall call(given, q);
  const auto& [_, k, v, how, kv_chunk, rank, return_lse, plan, cells] = call;
  TORCH_CHECK_VALUE(
      k.sym_size(2) == v.sym_size(2) && q.sym_size(3) == k.sym_size(3) && q.is_floating_point(),
      "expected floating-point q and k of one head_dim, and k and v of as many heads, got shapes ",
      q.sym_sizes(), ", ", k.sym_sizes(), " and ", v.sym_sizes());
  check_pattern(how.pattern(), plan.batch, plan.total(), call.heads());
  check_at_least(kv_chunk, 1, "kv_chunk");
  Tensors results;
  if (q.is_meta()) {
    const c10::SymInt out[] = {
        q.sym_size(0), q.sym_size(1), q.sym_size(2), call.features(v.sym_size(3))};
    results.push_back(at::empty_symint(out, q.options()));
    const Tensors of_cells = call.to_heads(q);
    for (size_t n = 0; n < cells.size(); ++n) {
      results.push_back(of_cells[n]);
      for (const at::Tensor& x :
           empty_attended(q, call.queries(n), cells[n].heads.size(), v.sym_size(3))) {
        results.push_back(x);
      }
    }
    return results;
  }
  const Tensors qs = call.to_heads(q);
  const std::vector<Attending> attending = call.attending();
  std::vector<Attended> attended;
  for (size_t n = 0; n < cells.size(); ++n) {
    attended.emplace_back(qs[n], v.size(3), attending[n], /*at_once=*/false);
  }
  const KvStream stream(call);
  stream.each([&](const TokenPart& part, const at::Tensor& k, const at::Tensor& v) {
    for (size_t n = 0; n < cells.size(); ++n) {
      const at::Tensor k_read = stream.for_cell(k, n), v_read = stream.for_cell(v, n);
      each_range(part, [&](Range range, int64_t at) {
        attended[n].add(
            k_read.narrow(1, at, range.size()), v_read.narrow(1, at, range.size()), range);
      });
    }
  });
  Tensors outputs;
  for (size_t n = 0; n < cells.size(); ++n) {
    const Tensors found = attended[n].finish(call.sinks(n));
    outputs.push_back(joined({found[0], return_lse ? found[1].transpose(1, 2) : at::Tensor()}));
    results.insert(results.end(), {qs[n], found[0], found[1]});
  }
  results.insert(results.begin(), call.to_seq(outputs));
  return results;
}

c10::IValue streamed_attention_backward_kernel(const Given& given) {
  const at::Tensor grad = given["grad"];
  const at::TensorList saved = given["saved"];
  const StreamedCall call(given, grad);
  const auto& [_, k, v, how, kv_chunk, rank, return_lse, plan, cells] = call;
  const c10::SymInt features = call.features(v.sym_size(3));
  TORCH_CHECK_VALUE(
      grad.sym_size(3) == features, "expected grad to have the features of the output (", features,
      "), got ", grad.sym_size(3));
  TORCH_CHECK_VALUE(
      saved.size() == kSaved * cells.size(), "expected saved to have ", kSaved * cells.size(),
      " tensors, ", kSaved, " for each cell of this rank, got ", saved.size());
  if (grad.is_meta()) {
    const c10::SymInt of_q[] = {
        grad.sym_size(0), grad.sym_size(1), grad.sym_size(2), k.sym_size(3)};
    Tensors found{
        at::empty_symint(of_q, grad.options()), at::empty_symint(k.sym_sizes(), k.options()),
        at::empty_symint(v.sym_sizes(), v.options())};
    if (how.sinks.has_value()) {
      found.push_back(at::empty_symint(how.sinks->sym_sizes(), how.sinks->options()));
    }
    return found;
  }
  const Tensors grads = call.to_heads(grad);
  const std::vector<Attending> attending = call.attending();
  std::vector<AttendedGradients> gradients;
  std::vector<LogSumGradient> log_sums;
  for (size_t n = 0; n < cells.size(); ++n) {
    const at::Tensor &q = saved[kSaved * n], &output = saved[kSaved * n + 1];
    const auto [of_output, of_log_sum] = parted(grads[n], return_lse);
    const LogSumGradient& of = log_sums.emplace_back(
        output, return_lse ? OptionalTensor(of_log_sum.transpose(1, 2)) : std::nullopt);
    gradients.emplace_back(
        of.grad(of_output), of.widened(q), of.output(output), saved[kSaved * n + 2], attending[n],
        /*at_once=*/false);
  }
  const KvStream stream(call);
  const at::Tensor dk = at::empty(k.sizes(), k.options()), dv = at::empty(v.sizes(), v.options());
  const TokenPart* sent = nullptr;
  at::Tensor sending;
  const auto finish_sent = [&] {
    if (sent != nullptr) {
      const Tensors mine = stream.wait_back(*sent, sending);
      dk.narrow(1, sent->mine.begin, sent->mine.size()).copy_(mine[1]);
      dv.narrow(1, sent->mine.begin, sent->mine.size()).copy_(mine[2]);
    }
  };
  stream.each([&](const TokenPart& part, const at::Tensor& k, const at::Tensor& v) {
    const at::Tensor of_k = at::zeros_like(k), of_v = at::zeros_like(v);
    for (size_t n = 0; n < cells.size(); ++n) {
      const at::Tensor k_read = stream.for_cell(k, n), v_read = stream.for_cell(v, n);
      each_range(part, [&](Range range, int64_t at) {
        const LogSumGradient& of = log_sums[n];
        const auto [dk, dv] = gradients[n].add(
            of.widened(k_read.narrow(1, at, range.size())),
            of.widened(v_read.narrow(1, at, range.size())), range);
        stream.add_of_cell(of_k.narrow(1, at, range.size()), of.narrowed(dk), n);
        stream.add_of_cell(of_v.narrow(1, at, range.size()), of.narrowed(dv), n);
      });
    }
    finish_sent();
    sending = stream.start_back(part, of_k, of_v);
    sent = &part;
  });
  finish_sent();
  Tensors of_q;
  for (size_t n = 0; n < cells.size(); ++n) {
    of_q.push_back(log_sums[n].narrowed(gradients[n].of_q()));
  }
  Tensors found{call.to_seq(of_q), dk, dv};
  if (how.sinks.has_value()) {
    found.push_back(how.sinks->new_zeros(how.sinks->sizes()));
    for (size_t n = 0; n < cells.size(); ++n) {
      call.of_cell(found[3], n).add_(gradients[n].of_sinks(*call.sinks(n)));
    }
  }
  return found;
}

const Op streamed_attention_backward("_streamed_attention_backward");

// k, v, the documents and sinks if given; what is saved of each cell.
void save(Call& call) {
  Tensors kept(call.inputs().begin() + 1, call.inputs().end());
  kept.insert(kept.end(), call.outputs().begin() + 1, call.outputs().end());
  call.keep("shape", SymInts(call.outputs()[0].sym_sizes().vec()));
  call.keep_tensors(std::move(kept));
  call.leave_undefined();
  call.only_first_is_differentiable();
}

Tensors gradients_of(const Call& call, const Tensors& gradients) {
  const Tensors kept = call.kept_tensors();
  size_t next = 2;
  const auto optional = [&](const char* name) {
    return call.count(name) > 0 ? c10::IValue(kept[next++]) : c10::IValue();
  };
  const c10::IValue documents = optional("documents"), sinks = optional("sinks");
  // Other ranks may have a gradient, and exchange it.
  const at::Tensor grad =
      gradients[0].defined() ? gradients[0] : at::zeros_symint(call["shape"], kept[0].options());
  Tensors found = streamed_attention_backward(
      call, {{"grad", grad},
             {"k", kept[0]},
             {"v", kept[1]},
             {"documents", documents},
             {"sinks", sinks},
             {"saved", Tensors(kept.begin() + next, kept.end())}});
  if (!documents.isNone()) {
    found.insert(found.begin() + 3, at::Tensor());
  }
  return found;
}

}  // namespace

DEEPSP_KERNELS(m) {
  implement<streamed_attention_kernel>(m, "_streamed_attention");
  implement<streamed_attention_backward_kernel>(m, "_streamed_attention_backward");
}

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  differentiable(m, "_streamed_attention", gradients_of, save);
  not_differentiable(m, "_streamed_attention_backward");
}

}  // namespace deepsp
