#include "rows.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <ATen/record_function.h>

#include <numeric>

namespace deepsp {
int64_t Rows::begin(int64_t p) const {
  return std::accumulate(counts.begin(), counts.begin() + p, int64_t(0));
}

void multiply(const at::Tensor& out, const at::Tensor& x, const at::Tensor& weight) {
  for (int64_t o = 0; o < out.size(0); ++o) {
    at::Tensor to = out[o];
    at::mm_out(to, x[o], weight);
  }
}

// ------------------------------------------------------------------- gather

GatheredRows::GatheredRows(const at::Tensor& part, const Rows& rows) : rows_(rows), part_(part) {
  const int64_t rank = rows.group.rank;
  const int64_t columns = part.size(2);
  const auto elements = [&](int64_t p) { return rows.outer * rows.counts[p] * columns; };
  const auto others = [&](int64_t p) { return rows.outer * rows.total() * columns - elements(p); };
  Transfer transfer(rows.group, others, {others(rank)}, part.options());
  // Where the block of `source` begins in p's buffer, in elements.
  const auto place = [&](int64_t source, int64_t p) {
    return rows.outer * rows.begin(source) * columns - (p < source ? elements(p) : 0);
  };
  for (int64_t p = 0; p < rows.group.size; ++p) {
    blocks_.push_back(
        p == rank ? part
                  : transfer.buffer()
                        .narrow(0, place(p, rank), elements(p))
                        .view({rows.outer, rows.counts[p], columns}));
  }
  const auto mine = static_cast<int64_t>(part_.nbytes());
  Moves moves;
  moves.reads = {part_};
  moves.blocks.push_back(
      {[&](int64_t p) {
         return Span{place(p, rank) * item_of(part_), elements(p) * item_of(part_)};
       },
       [&](int64_t) { return Bytes{data_of(part_), mine}; }});
  moves.place = [&](int64_t p, char* theirs, auto& copies) {
    if (mine > 0) {
      char* const to = theirs + place(rank, p) * item_of(part_);
      copies.push_back(copy_of_bytes(data_of(part_), to, mine));
    }
  };
  flight_ = transfer.start(moves);
}

void GatheredRows::in_order(const std::function<void(int64_t, const at::Tensor&)>& visit) {
  const int64_t rank = rows_.group.rank, size = rows_.group.size;
  visit(rank, part_);
  for (int64_t step = 1; step < size; ++step) {
    const int64_t p = (rank - step + size) % size;
    flight_->wait_receive(p);
    visit(p, blocks_[p]);
  }
  flight_->wait_sends();
}

// ------------------------------------------------------------------- scatter

ScatteredProducts::ScatteredProducts(
    const at::Tensor& x, const at::Tensor& weight, const Rows& rows) {
  const int64_t rank = rows.group.rank, size = rows.group.size;
  const auto shape = [&](int64_t p) {
    return std::vector<int64_t>{rows.outer, rows.counts[p], weight.size(1)};
  };
  const auto elements = [&](int64_t p) { return c10::multiply_integers(shape(p)); };
  Transfer transfer(
      rows.group, [&](int64_t p) { return size * elements(p); }, {size, elements(rank)},
      x.options());
  for (int64_t p = 0; p < size; ++p) {
    received_.push_back(transfer.buffer()[p].view(shape(rank)));
  }
  const auto make = [&](int64_t p, const at::Tensor& to) {
    multiply(to, rows.rows_of(x, p), weight);
  };
  const int64_t mine = elements(rank) * item_of(x);
  Moves moves;
  moves.blocks.push_back(
      {[&](int64_t p) { return Span{p * mine, mine}; },
       [&](int64_t p) { return Bytes{nullptr, elements(p) * item_of(x)}; },
       [&](c10::ArrayRef<PackedBlock> places) {
         for (const auto& [p, block] : places) {
           make(p, at::for_blob(block, shape(p)).options(x.options()).make_tensor());
         }
       }});
  moves.begin = [&](int64_t p) { return rank * elements(p) * item_of(x); };
  flight_ = transfer.start(moves);
  make(rank, received_[rank]);  // last: only this rank waits for it
}

at::Tensor ScatteredProducts::sum(OptionalDtype reduce_dtype) {
  flight_->wait_all();
  RECORD_FUNCTION("deepsp::sum", {});
  const at::Tensor result = empty_buffer(received_[0].sizes(), received_[0]);
  std::vector<Addend> addends;
  for (const at::Tensor& block : received_) {
    addends.push_back({data_of(block), result.numel()});
  }
  std::vector<StridedSum> sums;
  add_sum(result, 1, result.numel(), result.scalar_type(), reduce_dtype, addends, sums);
  run(sums, result.device());
  return result;
}

}  // namespace deepsp
