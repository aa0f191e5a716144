#pragma once
// Attention of a cell: some heads of a rank, and all of their queries or some.

#include "../exchange/checks.h"
#include "blocks.h"
#include "log_sum.h"
#include "readers.h"

namespace deepsp {

// How queries attend to keys: the arguments of distributed_attention.
struct Asked : BlockArguments {
  const OptionalTensor attn_mask;
  const double dropout_p;
  const bool sharded_randomness;
  const bool return_log_sum;

  explicit Asked(const Given& given, bool return_log_sum = false);
  // Among other documents.
  Asked(const Asked& asked, OptionalTensor among)
      : BlockArguments(asked, std::move(among)),
        attn_mask(asked.attn_mask),
        dropout_p(asked.dropout_p),
        sharded_randomness(asked.sharded_randomness),
        return_log_sum(asked.return_log_sum) {}
};

// Checks the arguments for all tokens and heads.
void check_asked(
    const OptionalTensor& attn_mask,
    double dropout_p,
    bool is_causal,
    const Pattern& pattern,
    at::ScalarType dtype,
    const c10::SymInt& batch,
    int64_t num_heads,
    const c10::SymInt& tokens);

// Attention by blocks takes neither.
void check_only_pattern(const OptionalTensor& attn_mask, double dropout_p);

// Which cell it is.
struct CellOf {
  HeadLayout heads;
  int64_t rank;
  int64_t chunk;
  int64_t index;
  Cell cell = heads.cells(rank, chunk)[index];

  // Begin and end of each range of its queries; empty: all tokens.
  SymInts queries(const c10::SymInt& total) const {
    SymInts borders;
    if (!heads.is_whole(cell)) {
      for (const auto& [begin, end] : heads.tokens(cell, total, chunk)) {
        borders.push_back(begin);
        borders.push_back(end);
      }
    }
    return borders;
  }
  // How often it draws from the generator, so that ranks draw alike often, whatever the number of
  // their cells.
  int64_t draws() const {
    const auto last = static_cast<int64_t>(heads.cells(rank, chunk).size()) - 1;
    return index < last || !heads.cuts_queries() ? 1 : heads.most_cells() - last;
  }
};

// What its query heads read of k or v: `received` is what each wait so far has given, [B, S, h, D],
// the first chunk's first. Heads are repeated for their query heads where their numbers differ from
// head to head; else a view.
at::Tensor kv_of_cell(at::TensorList received, const CellOf& of);

// q [B, n, h, D] of `queries`, begin and end of each range of k's tokens (none: all); k and v [B,
// S, h_kv, D]. sinks: those of q's heads.
Attention attention_by_blocks(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const Asked& how,
    const OptionalTensor& sinks,
    const SymInts& queries);

// q [B, n, h, D], k and v [B, S, h_kv, D] as kv_of_cell gives them.
Attention attention_of_cell(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const Asked& asked,
    const CellOf& of);

}  // namespace deepsp
