#pragma once
// Attention by rectangles of queries and keys, merged by their log-sum-exp (Milakov and
// Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135): no matrix of all scores is held.
// Sums are kept in float32, or float64 for float64.

#include "../op.h"
#include "../layout/pieces.h"
#include "ops.h"

namespace deepsp {

// Who attends to whom, and how scores become weights.
struct Attending {
  std::vector<Document> documents;
  std::vector<Range> queries;  // the tokens that q has, in ascending ranges; empty: all
  Band band;
  double scale = 1;
  std::optional<double> softcap;  // scores are softcap * tanh(score / softcap)
  bool lengths_recur = false;     // from call to call
};

// What the ops say of that. documents: [N, 2], where each begins and ends among the
// [batch * tokens] tokens, or [N, 3], with the number of its parent, -1: none; none: each row is
// one. window_size: as of Band, empty: no window. Lives
// no longer than the arguments.
struct BlockArguments {
  const OptionalTensor documents, sinks;
  const bool is_causal;
  const at::IntArrayRef window_size;
  const std::optional<double> scale, softcap;

  explicit BlockArguments(const Given& given);
  BlockArguments(const BlockArguments& how, OptionalTensor among)
      : documents(std::move(among)),
        sinks(how.sinks),
        is_causal(how.is_causal),
        window_size(how.window_size),
        scale(how.scale),
        softcap(how.softcap) {}
  Pattern pattern() const { return {documents, window_size, softcap, sinks, is_causal}; }
};
Band band_of(const BlockArguments& how);
// queries: begin and end of each range.
Attending attending(
    const BlockArguments& how,
    int64_t batch,
    int64_t tokens,
    int64_t head_dim,
    at::IntArrayRef queries = {});

// An empty tensor of shape [B, S, h, D] with strides of [S, B, h, D], the order in which the
// exchange sends and receives.
at::Tensor tokens_first(c10::SymIntArrayRef sizes, const at::TensorOptions& options);
// x [B, S, h, D] with such strides.
at::Tensor in_order(const at::Tensor& x);
// For q of that many tokens and heads, empty tensors like those that Attended::finish returns.
Tensors empty_attended(
    const at::Tensor& q,
    const c10::SymInt& tokens,
    const c10::SymInt& heads,
    const c10::SymInt& head_dim_v);

// Forward: the queries [B, S, h, D] attend to keys that are added one range of tokens at a time.
class Attended {
 public:
  // at_once, here and below: the keys of all tokens are added by one call.
  Attended(const at::Tensor& q, int64_t head_dim_v, const Attending& how, bool at_once);

  // k, v [B, keys, h_kv, D] of a range of tokens.
  void add(const at::Tensor& k, const at::Tensor& v, Range keys);
  // After all keys: the output [B, S, h, Dv] and the log-sum-exp of each query's scores [B, h, S],
  // of which a sink [h] is one more score, whose value is 0. Tokens outside of all documents get 0.
  Tensors finish(const OptionalTensor& sinks);

 private:
  void begin();  // with results of no keys, if there are none yet
  void add_tiles(const at::Tensor& k, const at::Tensor& v, const Piece& piece);

  const at::Tensor q_;
  const int64_t head_dim_v_;
  const Attending& how_;
  bool whole_;  // each query's result comes from one piece
  at::Tensor out_, log_sum_;
};

// Backward, from the results of finish.
class AttendedGradients {
 public:
  AttendedGradients(
      const at::Tensor& grad,
      const at::Tensor& q,
      const at::Tensor& out,
      const at::Tensor& log_sum,
      const Attending& how,
      bool at_once);

  // The gradients of k and v of a range of tokens.
  std::pair<at::Tensor, at::Tensor> add(const at::Tensor& k, const at::Tensor& v, Range keys);
  // After all keys.
  at::Tensor of_q();
  at::Tensor of_sinks(const at::Tensor& sinks);

 private:
  const at::Tensor& delta();             // [B, S, h, 1]: the sum over Dv of grad * out
  at::Tensor& dq(at::ScalarType dtype);  // in which to add
  void add_tiles(
      const at::Tensor& k,
      const at::Tensor& v,
      const Piece& piece,
      const at::Tensor& dk,
      const at::Tensor& dv);

  const at::Tensor grad_, q_, out_, log_sum_;
  const Attending& how_;
  const bool at_once_;
  at::Tensor delta_, dq_;
};

}  // namespace deepsp
