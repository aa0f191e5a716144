#include "blocks.h"

#include "../common/checks.h"
#include "../common/wide.h"
#include "piece.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace deepsp {
namespace {

// The scores that are held at a time, for each kv head: (its query heads * kQueries) x kKeys. Timed
// on one core: smaller tiles cost calls, larger ones leave the cache.
constexpr int64_t kQueries = 128;
constexpr int64_t kKeys = 512;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor part(const at::Tensor& x, Range rows, Range tokens, int64_t dim = 1) {
  return x.narrow(0, rows.begin, rows.size()).narrow(dim, tokens.begin, tokens.size());
}

// The queries of a piece, or some of them, in what has an entry for each query.
at::Tensor of_queries(const at::Tensor& x, const Piece& piece, Range queries, int64_t dim = 1) {
  return part(x, piece.rows, {queries.begin - piece.before, queries.end - piece.before}, dim);
}

// [R, n, h, D] of h / g kv heads as [R * h / g, g * n, D], in the wide dtype. It may be a view:
// don't write to it.
at::Tensor by_kv_head(const at::Tensor& x, int64_t kv_heads, at::ScalarType wide) {
  const int64_t rows = x.size(0), n = x.size(1), each = x.size(2) / kv_heads, dim = x.size(3);
  return x.to(wide)
      .reshape({rows, n, kv_heads, each, dim})
      .permute({0, 2, 3, 1, 4})
      .reshape({rows * kv_heads, each * n, dim});
}

// Its inverse.
at::Tensor by_token(const at::Tensor& x, int64_t rows, int64_t kv_heads, int64_t n) {
  const int64_t each = x.size(1) / n;
  return x.view({rows, kv_heads, each, n, x.size(2)})
      .permute({0, 3, 1, 2, 4})
      .reshape({rows, n, kv_heads * each, x.size(2)});
}

// Whether these tokens are all that x [B, n, h, D] has.
bool covers(const Piece& piece, Range tokens, const at::Tensor& x) {
  return piece.rows.size() == x.size(0) && tokens.size() == x.size(1);
}

// Calls `visit` with every tile of a piece in which a query sees a key; `start` before those of a
// range of queries, `end` after them.
template <class Start, class Visit, class End>
void walk(const Piece& piece, Band band, const Start& start, const Visit& visit, const End& end) {
  const bool banded = piece.sight == Sight::kBand;
  for (int64_t q = piece.queries.begin; q < piece.queries.end; q += kQueries) {
    const Range queries = {q, std::min(q + kQueries, piece.queries.end)};
    Range keys = piece.keys;
    if (banded && band.left != kUnlimited) {
      keys.begin = std::max(keys.begin, queries.begin + piece.ahead - band.left);
    }
    if (banded && band.right != kUnlimited) {
      keys.end = std::min(keys.end, queries.end + band.right);
    }
    if (piece.sight == Sight::kCausal) {
      keys.end = std::min(keys.end, queries.end);
    }
    start(queries);
    for (int64_t k = keys.begin; k < keys.end; k += kKeys) {
      visit(queries, Range{k, std::min(k + kKeys, keys.end)});
    }
    end(queries);
  }
}

// The scores of a tile [R * h_kv, g * n, c]: -inf where a query doesn't see a key. q is scaled.
// `slope`, if asked for and there is a softcap: the derivative of what it does to scores.
at::Tensor scores_of(
    const at::Tensor& q,
    const at::Tensor& k,
    Range queries,
    Range keys,
    const Piece& piece,
    const Attending& how,
    at::Tensor* slope = nullptr) {
  at::Tensor scores = at::bmm(q, k.transpose(1, 2));
  if (how.softcap.has_value()) {
    scores.div_(*how.softcap).tanh_();
    if (slope != nullptr) {
      *slope = scores.square().neg_().add_(1);
    }
    scores.mul_(*how.softcap);
  }
  if (piece.sight == Sight::kAll) {
    return scores;
  }
  const Band band = piece.sight == Sight::kCausal ? Band{kUnlimited, 0} : how.band;
  queries = {queries.begin + piece.ahead, queries.end + piece.ahead};
  const bool passes_right = band.right != kUnlimited && keys.end - 1 > queries.begin + band.right;
  const bool passes_left = band.left != kUnlimited && keys.begin < queries.end - 1 - band.left;
  if (!passes_right && !passes_left) {
    return scores;
  }
  const auto options = q.options().dtype(at::kLong);
  const at::Tensor i = at::arange(queries.begin, queries.end, options).unsqueeze(1);
  const at::Tensor j = at::arange(keys.begin, keys.end, options);
  at::Tensor unseen;
  if (passes_right) {
    unseen = j.gt(i.add(band.right));
  }
  if (passes_left) {
    const at::Tensor before = j.lt(i.sub(band.left));
    unseen = unseen.defined() ? unseen.logical_or_(before) : before;
  }
  scores.view({q.size(0), -1, queries.size(), keys.size()}).masked_fill_(unseen, -kInfinity);
  return scores;
}

// -inf would give NaN in differences.
at::Tensor finite(const at::Tensor& log_sum) {
  return log_sum.masked_fill(log_sum.eq(-kInfinity), 0);
}

}  // namespace

