// Attention over a sharded sequence whose keys and values are exchanged a part of the tokens at a
// time, so that a rank never holds those of the full sequence (the idea is FPDT's: Yao et al.,
// arXiv:2408.16978). Each part has tokens of every rank, so every exchange moves about as much to
// and from each rank. While attention computes with one part, the next is in flight. Backward
// exchanges k and v again: what is saved is q, the output and the log-sum-exp of this rank's heads,
// and this rank's tokens of k and v.

#include "../common/checks.h"
#include "../exchange/checks.h"
#include "../exchange/ops.h"
#include "blocks.h"
#include "shares.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

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

// The exchange of k and v, and of their gradients. q, of which nothing is sent, decides which rank
// reads which heads.
class KvStream {
 public:
  KvStream(
      const at::Tensor& k,
      const at::Tensor& v,
      int64_t num_heads,
      c10::SymIntArrayRef seq_lens,
      int64_t rank,
      std::string_view group_name,
      int64_t kv_chunk)
      : parts(token_parts(ints(seq_lens), rank, kv_chunk)),
        k_(k),
        v_(v),
        rank_(rank),
        group_name_(group_name),
        heads_({num_heads, k.size(2), k.size(2)}, static_cast<int64_t>(seq_lens.size())),
        readers_(heads_, rank, 0),
        num_heads_{num_heads, k.size(2), k.size(2)},
        head_dims_{0, k.size(3), v.size(3)} {}

  const std::vector<TokenPart> parts;

  // Calls visit(part, k, v) with k and v of this rank's heads. As many query heads read each.
  template <class Visit>
  void each(const Visit& visit) const {
    at::Tensor next = start(0);
    for (size_t at = 0; at < parts.size(); ++at) {
      const Tensors found = seq_to_heads_wait(
          next, num_heads_, head_dims_, k_.size(0), parts[at].seq_lens, 0, 1, rank_, group_name_,
          {});
      next = start(at + 1);
      visit(parts[at], for_readers({found[1]}, readers_), for_readers({found[2]}, readers_));
    }
  }

  at::Tensor start_back(const TokenPart& part, const at::Tensor& dk, const at::Tensor& dv) const {
    const c10::SymInt none[] = {dk.size(0), dk.size(1), readers_.q.size(), 0};
    return heads_to_seq_start(
        {at::empty_symint(none, dk.options()), of_readers(dk), of_readers(dv)}, num_heads_,
        part.seq_lens, 0, 1, rank_, group_name_, /*tokens_first=*/false);
  }

  // The gradients of this rank's tokens of a part.
  Tensors wait_back(const TokenPart& part, const at::Tensor& buffer) const {
    return heads_to_seq_wait(
        {buffer}, num_heads_, head_dims_, k_.size(0), part.seq_lens, rank_, group_name_, false);
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
    const c10::SymInt none[] = {k_.size(0), part.mine.size(), heads_.num_heads(0), 0};
    return seq_to_heads_start(
        {at::empty_symint(none, k_.options()), own(k_), own(v_)}, part.seq_lens, 1, false, rank_,
        group_name_)[0];
  }

  // The adjoint of for_readers: sums the gradients of each kv head's repetitions.
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

  const at::Tensor k_, v_;
  const int64_t rank_;
  const std::string_view group_name_;
  const HeadLayout heads_;
  const Readers readers_;
  const SymInts num_heads_, head_dims_;
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

// The arguments that streamed_attention and its backward share.
struct StreamedCall {
  const at::Tensor k, v;
  const BlockArguments how;
  const int64_t kv_chunk, rank;
  const c10::SymIntArrayRef seq_lens;
  const std::string_view group_name;
  const SymBlockLayout layout;
  const c10::SymInt tokens = layout.total();
  const Range heads = layout.heads.range(0, rank);  // this rank's

  // q: what has its shape, but for head_dim.
  StreamedCall(const Given& given, const at::Tensor& q)
      : k(given["k"]),
        v(given["v"]),
        how(given),
        kv_chunk(given["kv_chunk"]),
        rank(given["rank"]),
        seq_lens(given["seq_lens"]),
        group_name(given["group_name"]),
        layout(check_by_tokens({q, k, v}, seq_lens, 1, rank, kNames)) {}

