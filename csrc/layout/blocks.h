#pragma once
// The blocks of an exchange: what travels from whom to whom, and how large it
// is. Int is int64_t, or c10::SymInt where shapes are symbolic.
//
//   seq_to_heads: rank r sends p the block [S_r, B, X_p]; the blocks received
//                 stack to [S, B, X_r].
//   heads_to_seq: rank r sends p the block [S_p, B, X_r]; received are, one
//                 after another, [S_r, B, X_p] for every p.
//
// X_p is the number of elements per token that p holds: Σ_i h_i(p)·D_i over the
// tensors that travel together.

#include "heads.h"

namespace deepsp {

template <class Int>
struct BlockLayout {
  HeadLayout heads;
  std::vector<Int> head_dims;  // D_i
  Int batch;                   // B
  std::vector<Int> seq_lens;   // S_p
  int64_t rank;                // this one

  int64_t parts() const { return heads.parts(); }

  // X_p of one chunk.
  Int columns(int64_t p, int64_t chunk) const { return column(heads.tensors(), p, chunk); }

  // What tensor i takes of them.
  Int width(size_t i, int64_t p, int64_t chunk) const {
    return Int(heads.range(i, p, chunk).size()) * head_dims[i];
  }

  // Where tensor i begins within the X_p elements of a token.
  Int column(size_t i, int64_t p, int64_t chunk) const {
    Int sum = 0;
    for (size_t j = 0; j < i; ++j) {
      sum = sum + width(j, p, chunk);
    }
    return sum;
  }

  // The first token of rank p; token(parts()) is the length S of the sequence.
  Int token(int64_t p) const {
    Int sum = 0;
    for (int64_t r = 0; r < p; ++r) {
      sum = sum + seq_lens[r];
    }
    return sum;
  }

  Int total() const { return token(parts()); }

  // Elements of each block that this rank gets from, or gives to, every rank: by heads
  // [S_p, B, X_rank], by tokens [S_rank, B, X_p].
  std::vector<Int> counts_by_heads(int64_t chunk) const {
    std::vector<Int> counts;
    for (const Int& tokens : seq_lens) {
      counts.push_back(tokens * batch * columns(rank, chunk));
    }
    return counts;
  }
  std::vector<Int> counts_by_tokens(int64_t chunk) const {
    std::vector<Int> counts;
    for (int64_t p = 0; p < parts(); ++p) {
      counts.push_back(seq_lens[rank] * batch * columns(p, chunk));
    }
    return counts;
  }

  // Elements that this rank receives (seq_to_heads) or sends (heads_to_seq).
  Int elements_by_heads(int64_t chunk) const {
    return token(parts()) * batch * columns(rank, chunk);
  }

  // Elements that this rank receives (heads_to_seq) or sends (seq_to_heads).
  Int elements_by_tokens(int64_t chunk) const {
    Int sum = 0;
    for (int64_t p = 0; p < parts(); ++p) {
      sum = sum + columns(p, chunk);
    }
    return seq_lens[rank] * batch * sum;
  }
};

}  // namespace deepsp
