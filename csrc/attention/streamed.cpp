// Attention over a sharded sequence whose keys and values come a part at a time, so that a rank
// never holds those of the full sequence (the idea is FPDT's: Yao et al., arXiv:2408.16978). Each
// rank cuts its own tokens, so every exchange moves alike much to and from every rank. While
// attention works on a part, the next is on its way. Backward has them sent once more: what is
// kept is q, the output and the log-sum-exp of this rank's heads, and the k and v that were given.

#include "../common/checks.h"
#include "../exchange/checks.h"
#include "../exchange/ops.h"
#include "blocks.h"
#include "ops.h"
#include "readers.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace deepsp {
namespace {

constexpr const char* kNames[] = {"q", "k", "v"};

const Op<Tensors(
    const at::Tensor& grad,
    const at::Tensor& k,
    const at::Tensor& v,
    const OptionalTensor& documents,
    bool is_causal,
    at::IntArrayRef window_size,
    std::optional<double> scale,
    std::optional<double> softcap,
    const OptionalTensor& sinks,
    int64_t kv_chunk,
    c10::SymInt num_heads,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name,
    const at::Tensor& q_of_heads,
    const at::Tensor& output_of_heads,
    const at::Tensor& log_sum_exp)>
    streamed_attention_backward("streamed_attention_backward");

// Tokens that travel together: some of each rank's.
struct TokenPart {
  std::vector<c10::SymInt> seq_lens;
  Range mine;                 // among this rank's own
  std::vector<Range> tokens;  // of the full sequence, of each rank
};

std::vector<TokenPart> token_parts(
    const std::vector<int64_t>& seq_lens, int64_t rank, int64_t kv_chunk) {
  const auto ranks = static_cast<int64_t>(seq_lens.size());
  const int64_t each = (kv_chunk + ranks - 1) / ranks;
  const int64_t longest = *std::max_element(seq_lens.begin(), seq_lens.end());
  std::vector<TokenPart> parts;
  for (int64_t at = 0; at < longest; at += each) {
    TokenPart part;
    int64_t first = 0;  // of a rank, in the full sequence
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

// The exchange of k and v, and of their gradients, whose heads go where those of q do.
class Stream {
 public:
  Stream(const at::Tensor& k, const at::Tensor& v, int64_t num_heads, const Given& given)
      : parts(token_parts(ints(given["seq_lens"]), given["rank"], given["kv_chunk"])),
        given_(given),
        k_(k),
        v_(v),
        heads_(
            {num_heads, k.size(2), k.size(2)},
            static_cast<int64_t>(static_cast<c10::SymIntArrayRef>(given["seq_lens"]).size())),
        readers_(heads_, given["rank"], 0),
        num_heads_{num_heads, k.size(2), k.size(2)},
        head_dims_{0, k.size(3), v.size(3)} {}

  const std::vector<TokenPart> parts;

  // Calls visit(part, k, v) with k and v of this rank's heads, each for as many query heads.
  template <class Visit>
  void each(const Visit& visit) const {
    at::Tensor next = start(0);
    for (size_t at = 0; at < parts.size(); ++at) {
      const Tensors found = seq_to_heads_wait(
          given_, {{"buffer", next},
                   {"num_heads", num_heads_},
                   {"head_dims", head_dims_},
                   {"batch", k_.size(0)},
                   {"seq_lens", parts[at].seq_lens},
                   {"chunk", 0},
                   {"chunks", 1}});
      next = start(at + 1);
      visit(parts[at], for_readers(found[1]), for_readers(found[2]));
    }
  }

  at::Tensor start_back(const TokenPart& part, const at::Tensor& dk, const at::Tensor& dv) const {
    const c10::SymInt none[] = {dk.size(0), dk.size(1), readers_.q.size(), 0};
    return heads_to_seq_start(
        given_,
        {{"inputs", Tensors{at::empty_symint(none, dk.options()), of_readers(dk), of_readers(dv)}},
         {"num_heads", num_heads_},
         {"seq_lens", part.seq_lens},
         {"chunk", 0},
         {"chunks", 1},
         {"tokens_first", false}});
  }

  // The gradients of this rank's tokens of a part.
  Tensors wait_back(const TokenPart& part, const at::Tensor& buffer) const {
    return heads_to_seq_wait(
        given_, {{"buffers", Tensors{buffer}},
                 {"num_heads", num_heads_},
                 {"head_dims", head_dims_},
                 {"batch", k_.size(0)},
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
    // q says where heads go; of it, nothing travels.
    const c10::SymInt none[] = {k_.size(0), part.mine.size(), heads_.num_heads(0), 0};
    const Tensors buffers = seq_to_heads_start(
        given_, {{"inputs", Tensors{at::empty_symint(none, k_.options()), own(k_), own(v_)}},
                 {"seq_lens", part.seq_lens},
                 {"chunks", 1},
                 {"last_first", false}});
    return buffers[0];
  }

  // Each kv head as often as is needed for all to be read by as many query heads.
  at::Tensor for_readers(const at::Tensor& x) const {
    if (readers_.uniform()) {
      return x;
    }
    Tensors repeated;
    for (size_t head = 0; head < readers_.counts.size(); ++head) {
      repeated.push_back(
          x.narrow(2, static_cast<int64_t>(head), 1).expand({-1, -1, readers_.counts[head], -1}));
    }
    return at::cat(repeated, 2);
  }

  at::Tensor of_readers(const at::Tensor& x) const {
    if (readers_.uniform()) {
      return x;
    }
    Tensors summed;
    int64_t at = 0;
    for (const int64_t count : readers_.counts) {
      summed.push_back(x.narrow(2, at, count).sum(at::OptionalIntArrayRef{2}, true));
      at += count;
    }
    return at::cat(summed, 2);
  }

  const Given& given_;
  const at::Tensor k_, v_;
  const HeadLayout heads_;
  const Readers readers_;
  const SymInts num_heads_, head_dims_;
};

// Visits the ranges of a part that hold tokens, and where they begin among its own.
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

OptionalTensor own_sinks(
    const OptionalTensor& sinks, int64_t num_heads, int64_t kv_heads, int64_t ranks, int64_t rank) {
  if (!sinks.has_value()) {
    return std::nullopt;
  }
  const Range heads = HeadLayout({num_heads, kv_heads}, ranks).range(0, rank);
  return sinks->narrow(0, heads.begin, heads.size());
}

c10::IValue streamed_attention_kernel(const Given& given) {
  const at::Tensor q = given["q"];
  const at::Tensor k = given["k"], v = given["v"];
  const OptionalTensor documents = given["documents"], sinks = given["sinks"];
  const bool is_causal = given["is_causal"];
  const at::IntArrayRef window_size = given["window_size"];
  const std::optional<double> scale = given["scale"], softcap = given["softcap"];
  const int64_t kv_chunk = given["kv_chunk"], rank = given["rank"];
  const c10::SymIntArrayRef seq_lens = given["seq_lens"];
  const SymPlan layout = plan_by_tokens({q, k, v}, given, kNames);
  TORCH_CHECK_VALUE(
      layout.heads.num_heads(1) == layout.heads.num_heads(2) && q.sym_size(3) == k.sym_size(3) &&
          q.is_floating_point(),
      "expected floating-point q and k of one head_dim, and k and v of as many heads, got shapes ",
      q.sym_sizes(), ", ", k.sym_sizes(), " and ", v.sym_sizes());
  const int64_t num_heads = layout.heads.num_heads(0), kv_heads = layout.heads.num_heads(1);
  const c10::SymInt tokens = layout.total();
  check_pattern({documents, window_size, softcap, sinks}, layout.batch, tokens, num_heads);
  check_at_least(kv_chunk, 1, "kv_chunk");
  const auto ranks = static_cast<int64_t>(seq_lens.size());
  if (q.is_meta()) {
    const c10::SymInt heads = layout.heads.range(0, rank).size();
    const c10::SymInt out[] = {q.sym_size(0), q.sym_size(1), num_heads, v.sym_size(3)};
    const c10::SymInt of_q[] = {q.sym_size(0), tokens, heads, q.sym_size(3)};
    const c10::SymInt of_out[] = {q.sym_size(0), tokens, heads, v.sym_size(3)};
    const c10::SymInt sums[] = {q.sym_size(0), heads, tokens};
    const auto wide = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    return std::make_tuple(
        at::empty_symint(out, q.options()), tokens_first(of_q, q.options()),
        tokens_first(of_out, q.options()), at::empty_symint(sums, q.options().dtype(wide)));
  }
  const Attending how = attending(
      documents, is_causal, window_size, scale, softcap, q.size(0),
      tokens.guard_int(__FILE__, __LINE__), q.size(3));
  const Tensors received = seq_to_heads(given, {{"inputs", Tensors{q}}});
  const at::Tensor& all = received[0];
  Attended attended(all, v.size(3), how, /*whole=*/false);
  const Stream stream(k, v, num_heads, given);
  stream.each([&](const TokenPart& part, const at::Tensor& k_part, const at::Tensor& v_part) {
    each_range(part, [&](Range range, int64_t at) {
      attended.add(k_part.narrow(1, at, range.size()), v_part.narrow(1, at, range.size()), range);
    });
  });
  const auto [out, log_sum] = attended.finish(own_sinks(sinks, num_heads, kv_heads, ranks, rank));
  const Tensors mine = heads_to_seq(
      given, {{"inputs", Tensors{out}}, {"num_heads", std::vector<int64_t>{num_heads}}});
  return std::make_tuple(mine[0], all, out, log_sum);
}

c10::IValue streamed_attention_backward_kernel(const Given& given) {
  const at::Tensor grad = given["grad"];
  const at::Tensor k = given["k"], v = given["v"];
  const OptionalTensor documents = given["documents"], sinks = given["sinks"];
  const bool is_causal = given["is_causal"];
  const at::IntArrayRef window_size = given["window_size"];
  const std::optional<double> scale = given["scale"], softcap = given["softcap"];
  const int64_t kv_chunk = given["kv_chunk"], rank = given["rank"];
  const c10::SymIntArrayRef seq_lens = given["seq_lens"];
  const c10::SymInt num_heads = given["num_heads"];
  const at::Tensor q_of_heads = given["q_of_heads"], output_of_heads = given["output_of_heads"];
  const at::Tensor log_sum_exp = given["log_sum_exp"];
  const SymPlan layout = plan_by_tokens({grad, k, v}, given, kNames);
  TORCH_CHECK_VALUE(
      grad.sym_size(2) == num_heads && grad.sym_size(3) == v.sym_size(3),
      "expected grad of shape [batch, sequence, ", num_heads, ", ", v.sym_size(3), "], got ",
      grad.sym_sizes());
  const int64_t heads = layout.heads.num_heads(0), kv_heads = layout.heads.num_heads(1);
  if (grad.is_meta()) {
    const c10::SymInt of_q[] = {grad.sym_size(0), grad.sym_size(1), num_heads, k.sym_size(3)};
    Tensors found{
        at::empty_symint(of_q, grad.options()), at::empty_symint(k.sym_sizes(), k.options()),
        at::empty_symint(v.sym_sizes(), v.options())};
    if (sinks.has_value()) {
      found.push_back(at::empty_symint(sinks->sym_sizes(), sinks->options()));
    }
    return found;
  }
  const auto ranks = static_cast<int64_t>(seq_lens.size());
  const Attending how = attending(
      documents, is_causal, window_size, scale, softcap, k.size(0), q_of_heads.size(1), k.size(3));
  const Tensors received = seq_to_heads(given, {{"inputs", Tensors{grad}}});
  const at::Tensor& of_heads = received[0];
  AttendedGradients gradients(of_heads, q_of_heads, output_of_heads, log_sum_exp, how);
  const Stream stream(k, v, heads, given);
  Tensors found{at::Tensor(), at::empty(k.sizes(), k.options()), at::empty(v.sizes(), v.options())};
  const TokenPart* sent = nullptr;
  at::Tensor leaving;
  const auto arrive = [&] {
    if (sent != nullptr) {
      const Tensors mine = stream.wait_back(*sent, leaving);
      found[1].narrow(1, sent->mine.begin, sent->mine.size()).copy_(mine[1]);
      found[2].narrow(1, sent->mine.begin, sent->mine.size()).copy_(mine[2]);
    }
  };
  stream.each([&](const TokenPart& part, const at::Tensor& k_part, const at::Tensor& v_part) {
    Tensors dks, dvs;
    each_range(part, [&](Range range, int64_t at) {
      const auto [dk, dv] = gradients.add(
          k_part.narrow(1, at, range.size()), v_part.narrow(1, at, range.size()), range);
      dks.push_back(dk);
      dvs.push_back(dv);
    });
    arrive();
    leaving = stream.start_back(part, at::cat(dks, 1), at::cat(dvs, 1));
    sent = &part;
  });
  arrive();
  const Tensors of_q = heads_to_seq(
      given, {{"inputs", Tensors{gradients.of_q()}}, {"num_heads", SymInts{num_heads}}});
  found[0] = of_q[0];
  if (sinks.has_value()) {
    found.push_back(sinks->new_zeros(sinks->sizes()));
    const Range own = layout.heads.range(0, rank);
    const at::Tensor mine = *own_sinks(sinks, heads, kv_heads, ranks, rank);
    found.back().narrow(0, own.begin, own.size()).copy_(gradients.of_sinks(mine));
  }
  return found;
}

void keep_for_backward(Call& call) {
  const at::TensorList given = call.inputs(), outputs = call.outputs();
  Tensors kept(given.begin() + 1, given.end());  // k, v, documents, sinks
  kept.insert(kept.end(), outputs.begin() + 1, outputs.end());
  call.keep("num_heads", given[0].sym_size(2));
  call.keep_tensors(std::move(kept));
  call.leave_undefined();
  call.only_first_is_differentiable();
}

Tensors gradients_of(const Call& call, const Tensors& gradients) {
  const Tensors kept = call.kept_tensors();
  size_t next = 2;
  const auto optional = [&](const char* name) {
    return call.count(name) > 0 ? OptionalTensor(kept[next++]) : std::nullopt;
  };
  const OptionalTensor documents = optional("documents"), sinks = optional("sinks");
  const at::Tensor& q = kept[next];
  const at::Tensor& out = kept[next + 1];
  const c10::SymInt num_heads = call["num_heads"];
  at::Tensor grad = gradients[0];
  if (!grad.defined()) {  // other ranks may have one
    const c10::SymInt sizes[] = {
        kept[0].sym_size(0), kept[0].sym_size(1), num_heads, kept[1].sym_size(3)};
    grad = at::zeros_symint(sizes, q.options());
  }
  Tensors found = streamed_attention_backward(
      grad, kept[0], kept[1], documents, call["is_causal"], call["window_size"], call["scale"],
      call["softcap"], sinks, call["kv_chunk"], num_heads, call["seq_lens"], call["rank"],
      call["group_name"], q, out, kept[next + 2]);
  if (documents.has_value()) {
    found.insert(found.begin() + 3, at::Tensor());
  }
  return found;
}

}  // namespace

DEEPSP_KERNELS(m) {
  implement<streamed_attention_kernel>(m, "streamed_attention");
  implement<streamed_attention_backward_kernel>(m, "streamed_attention_backward");
}

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  differentiable(m, "streamed_attention", gradients_of, keep_for_backward);
  not_differentiable(m, "streamed_attention_backward");
}

}  // namespace deepsp
