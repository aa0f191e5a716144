#pragma once
// What both linear layers around the exchange do. A GEMM writes straight into the block that is
// sent, and reads straight from the received block; while one block is in flight, the next
// one's GEMM runs.

#include "../common/checks.h"
#include "../exchange/engine.h"
#include "../op.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>

namespace deepsp {

// x, or a gradient: [B, S_rank, dim].
inline void check_tokens(
    const at::Tensor& t, const char* name, c10::SymIntArrayRef seq_lens, int64_t rank) {
  check_seq_lens(seq_lens, rank);
  TORCH_CHECK_VALUE(
      t.dim() == 3, "expected ", name, " to have 3 dimensions [batch, sequence, features], got ",
      t.dim());
  check_local_length(t, name, seq_lens, rank);
  TORCH_CHECK_VALUE(
      t.is_floating_point(), "expected ", name, " to have a floating-point dtype, got ",
      dtype_name(t.scalar_type()));
}

// x [B, S_rank, dim] as a matrix [S_rank·B, dim] that BLAS takes as it is: rows in
// the order of the blocks. A copy only for B > 1 or odd strides.
inline at::Tensor rows_of(const at::Tensor& x) {
  const at::Tensor rows = x.transpose(0, 1).reshape({x.size(0) * x.size(1), x.size(2)});
  const bool dense = rows.stride(1) == 1 && rows.stride(0) >= rows.size(1);
  return dense ? rows : rows.contiguous();
}

// The way back: [S_rank·B, dim] -> [B, S_rank, dim], contiguous.
inline at::Tensor batches_of(const at::Tensor& rows, const Layout& plan) {
  const int64_t tokens = plan.tokens();
  return plan.batch == 1
             ? rows.view({1, tokens, rows.size(1)})
             : rows.view({tokens, plan.batch, rows.size(1)}).transpose(0, 1).contiguous();
}

// The rows of a weight, or of its bias, that belong to these of tensor i's heads.
inline at::Tensor rows_for(at::TensorList of, const Layout& plan, size_t i, Range heads) {
  const int64_t dim = plan.head_dims[i];
  return of[i].narrow(0, heads.begin * dim, heads.size() * dim);
}

// Whether blocks are put side by side before they are multiplied: if all arrive at once, from
// several ranks, one copy costs less than a product for each; and of queries that are cut several
// ranks have parts of one head.
inline bool are_merged(const Tensors& buffers, const Layout& plan) {
  return plan.cuts_queries() ||
         (plan.ranks() > 1 && std::all_of(buffers.begin(), buffers.end(), is_received_at_once));
}

// Merges buffers that may be read again: in each, this rank's own block lies in its place then.
inline at::Tensor merge_to_rows_again(const Tensors& buffers, const Layout& plan) {
  for (int64_t chunk = 0; chunk < plan.chunks(); ++chunk) {
    ensure_waited(buffers[chunk], plan, chunk);
  }
  return merge_to_rows(buffers, plan, /*waited=*/true);
}

// What arrives in the buffers of all chunks. Calls visit(chunk, p) for every block
// in the order of arrival: this rank's own, which are there, then the others' as
// they were sent. Where blocks are sent together, so do a chunk's.
class ReceivedChunks {
 public:
  ReceivedChunks(at::TensorList buffers, const Layout& plan, bool last_first)
      : buffers_(buffers), plan_(plan), last_first_(last_first), chunks_(buffers.size()) {}

  ReceivedBlocks& operator[](int64_t chunk) {
    if (!chunks_[chunk].has_value()) {
      chunks_[chunk].emplace(buffers_[chunk], plan_, chunk);
    }
    return *chunks_[chunk];
  }

  template <class Visit>
  void in_order(const Visit& visit) {
    const bool own_first = buffers_[0].is_cpu();
    const auto visit_own = [&](int64_t chunk) {
      (*this)[chunk].wait(plan_.rank);
      visit(chunk, plan_.rank);
    };
    for (int64_t n = 0; own_first && n < count(); ++n) {
      visit_own(nth(n));
    }
    for (int64_t n = 0; n < count(); ++n) {
      if (!own_first) {
        visit_own(nth(n));
      }
      for (int64_t step = 1; step < plan_.ranks(); ++step) {
        const int64_t p = (plan_.rank - step + plan_.ranks()) % plan_.ranks();
        (*this)[nth(n)].wait(p);
        visit(nth(n), p);
      }
      (*this)[nth(n)].finish();
    }
  }

 private:
  int64_t count() const { return plan_.chunks(); }
  int64_t nth(int64_t n) const { return last_first_ ? count() - 1 - n : n; }

  at::TensorList buffers_;
  const Layout& plan_;
  bool last_first_;
  std::vector<std::optional<ReceivedBlocks>> chunks_;
};

}  // namespace deepsp
