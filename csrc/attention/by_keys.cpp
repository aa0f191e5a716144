#include "by_keys.h"

#include "../common/checks.h"
#include "../rows/ops.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/floor_divide.h>

namespace deepsp {
namespace {

// Guards, not expressions: a graph is for one of the two, and its shapes stay polynomials.
const c10::SymInt& least(const c10::SymInt& a, const c10::SymInt& b) {
  return a < b ? a : b;
}
const c10::SymInt& most(const c10::SymInt& a, const c10::SymInt& b) {
  return a < b ? b : a;
}

// Tokens of the full sequence.
struct Tokens {
  c10::SymInt begin = 0, end = 0;

  bool empty() const { return !(begin < end); }
  c10::SymInt size() const { return empty() ? c10::SymInt(0) : end - begin; }
  Tokens common(const Tokens& other) const {
    return {most(begin, other.begin), least(end, other.end)};
  }
  // What these queries see of a document.
  Tokens seen(const Tokens& document, Band band) const {
    const Tokens queries = common(document);
    if (queries.empty()) {
      return {};
    }
    return {
        band.left == kUnlimited ? document.begin : most(document.begin, queries.begin - band.left),
        band.right == kUnlimited ? document.end : least(document.end, queries.end + band.right)};
  }
  // The least range with both.
  Tokens with(const Tokens& other) const {
    return other.empty() ? *this
           : empty()     ? other
                         : Tokens{least(begin, other.begin), most(end, other.end)};
  }
};

struct KeyPlan {
  std::vector<Tokens> own, seen;  // by rank
  SymInts counts;                 // tokens that a rank sends to another, by source

  KeyPlan(const SymPlan& plan, const Asked& asked) {
    const int64_t ranks = plan.heads.ranks();
    c10::SymInt first = 0;
    for (const c10::SymInt& count : plan.seq_lens) {
      own.push_back({first, first + count});
      first = first + count;
    }
    const Tokens all{0, first};
    Band band = band_of(asked);
    // Where a graph is traced, documents aren't known.
    const OptionalTensor& documents = asked.documents;
    if (documents.has_value() && documents->sym_size(1) > 2) {
      band.left = kUnlimited;  // windows go back along a tree, not along places
    }
    if (documents.has_value() && !documents->key_set().has_any(at::kTensorSubclassLike)) {
      const Attending among = attending(
          asked, plan.batch.guard_int(__FILE__, __LINE__), first.guard_int(__FILE__, __LINE__), 1);
      seen.resize(ranks);  // a range for each rank: what its queries see in any row
      for (const Document& document : among.documents) {
        const Tokens tokens{document.tokens.begin, document.tokens.end};
        for (int64_t r = 0; r < ranks; ++r) {
          const Tokens sees = own[r].seen(tokens, band);
          seen[r] = seen[r].with(sees);
          for (int64_t n = sees.empty() ? -1 : document.parent; n >= 0;) {
            const Document& above = among.documents[n];
            seen[r] = seen[r].with({above.tokens.begin, above.tokens.end});
            n = above.parent;
          }
        }
      }
    } else {
      for (const Tokens& queries : own) {
        seen.push_back(queries.seen(all, band));
      }
    }
    for (int64_t r = 0; r < ranks; ++r) {
      // Tokens outside of documents, too. Of no tokens the range is empty, where they would be.
      seen[r] = own[r].with(seen[r]);
    }
    for (const Tokens& source : own) {
      for (int64_t r = 0; r < ranks; ++r) {
        counts.push_back(source.common(seen[r]).size());
      }
    }
  }
};

// documents among the tokens of a range in each row, numbered anew.
at::Tensor within(const at::Tensor& documents, const c10::SymInt& length, const Tokens& range) {
  const at::Tensor all = documents.to(at::kLong), borders = all.narrow(1, 0, 2);
  const at::Tensor row = at::floor_divide(borders.narrow(1, 0, 1), c10::Scalar(length));
  const at::Tensor tokens = borders.sub(row, c10::Scalar(length));
  // What ends in another row stays wrong, for attention to see.
  const at::Tensor beyond = tokens.sub(c10::Scalar(length)).clamp_min(0);
  const at::Tensor here = tokens.clamp(c10::Scalar(range.begin), c10::Scalar(range.end))
                              .sub(c10::Scalar(range.begin))
                              .add(beyond, c10::Scalar(length))
                              .add(row, c10::Scalar(range.size()));
  return at::cat({here, all.narrow_symint(1, 2, all.sym_size(1) - 2)}, 1);
}

// [B, n, h, D] as [n, B, h * D].
at::Tensor as_rows(const at::Tensor& x) {
  return x.transpose(0, 1).flatten(2);
}

}  // namespace

void check_by_keys(const Asked& asked, const Given& given) {
  const auto check = [](bool fine, const char* name, const auto& got) {
    TORCH_CHECK_VALUE(
        fine, "expected no ", name, " with exchange 'keys', got ", got,
        "; leave it out, or pass exchange='heads'");
  };
  const int64_t chunks = given["chunks"];
  check(!asked.attn_mask.has_value(), "attn_mask", "one");
  check(asked.dropout_p == 0, "dropout_p", asked.dropout_p);
  check(chunks == 1, "chunks", chunks);
  check(given["kv_chunk"].value().isNone(), "kv_chunk", "one");
  check(given["dealt"].value().isNone(), "deal", "one");
}

Attention attend_by_keys(
    const Tensors& inputs, const SymPlan& plan, const Asked& asked, const Given& given) {
  const at::Tensor &q = inputs[0], &k = inputs[1], &v = inputs[2];
  const KeyPlan keys(plan, asked);
  const Tokens &own = keys.own[plan.rank], &seen = keys.seen[plan.rank];
  const at::Tensor rows = at::cat({as_rows(k), as_rows(v)}, 2).flatten(1);
  std::vector<RowRange> sent;
  for (const Tokens& seen_there : keys.seen) {
    const Tokens part = own.common(seen_there);
    sent.push_back({part.empty() ? c10::SymInt(0) : part.begin - own.begin, part.size()});
  }
  const With counts{"counts", keys.counts}, there{"home", false}, name{"op", "keys of attention"};
  const at::Tensor buffer =
      rows_start(given, {{"rows", joined_ranges(rows, sent)}, counts, there, name});
  const at::Tensor received = rows_wait(given, {{"buffer", buffer}, counts, there, name});
  const c10::SymInt of_k = k.sym_size(2) * k.sym_size(3), of_v = v.sym_size(2) * v.sym_size(3);
  const at::Tensor by_token = received.view_symint({seen.size(), plan.batch, of_k + of_v});
  const auto heads = [&](const at::Tensor& x, const c10::SymInt& at, const c10::SymInt& features) {
    return by_token.narrow_symint(2, at, features)
        .unflatten_symint(2, {x.sym_size(2), x.sym_size(3)})
        .transpose(0, 1);
  };
  OptionalTensor documents;
  if (asked.documents.has_value()) {
    documents = within(*asked.documents, plan.total(), seen);
  }
  return attention_by_blocks(
      q, heads(k, 0, of_k), heads(v, of_k, of_v), Asked(asked, documents), asked.sinks,
      {own.begin - seen.begin, own.end - seen.begin});
}

}  // namespace deepsp
