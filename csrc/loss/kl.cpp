// linear_kl compares two models' distributions. As in linear_cross_entropy, one walk over chunks of
// tokens computes the sum and its gradients.

#include "logits.h"

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>

namespace deepsp {
namespace {

// Returns the number of a chunk's rows to compute the divergence of at a time: on the CPU so few
// that a thread's temporaries stay in its cache.
int64_t rows_at_once(const at::Tensor& logits) {
  const int64_t bytes = logits.is_cpu() ? (int64_t(1) << 20) * at::get_num_threads() : kChunkBytes;
  return std::max<int64_t>(1, bytes / (logits.size(1) * logits.element_size()));
}

at::Tensor row_sum(const at::Tensor& x) {
  return x.sum(at::OptionalIntArrayRef{1}, /*keepdim=*/true);
}

// Returns p * x, and 0 where p is 0, even if x is infinite or NaN.
at::Tensor weighted(const at::Tensor& p, const at::Tensor& x) {
  return p.mul(x).masked_fill_(p.eq(0), 0);
}

struct Divergence {
  at::Tensor each;  // [tokens, 1]
  at::Tensor grad;  // of p's logits
};

// Computes the divergence of each row of log-probabilities.
Divergence diverge(const at::Tensor& log_p, const at::Tensor& log_q, double beta) {
  const at::Tensor p = log_p.exp(), q = log_q.exp();
  if (beta == 0) {
    return {row_sum(weighted(q, log_q.sub(log_p))), p.sub(q)};
  }
  const at::Tensor log_m = beta == 1 ? log_q : p.lerp(q, beta).log_();
  const at::Tensor terms = weighted(p, log_p.sub(log_m));
  const at::Tensor of_p = row_sum(terms);  // KL(p || m)
  terms.addcmul_(p, of_p, -1);
  if (beta == 1) {
    return {of_p, terms};
  }
  const at::Tensor of_q = row_sum(weighted(q, log_q.sub(log_m)));
  return {of_q.mul_(beta).add_(of_p, 1 - beta), terms.mul_(1 - beta)};
}

// Returns the log-probabilities of the classes `top`, then of all others together. Overwrites those
// of `top` with -infinity.
at::Tensor merge_rest(const at::Tensor& log_p, const at::Tensor& top) {
  const at::Tensor of_top = log_p.gather(1, top);
  log_p.scatter_(1, top, -INFINITY);
  return at::cat({of_top, log_p.logsumexp(at::IntArrayRef{1}, /*keepdim=*/true)}, 1);
}

// Counts classes other than the top_k most likely of q as one. Overwrites its arguments.
Divergence diverge_in_top(
    const at::Tensor& log_p, const at::Tensor& log_q, double beta, int64_t top_k) {
  const at::Tensor top =
      std::get<1>(log_q.topk(top_k, /*dim=*/1, /*largest=*/true, /*sorted=*/false));
  const at::Tensor merged = merge_rest(log_p, top);
  const auto [each, grad] = diverge(merged, merge_rest(log_q, top), beta);
  // The rest's gradient is shared out by its classes' probabilities, which may all be 0.
  const at::Tensor rest = merged.narrow(1, top_k, 1).clamp_min(-1e30);
  log_p.sub_(rest).exp_().mul_(grad.narrow(1, top_k, 1));
  return {each, log_p.scatter_(1, top, grad.narrow(1, 0, top_k))};
}

c10::IValue linear_kl_gradients(const Given& given) {
  const double beta = given["beta"], temperature = given["temperature"];
  LogitsArguments student_of(given, temperature), teacher_of(given, temperature, "teacher_");
  const at::Tensor& hidden = student_of.hidden;
  const at::Tensor labels = given["labels"];
  const OptionalTensor token_weights = given.optional<at::Tensor>("token_weights");
  const std::optional<int64_t> top_k = given.optional<int64_t>("top_k");
  const bool entropy = given["entropy"];
  const at::IntArrayRef wanted = given["wanted"];
  check_logits(student_of, labels, "labels", wanted);
  check_device(teacher_of.hidden, "teacher_hidden", hidden, "hidden");
  check_logits(teacher_of, labels, "labels", {0, 0, 0});
  TORCH_CHECK_VALUE(
      student_of.weight.sym_size(0) == teacher_of.weight.sym_size(0),
      "expected weight and teacher_weight to have the same classes, got ",
      student_of.weight.sym_size(0), " and ", teacher_of.weight.sym_size(0),
      "; if the further rows of the larger are padding, slice it: weight[:C], and its bias");
  TORCH_CHECK_VALUE(beta >= 0 && beta <= 1, "expected 0 <= beta <= 1, got ", beta);
  check_at_least(top_k.value_or(1), 1, "top_k");
  check_token_weights(token_weights, labels, hidden);
  const at::Tensor loss = at::zeros({}, hidden.options().dtype(at::kDouble));
  const at::Tensor entropies = at::zeros({}, loss.options());
  LogitsGradients gradients(student_of, wanted);
  Tensors results{loss, entropies};
  results.insert(results.end(), gradients.all.begin(), gradients.all.end());
  if (hidden.is_meta()) {
    return results;
  }
  const int64_t tokens = labels.numel();
  const at::ScalarType wide = wide_dtype(hidden.scalar_type());
  const at::Tensor valid =
      labels.reshape({tokens, 1}).ne(static_cast<int64_t>(given["ignore_index"]));
  const at::Tensor counts = token_counts(token_weights, valid, wide);
  Logits student(student_of, tokens, gradients, /*models=*/2);
  teacher_of.chunk_tokens = student.chunk_tokens();
  const LogitsGradients none(teacher_of, {0, 0, 0});
  Logits teacher(teacher_of, tokens, none);
  const int64_t merged = top_k.value_or(student.classes);
  const auto visit = [&](int64_t begin, int64_t size, const at::Tensor& logits) {
    const at::Tensor teacher_logits = teacher.of_chunk(begin, size);
    const int64_t rows = rows_at_once(logits);
    for (int64_t row = 0; row < size; row += rows) {
      const auto part = [&](const at::Tensor& x, int64_t first) {
        return x.narrow(0, first + row, std::min(rows, size - row));
      };
      const at::Tensor count = part(counts, begin), ignored = count.eq(0);
      const auto add_to = [&](const at::Tensor& sum, const at::Tensor& each) {
        sum.add_(each.mul(count).masked_fill_(ignored, 0).sum(at::kDouble));
      };
      const at::Tensor log_p = part(logits, 0).log_softmax(1);
      const at::Tensor log_q = part(teacher_logits, 0).log_softmax(1).to(wide);
      if (entropy) {
        add_to(entropies, row_sum(weighted(log_p.exp(), log_p)).neg_());
      }
      const auto [each, grad] = merged < student.classes
                                    ? diverge_in_top(log_p, log_q, beta, merged)
                                    : diverge(log_p, log_q, beta);
      add_to(loss, each);
      if (!gradients.all.empty()) {
        part(logits, 0).copy_(grad.mul(count).masked_fill_(ignored, 0));
      }
    }
    if (!gradients.all.empty()) {
      student.add_gradients(begin, size, logits);
    }
  };
  student.walk(visit, valid);
  return results;
}

}  // namespace

DEEPSP_KERNELS(m) {
  implement<linear_kl_gradients>(m, "_linear_kl_gradients");
}

}  // namespace deepsp
