#pragma once
// Rows exchanged in blocks, for CPU and CUDA tensors. Blocks lie one after another, by rank, in
// what is sent and in what is received, and are sent from where they are.

#include "../common/copies.h"
#include "../transport/transfer.h"

namespace deepsp {

// rows [n, elements], those for rank 0 first; the buffer has the plan's size. Plan: Halo, or
// RowCounts; home: the way back.
template <class Plan>
at::Tensor exchange_rows(const at::Tensor& rows, const Plan& plan, bool home, const Group& group) {
  const int64_t elements = rows.size(1), bytes = elements * item_of(rows), rank = plan.rank;
  Transfer transfer(
      group.alone ? nullptr : &group, [&](int64_t p) { return plan.buffer(p) * elements; },
      {plan.buffer(rank), elements}, rows.options());
  const at::Tensor& buffer = transfer.buffer();
  auto gives = plan.counts(rank, !home), gets = plan.counts(rank, home);
  const auto send = [&](int64_t p) {
    return Bytes{data_of(rows) + plan.total(rank, !home, p) * bytes, gives[p] * bytes};
  };
  const auto receive = [&](int64_t p) {
    return Bytes{data_of(buffer) + plan.total(rank, home, p) * bytes, gets[p] * bytes};
  };
  // To the block's place in the buffer of rank p.
  const auto add_copy = [&](int64_t p, char* theirs, std::vector<StridedCopy>& copies) {
    if (const Bytes block = send(p); block.size > 0) {
      char* const to = theirs + plan.total(p, home, rank) * bytes;
      copies.push_back(copy_of_bytes(block.data, to, block.size));
    }
  };
  const auto copy = [&](int64_t p, char* theirs) {
    std::vector<StridedCopy> copies;
    add_copy(p, theirs, copies);
    run(copies, rows.device());
  };
  if (group.alone) {
    copy(rank, data_of(buffer));
  } else if (group.point_to_point) {
    auto flight = std::make_unique<Flight>();
    flight->holds.push_back(rows);
    transfer.send(receive, send, *flight);
    transfer.write(copy, *flight);
    copy(rank, data_of(buffer));
    if (waits_at_once()) {
      flight->wait_all();
    }
    attach(buffer, std::move(flight));
  } else if (transfer.staged()) {
    attach(buffer, transfer.stage({rows}, add_copy));
  } else {
    for (int64_t p = 0; p < plan.ranks(); ++p) {
      gives[p] *= elements;
      gets[p] *= elements;
    }
    const at::Tensor to = unowned(buffer.narrow(0, 0, plan.total(rank, home)).view({-1}));
    attach(group, buffer, launch_all_to_all(group, to, rows.view({-1}), gets, gives), rows);
  }
  return buffer;
}

}  // namespace deepsp