BlockArguments::BlockArguments(const Given& given)
    : documents(given.optional<at::Tensor>("documents")),
      sinks(given.optional<at::Tensor>("sinks")),
      is_causal(given["is_causal"]),
      window_size(given["window_size"]),
      scale(given.optional<double>("scale")),
      softcap(given.optional<double>("softcap")) {
}

Band band_of(const BlockArguments& how) {
  Band band;
  if (!how.window_size.empty()) {
    band = {std::max(how.window_size[0], kUnlimited), std::max(how.window_size[1], kUnlimited)};
  }
  if (how.is_causal) {
    band.right = 0;
  }
  return band;
}

Attending attending(
    const BlockArguments& given,
    int64_t batch,
    int64_t tokens,
    int64_t head_dim,
    at::IntArrayRef queries) {
  Attending how;
  for (size_t n = 0; n < queries.size(); n += 2) {
    how.queries.push_back({queries[n], queries[n + 1]});
  }
  const double root = std::sqrt(static_cast<double>(std::max<int64_t>(head_dim, 1)));
  how.scale = given.scale.value_or(1 / root);
  how.softcap = given.softcap;
  how.band = band_of(given);
  if (!given.documents.has_value()) {
    how.documents.push_back({{0, batch}, {0, tokens}});
    how.lengths_recur = true;
    return how;
  }
  const at::Tensor borders = given.documents->to(at::kCPU, at::kLong).contiguous();
  const int64_t* const data = borders.const_data_ptr<int64_t>();
  const int64_t columns = borders.size(1);
  int64_t last = 0;
  std::vector<int64_t> places;  // among the documents that have tokens: themselves, or an ancestor
  for (int64_t n = 0; n < borders.size(0); ++n) {
    const int64_t begin = data[columns * n], end = data[columns * n + 1];
    const int64_t parent = columns > 2 ? data[columns * n + 2] : -1;
    const int64_t row = tokens > 0 ? begin / tokens : 0;
    TORCH_CHECK_VALUE(
        last <= begin && begin <= end && end <= batch * tokens &&
            (begin == end || (end - 1) / tokens == row),
        "expected documents to be ranges of the ", batch, " x ", tokens,
        " tokens, each in one row, in order and without overlaps, got [", begin, ", ", end,
        "] as number ", n);
    last = end;
    TORCH_CHECK_VALUE(
        parent >= -1 && parent < n, "expected the parent of document ", n,
        " to be an earlier one, or -1, got ", parent);
    int64_t place = parent < 0 ? -1 : places[parent];
    if (begin < end) {
      TORCH_CHECK_VALUE(
          place < 0 || how.documents[place].rows.begin == row, "expected document ", n,
          " to be in the row of its parent ", parent, ", got row ", row);
      const Range range{begin - row * tokens, end - row * tokens};
      how.documents.push_back({{row, row + 1}, range, place});
      place = static_cast<int64_t>(how.documents.size()) - 1;
    }
    places.push_back(place);
  }
  join_tree(how.documents);
  return how;
}

