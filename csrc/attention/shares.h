#pragma once
// Attention of some heads, and of some of their queries.

#include "ops.h"
#include "readers.h"

namespace deepsp {

// How queries attend to keys: the arguments of distributed_attention.
struct Asked {
  const OptionalTensor& attn_mask;
  double dropout_p;
  bool is_causal;
  std::optional<double> scale;
  bool sharded_randomness;
  const Pattern& pattern;
};

// Over shares of queries; inputs [B, S_rank, H_i, D_i].
at::Tensor attention_of_shares(
    at::TensorList inputs,
    const Asked& asked,
    int64_t query_parts,
    int64_t chunks,
    c10::SymIntArrayRef seq_lens,
    int64_t rank,
    std::string_view group_name);

// The rows of a global mask that belong to these query heads.
at::Tensor mask_of(const at::Tensor& mask, const Range& heads);
OptionalTensor sinks_of(const OptionalTensor& sinks, const Range& heads);

// The kv heads read [B, S, h, D], in order, as often as is needed for all to be read by as many
// query heads.
at::Tensor for_readers(const Tensors& pieces, const Readers& readers);

}  // namespace deepsp