  Attending attending() const {
    return deepsp::attending(how, k.size(0), tokens.guard_int(__FILE__, __LINE__), k.size(3));
  }
  KvStream stream() const {
    return KvStream(k, v, layout.heads.num_heads(0), seq_lens, rank, group_name, kv_chunk);
  }
  at::Tensor to_heads(const at::Tensor& x) const {
    return seq_to_heads({x}, seq_lens, rank, group_name)[0];
  }
  at::Tensor to_seq(const at::Tensor& x) const {
    return heads_to_seq({x}, {layout.heads.num_heads(0)}, seq_lens, rank, group_name, false)[0];
  }
};

c10::IValue streamed_attention_kernel(const Given& given) {
  const at::Tensor q = given["q"];
  const StreamedCall call(given, q);
  const auto& [k, v, how, kv_chunk, rank, seq_lens, group_name, layout, tokens, heads] = call;
  TORCH_CHECK_VALUE(
      layout.heads.num_heads(1) == layout.heads.num_heads(2) && q.sym_size(3) == k.sym_size(3) &&
          q.is_floating_point(),
      "expected floating-point q and k of one head_dim, and k and v of as many heads, got shapes ",
      q.sym_sizes(), ", ", k.sym_sizes(), " and ", v.sym_sizes());
  check_pattern(how.pattern(), layout.batch, tokens, layout.heads.num_heads(0));
  check_at_least(kv_chunk, 1, "kv_chunk");
  if (q.is_meta()) {
    const c10::SymInt out[] = {q.sym_size(0), q.sym_size(1), q.sym_size(2), v.sym_size(3)};
    const c10::SymInt of_q[] = {q.sym_size(0), tokens, heads.size(), q.sym_size(3)};
    Tensors results{at::empty_symint(out, q.options()), tokens_first(of_q, q.options())};
    for (const at::Tensor& x : empty_attended(q, tokens, heads.size(), v.sym_size(3))) {
      results.push_back(x);
    }
    return results;
  }
  const Attending attending = call.attending();
  const at::Tensor q_of_heads = call.to_heads(q);
  Attended attended(q_of_heads, v.size(3), attending, /*whole=*/false);
  call.stream().each([&](const TokenPart& part, const at::Tensor& k, const at::Tensor& v) {
    each_range(part, [&](Range range, int64_t at) {
      attended.add(k.narrow(1, at, range.size()), v.narrow(1, at, range.size()), range);
    });
  });
  const Tensors found = attended.finish(sinks_of(how.sinks, heads));
  return Tensors{call.to_seq(found[0]), q_of_heads, found[0], found[1]};
}

c10::IValue streamed_attention_backward(const Given& given) {
  const at::Tensor grad = given["grad"];
  const StreamedCall call(given, grad);
  const auto& [k, v, how, kv_chunk, rank, seq_lens, group_name, layout, tokens, heads] = call;
  const c10::SymInt num_heads = given["num_heads"];
  TORCH_CHECK_VALUE(
      grad.sym_size(2) == num_heads && grad.sym_size(3) == v.sym_size(3),
      "expected grad of shape [batch, sequence, ", num_heads, ", ", v.sym_size(3), "], got ",
      grad.sym_sizes());
  if (grad.is_meta()) {
    const c10::SymInt of_q[] = {grad.sym_size(0), grad.sym_size(1), num_heads, k.sym_size(3)};
    Tensors found{
        at::empty_symint(of_q, grad.options()), at::empty_symint(k.sym_sizes(), k.options()),
        at::empty_symint(v.sym_sizes(), v.options())};
    if (how.sinks.has_value()) {
      found.push_back(at::empty_symint(how.sinks->sym_sizes(), how.sinks->options()));
    }
    return found;
  }
  const Attending attending = call.attending();
  AttendedGradients gradients(
      call.to_heads(grad), given["q_of_heads"], given["output_of_heads"], given["log_sum_exp"],
      attending);
  const KvStream stream = call.stream();
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
    Tensors dks, dvs;
    each_range(part, [&](Range range, int64_t at) {
      const auto [of_k, of_v] =
          gradients.add(k.narrow(1, at, range.size()), v.narrow(1, at, range.size()), range);
      dks.push_back(of_k);
      dvs.push_back(of_v);
    });
    finish_sent();
    sending = stream.start_back(part, at::cat(dks, 1), at::cat(dvs, 1));
    sent = &part;
  });
  finish_sent();
  Tensors found{call.to_seq(gradients.of_q()), dk, dv};
  if (how.sinks.has_value()) {
    found.push_back(how.sinks->new_zeros(how.sinks->sizes()));
    const at::Tensor mine = *sinks_of(how.sinks, heads);
    found[3].narrow(0, heads.begin, heads.size()).copy_(gradients.of_sinks(mine));
  }
  return found;
}

const BackwardOp kBackward{
    "streamed_attention_backward",
    /*inputs=*/{"q", "k", "v", "documents", "sinks"},
    /*results=*/{"output", "q_of_heads", "output_of_heads", "log_sum_exp"},
    /*saved=*/{"k", "v", "documents", "sinks", "q_of_heads", "output_of_heads", "log_sum_exp"},
    /*gradients=*/{"q", "k", "v", "sinks"},
    /*takes_wanted=*/false};

void save(Call& call) {
  call.keep("num_heads", call.inputs()[0].sym_size(2));
  save_for(kBackward, call);
  call.leave_undefined();
  call.only_first_is_differentiable();
}

Tensors gradients_of(const Call& call, const Tensors& gradients) {
  at::Tensor grad = gradients[0];
  if (!grad.defined()) {  // other ranks may have one, and exchange it
    const Tensors saved = call.kept_tensors();
    const c10::SymInt sizes[] = {
        saved[0].sym_size(0), saved[0].sym_size(1), call["num_heads"], saved[1].sym_size(3)};
    grad = at::zeros_symint(sizes, saved[0].options());
  }
  return call_backward(kBackward, call, {{"grad", grad}});
}

}  // namespace

DEEPSP_KERNELS(m) {
  impl_by_name<streamed_attention_kernel>(m, "streamed_attention");
  impl_by_name<streamed_attention_backward>(m, "streamed_attention_backward");
}

TORCH_LIBRARY_IMPL(deepsp, Autograd, m) {
  differentiable(m, "streamed_attention", gradients_of, save);
  not_differentiable(m, "streamed_attention_backward");
}

}  // namespace deepsp
