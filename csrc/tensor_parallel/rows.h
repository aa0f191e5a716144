#pragma once
// Products with rows that other ranks hold, or are to get: one rank's rows are sent while another's
// are multiplied. Nothing is packed or copied out, since products read and write the blocks that
// are sent.

#include "../common/copies.h"
#include "../op.h"
#include "../transport/moves.h"

#include <functional>

namespace deepsp {

// Rows of several matrices [outer, n·inner, columns], divided among the ranks along n.
struct Rows {
  int64_t outer;
  std::vector<int64_t> counts;  // each rank's rows of one matrix
  Group group;

  int64_t begin(int64_t p) const;
  int64_t total() const { return begin(group.size); }

  // x as matrices: with all rows, or with this rank's.
  at::Tensor full(const at::Tensor& x) const { return matrices(x, total()); }
  at::Tensor part(const at::Tensor& x) const { return matrices(x, counts[group.rank]); }
  // Rank p's rows of full matrices.
  at::Tensor rows_of(const at::Tensor& full, int64_t p) const {
    return full.narrow(1, begin(p), counts[p]);
  }

 private:
  at::Tensor matrices(const at::Tensor& x, int64_t rows) const {
    return x.contiguous().view({outer, rows, x.size(-1)});
  }
};

// out [outer, rows, M] = x [outer, rows, K] by weight [K, M].
void multiply(const at::Tensor& out, const at::Tensor& x, const at::Tensor& weight);

// An all-gather whose blocks are used one by one.
class GatheredRows {
 public:
  GatheredRows(const at::Tensor& part, const Rows& rows);

  // Calls visit(p, rank p's block), this rank's first, the others' when they are received.
  void in_order(const std::function<void(int64_t, const at::Tensor&)>& visit);

 private:
  const Rows& rows_;
  at::Tensor part_;
  Tensors blocks_;
  std::unique_ptr<Flight> flight_;  // last: it must end before the blocks that it fills
};

// A reduce-scatter of x [outer, all rows, K] by weight [K, M], whose blocks are sent one by one as
// they are computed.
class ScatteredProducts {
 public:
  ScatteredProducts(const at::Tensor& x, const at::Tensor& weight, const Rows& rows);

  // [outer, this rank's rows, M], summed in rank order.
  at::Tensor sum(OptionalDtype reduce_dtype);

 private:
  Tensors received_;
  std::unique_ptr<Flight> flight_;
};

}  // namespace deepsp