at::Tensor tokens_first(c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty_symint({sizes[1], sizes[0], sizes[2], sizes[3]}, options).transpose(0, 1);
}

at::Tensor in_order(const at::Tensor& x) {
  return x.transpose(0, 1).contiguous().transpose(0, 1);
}

Tensors empty_attended(
    const at::Tensor& q,
    const c10::SymInt& tokens,
    const c10::SymInt& heads,
    const c10::SymInt& head_dim_v) {
  const c10::SymInt out[] = {q.sym_size(0), tokens, heads, head_dim_v};
  const c10::SymInt sums[] = {q.sym_size(0), heads, tokens};
  const auto wide = q.options().dtype(wide_dtype(q.scalar_type()));
  return {tokens_first(out, q.options()), at::empty_symint(sums, wide)};
}

// ------------------------------------------------------------------- forward

Attended::Attended(const at::Tensor& q, int64_t head_dim_v, const Attending& how, bool at_once)
    : q_(q), head_dim_v_(head_dim_v), how_(how), whole_(at_once) {
}

void Attended::begin() {
  if (out_.defined()) {
    return;
  }
  const auto wide = q_.options().dtype(wide_dtype(q_.scalar_type()));
  const c10::SymInt sizes[] = {q_.size(0), q_.size(1), q_.size(2), head_dim_v_};
  // Parts are summed: where there is one only, each entry is written once.
  out_ = tokens_first(sizes, whole_ ? q_.options() : wide).zero_();
  log_sum_ = at::full({q_.size(0), q_.size(2), q_.size(1)}, -kInfinity, wide);
}

void Attended::add(const at::Tensor& k, const at::Tensor& v, Range keys) {
  const PieceCalls calls = calls_of(keys, q_, v, how_);
  whole_ = whole_ && calls.per_query <= 1;
  for (const PieceCall& call : calls.calls) {
    const Piece& piece = call.piece;
    const Range here = {piece.keys.begin - keys.begin, piece.keys.end - keys.begin};
    if (!call.by_kernel) {
      begin();
      add_tiles(k.narrow(1, here.begin, here.size()), v.narrow(1, here.begin, here.size()), piece);
      continue;
    }
    const auto [found, log_sum] = attention_of_piece(
        of_queries(q_, piece, piece.queries), part(k, piece.rows, here), part(v, piece.rows, here),
        call, how_.scale);
    if (whole_ && covers(piece, piece.queries, q_)) {
      out_ = in_order(found);
      log_sum_ = log_sum.contiguous();
      continue;
    }
    begin();
    const at::Tensor out = of_queries(out_, piece, piece.queries);
    const at::Tensor before = of_queries(log_sum_, piece, piece.queries, 2);
    if (whole_) {
      out.copy_(found);
      before.copy_(log_sum);
    } else {
      const at::Tensor both = at::logaddexp(before, log_sum);
      const auto share = [&](const at::Tensor& x) {
        return x.sub(both).exp_().transpose(1, 2).unsqueeze(3);
      };
      out.mul_(share(before)).addcmul_(found.to(out.scalar_type()), share(log_sum));
      before.copy_(both);
    }
  }
}

