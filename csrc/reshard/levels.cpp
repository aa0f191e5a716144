// Sums in two levels, in groups that span machines. The ranks of a machine write what they have for
// any rank into the buffer of one of them, which sums it and sends the sum: a machine sends each
// block once. A thread does that, and a start still waits for nobody.
//
//   buffer of rank r   for each rank that it sums for, itself first, a slot for each rank of its
//                      machine; its own stay empty: what it has is read where it is
//   received           the sum for r of each machine
//
// The order: the ranks of a machine, then the machines. Sums of machines have the dtype in which
// sums are kept, float32 or float64, whatever reduce_dtype is.

#include "../common/checks.h"
#include "../common/wide.h"
#include "engine.h"

#include <ATen/ops/alias.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>

namespace deepsp {
namespace {

using Sums = std::vector<StridedSum>;

// The blocks of a scatter as sums.
Shards widened(Shards shards, Dtypes wire) {
  for (size_t i = 0; i < shards.size(); ++i) {
    shards.tensors[i].inner *=
        static_cast<int64_t>(c10::elementSize(wide_dtype(wire[i])) / c10::elementSize(wire[i]));
  }
  return shards;
}

// Where the sums of all machines for this rank are received.
int64_t received_slot(const Shards& wide) {
  return (wide.block(wide.rank) + 15) / 16 * 16;
}

// Calls visit(q, where its slots begin) for each rank q that rank p sums for. Returns the bytes of
// all slots.
int64_t each_summed(
    const Machines& machines,
    const Shards& shards,
    int64_t p,
    const std::function<void(int64_t, int64_t)>& visit) {
  const int64_t here = machines.of[p];
  int64_t begin = 0;
  for (int64_t step = 0; step < shards.parts(); ++step) {
    const int64_t q = (p + step) % shards.parts();
    if (machines.sums_for(here, q) == p) {
      visit(q, begin);
      begin += static_cast<int64_t>(machines.ranks[here].size()) * shards.block(q);
    }
  }
  return begin;
}

}  // namespace

std::shared_ptr<const Machines> Reshard::levels(Dtypes wire) const {
  auto machines = at_.point_to_point && shards_.slot() > 0 ? machines_of(group_) : nullptr;
  if (machines == nullptr || machines->count() == 1) {
    return nullptr;
  }
  // What a machine sends: each rank's blocks, or their sum.
  const Shards wide = widened(shards_, wire);
  int64_t saved = 0;
  for (size_t i = 0; i < shards_.size(); ++i) {
    saved += shards_.parts() * shards_[i].full() - machines->count() * wide[i].full();
  }
  return saved > 0 ? machines : nullptr;
}

void Reshard::add_machine_sum(
    const Tensors& inputs,
    size_t i,
    int64_t p,
    const Machines& machines,
    char* slots,
    char* to,
    Sums& sums) const {
  const int64_t item = item_of(inputs[i]), row = shards_[i].row(p) / item;
  std::vector<Addend> addends;
  for (const int64_t rank : machines.with(rank_)) {
    const char* const theirs = slots + shards_.offset(i, p);
    addends.push_back(
        rank == rank_ ? Addend{part_of(inputs[i], i, p), shards_[i].row() / item}
                      : Addend{theirs, row});
    slots += shards_.block(p);
  }
  const at::Tensor sum = at::from_blob(
      to, {shards_[i].outer * row}, inputs[i].options().dtype(wide_dtype(inputs[i].scalar_type())));
  add_sum(sum, shards_[i].outer, row, inputs[i].scalar_type(), std::nullopt, addends, sums);
}

at::Tensor Reshard::launch_levels(
    const Tensors& inputs, const BufferShape& shape, const Machines& machines) const {
  const Shards wide = widened(shards_, dtypes_of(inputs));
  const int64_t here = machines.of[rank_];
  const std::vector<int64_t> sizes = ints(shape.sizes);
  const auto item = static_cast<int64_t>(shape.options.dtype().itemsize());
  Transfer transfer(
      &group_,
      [&](int64_t p) {  // the others are sent messages
        const int64_t bytes =
            machines.of[p] == here ? each_summed(machines, shards_, p, [](auto...) {}) : 0;
        return std::max(c10::multiply_integers(sizes), (bytes + item - 1) / item);
      },
      sizes, shape.options, shape.kind);
  const at::Tensor& buffer = transfer.buffer();
  const auto make_bytes = [&](int64_t size) {
    return empty_buffer({size}, shape.options.dtype(at::kByte));
  };
  auto flight = std::make_unique<Flight>();
  flight->own = inputs;
  flight->own.push_back(make_bytes(machines.count() * received_slot(wide)));
  const int tag = exchange_point_to_point(
      group_,
      [&](int64_t p) {
        return machines.of[p] != here && machines.sums_for(machines.of[p], rank_) == p;
      },
      [&](int64_t p) {
        char* const first = data_of(flight->own.back());
        return Bytes{first + machines.of[p] * received_slot(wide), wide.block(rank_)};
      },
      [](int64_t) { return Bytes{}; }, *flight);
  transfer.write(
      [&](int64_t p, char* theirs) {
        std::vector<StridedCopy> copies;
        each_summed(machines, shards_, p, [&](int64_t q, int64_t begin) {
          char* const to = theirs + begin + machines.below(here, rank_) * shards_.block(q);
          for (size_t i = 0; i < inputs.size(); ++i) {
            copies.push_back(copy_of(
                i, q, part_of(inputs[i], i, q), shards_[i].row(), to + shards_.offset(i, q),
                shards_[i].row(q)));
          }
        });
        run(copies, buffer.device());
      },
      *flight);

  std::vector<std::pair<int64_t, Bytes>> sent;
  std::vector<Sums> sums;
  Tensors alive;  // while the thread reads and writes them
  each_summed(machines, shards_, rank_, [&](int64_t q, int64_t begin) {
    if (machines.of[q] != here && wide.block(q) > 0) {
      alive.push_back(make_bytes(wide.block(q)));
      sent.push_back({q, {data_of(alive.back()), wide.block(q)}});
      sums.emplace_back();
      for (size_t i = 0; i < inputs.size(); ++i) {
        char* const to = sent.back().second.data + wide.offset(i, q);
        add_machine_sum(inputs, i, q, machines, data_of(buffer) + begin, to, sums.back());
      }
    }
  });
  flight->holds = alive;
  for (const at::Tensor& x : inputs) {
    alive.push_back(at::alias(x));  // which Python doesn't know
  }
  transfer.send_later(
      [group = group_, tag, sent = std::move(sent), sums = std::move(sums),
       alive = std::move(alive)] {
        std::vector<Work> works;
        for (size_t n = 0; n < sent.size(); ++n) {
          run(sums[n], at::kCPU);
          works.push_back(launch_send(group, sent[n].first, sent[n].second, tag));
        }
        return works;
      },
      *flight);
  if (waits_at_once()) {
    flight->wait_all();
  }
  attach(buffer, std::move(flight));
  return buffer;
}

void Reshard::land_levels(
    const at::Tensor& buffer,
    const Tensors& results,
    Dtypes wire,
    OptionalDtype reduce_dtype,
    const Machines& machines) const {
  const auto flight = wait_and_take(buffer);
  TORCH_CHECK_VALUE(
      flight && flight->own.size() == results.size() + 1,
      "expected the buffer that the start returned, got one that nothing was sent to");
  RECORD_FUNCTION("deepsp::sum", {});
  const Shards wide = widened(shards_, wire);
  Sums of_machine, sums;
  for (size_t i = 0; i < results.size(); ++i) {
    const int64_t outer = shards_[i].outer, row = results[i].numel() / std::max<int64_t>(outer, 1);
    std::vector<Addend> addends;
    for (int64_t m = 0; m < machines.count(); ++m) {
      char* const sum =
          data_of(flight->own.back()) + m * received_slot(wide) + wide.offset(i, rank_);
      if (m == machines.of[rank_]) {
        add_machine_sum(flight->own, i, rank_, machines, data_of(buffer), sum, of_machine);
      }
      addends.push_back({sum, row});
    }
    add_sum(results[i], outer, row, wide_dtype(wire[i]), reduce_dtype, addends, sums);
  }
  run(of_machine, buffer.device());
  run(sums, buffer.device());
}

}  // namespace deepsp