void Attended::add_tiles(const at::Tensor& k, const at::Tensor& v, const Piece& piece) {
  const at::ScalarType wide = log_sum_.scalar_type();
  const int64_t kv_heads = k.size(2), rows = piece.rows.size();
  at::Tensor q, most, sum, out;
  const auto log_sum_of = [&](Range queries) { return of_queries(log_sum_, piece, queries, 2); };
  const auto start = [&](Range queries) {
    q = by_kv_head(of_queries(q_, piece, queries), kv_heads, wide).mul(how_.scale);
    most = log_sum_of(queries).reshape({q.size(0), q.size(1), 1});
    // What came before is one more key, whose score is its log-sum-exp.
    sum = most.ne(-kInfinity).to(wide);
    out = whole_ ? at::zeros({q.size(0), q.size(1), v.size(3)}, q.options())
                 : by_kv_head(of_queries(out_, piece, queries), kv_heads, wide).clone();
  };
  const auto visit = [&](Range queries, Range keys) {
    const Range here = {keys.begin - piece.keys.begin, keys.end - piece.keys.begin};
    const at::Tensor scores = scores_of(
        q, by_kv_head(part(k, piece.rows, here), kv_heads, wide), queries, keys, piece, how_);
    const at::Tensor higher = at::maximum(most, scores.amax(-1, true));
    const at::Tensor shift = finite(higher);
    const at::Tensor weights = scores.sub_(shift).exp_();
    const at::Tensor kept = most.sub(shift).exp_();
    sum = sum.mul_(kept).add_(weights.sum(at::OptionalIntArrayRef{-1}, true));
    out.mul_(kept).baddbmm_(weights, by_kv_head(part(v, piece.rows, here), kv_heads, wide));
    most = higher;
  };
  const auto end = [&](Range queries) {
    const at::Tensor none = sum.eq(0);
    out.div_(sum.masked_fill(none, 1));
    of_queries(out_, piece, queries).copy_(by_token(out, rows, kv_heads, queries.size()));
    const at::Tensor log_sum = log_sum_of(queries);
    log_sum.copy_(sum.log_().add_(finite(most)).view(log_sum.sizes()));
  };
  walk(piece, how_.band, start, visit, end);
}

Tensors Attended::finish(const OptionalTensor& sinks) {
  begin();
  if (sinks.has_value()) {
    const at::Tensor both =
        at::logaddexp(log_sum_, sinks->to(log_sum_.scalar_type()).view({1, -1, 1}));
    out_.mul_(log_sum_.sub(both).exp_().transpose(1, 2).unsqueeze(3));
    log_sum_ = both;
  }
  return {out_.to(q_.scalar_type()), log_sum_};
}

// ------------------------------------------------------------------- backward

AttendedGradients::AttendedGradients(
    const at::Tensor& grad,
    const at::Tensor& q,
    const at::Tensor& out,
    const at::Tensor& log_sum,
    const Attending& how,
    bool at_once)
    : grad_(grad), q_(q), out_(out), log_sum_(log_sum), how_(how), at_once_(at_once) {
}

const at::Tensor& AttendedGradients::delta() {
  if (!delta_.defined()) {
    const at::ScalarType wide = log_sum_.scalar_type();
    delta_ = grad_.to(wide).mul(out_.to(wide)).sum(at::OptionalIntArrayRef{-1}, true);
  }
  return delta_;
}

at::Tensor& AttendedGradients::dq(at::ScalarType dtype) {
  dq_ = dq_.defined() ? dq_.to(dtype)
                      : tokens_first(q_.sym_sizes(), q_.options().dtype(dtype)).zero_();
  return dq_;
}

std::pair<at::Tensor, at::Tensor> AttendedGradients::add(
    const at::Tensor& k, const at::Tensor& v, Range keys) {
  const PieceCalls calls = calls_of(keys, q_, v, how_);
  const at::ScalarType own = q_.scalar_type(), wide = log_sum_.scalar_type();
  const at::ScalarType q_dtype = at_once_ ? calls.sum_dtype(calls.per_query, own, wide) : wide;
  // What one call gives for all keys needs no sum.
  const bool alone = calls.calls.size() == 1 && calls.by_kernels &&
                     covers(calls.calls[0].piece, calls.calls[0].piece.keys, k);
  at::Tensor dk, dv;
  if (!alone) {
    const auto options = q_.options().dtype(calls.sum_dtype(calls.per_key, own, wide));
    dk = tokens_first(k.sym_sizes(), options).zero_();
    dv = tokens_first(v.sym_sizes(), options).zero_();
  }
  for (const PieceCall& call : calls.calls) {
    const Piece& piece = call.piece;
    const Range here = {piece.keys.begin - keys.begin, piece.keys.end - keys.begin};
    const auto of_keys = [&](const at::Tensor& x) { return part(x, piece.rows, here); };
    const auto of_piece = [&](const at::Tensor& x) { return of_queries(x, piece, piece.queries); };
    if (!call.by_kernel) {
      const auto narrow = [&](const at::Tensor& x) { return x.narrow(1, here.begin, here.size()); };
      add_tiles(narrow(k), narrow(v), piece, narrow(dk), narrow(dv));
      continue;
    }
    const auto [of_q, of_k, of_v] = attention_of_piece_backward(
        of_piece(grad_), of_piece(q_), of_keys(k), of_keys(v), of_piece(out_),
        of_queries(log_sum_, piece, piece.queries, 2), call, how_.scale);
    if (!dq_.defined() && covers(piece, piece.queries, q_)) {
      dq_ = in_order(of_q);
    } else {
      of_piece(dq(q_dtype)).add_(of_q);
    }
    if (alone) {
      return {in_order(of_k), in_order(of_v)};
    }
    of_keys(dk).add_(of_k);
    of_keys(dv).add_(of_v);
  }
  return {dk.to(k.scalar_type()), dv.to(v.scalar_type())};
}

void AttendedGradients::add_tiles(
    const at::Tensor& k,
    const at::Tensor& v,
    const Piece& piece,
    const at::Tensor& dk,
    const at::Tensor& dv) {
  const at::ScalarType wide = log_sum_.scalar_type();
  const int64_t kv_heads = k.size(2), rows = piece.rows.size();
  at::Tensor q, grad, log_sum, delta, dq;
  const auto start = [&](Range queries) {
    const auto tile = [&](const at::Tensor& x) {
      return by_kv_head(of_queries(x, piece, queries), kv_heads, wide);
    };
    q = tile(q_).mul(how_.scale);
    grad = tile(grad_);
    delta = tile(this->delta());
    log_sum = finite(of_queries(log_sum_, piece, queries, 2).reshape({q.size(0), q.size(1), 1}));
    dq = at::zeros_like(q);
  };
  const auto visit = [&](Range queries, Range keys) {
    const Range here = {keys.begin - piece.keys.begin, keys.end - piece.keys.begin};
    const at::Tensor k_tile = by_kv_head(part(k, piece.rows, here), kv_heads, wide);
    const at::Tensor v_tile = by_kv_head(part(v, piece.rows, here), kv_heads, wide);
    at::Tensor slope;
    const at::Tensor weights =
        scores_of(q, k_tile, queries, keys, piece, how_, &slope).sub_(log_sum).exp_();
    const auto add = [&](const at::Tensor& to, const at::Tensor& x) {
      part(to, piece.rows, here).add_(by_token(x, rows, kv_heads, keys.size()));
    };
    add(dv, at::bmm(weights.transpose(1, 2), grad));
    at::Tensor of_scores = at::bmm(grad, v_tile.transpose(1, 2)).sub_(delta).mul_(weights);
    if (slope.defined()) {
      of_scores.mul_(slope);
    }
    dq.baddbmm_(of_scores, k_tile);
    add(dk, at::bmm(of_scores.transpose(1, 2), q));
  };
  const auto end = [&](Range queries) {
    of_queries(this->dq(wide), piece, queries)
        .add_(by_token(dq, rows, kv_heads, queries.size()), how_.scale);
  };
  walk(piece, how_.band, start, visit, end);
}

at::Tensor AttendedGradients::of_q() {
  return (dq_.defined() ? dq_ : dq(q_.scalar_type())).to(q_.scalar_type());
}

at::Tensor AttendedGradients::of_sinks(const at::Tensor& sinks) {
  const at::Tensor weight = sinks.to(log_sum_.scalar_type()).view({1, -1, 1}).sub(log_sum_).exp_();
  // Its value is 0: all that its weight takes is taken from the others.
  return weight.mul_(delta().squeeze(3).transpose(1, 2))
      .sum(at::OptionalIntArrayRef({0, 2}))
      .neg_()
      .to(sinks.scalar_type());
}

}  // namespace deepsp
