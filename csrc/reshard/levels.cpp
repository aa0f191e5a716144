// Sums in two levels, in groups that span machines. The ranks of a machine write what they have for
// any rank into the buffer of one of them, which sums it and sends the sum: so a machine sends each
// block once. Its relay does that, and a start still waits for nobody.
//
//   buffer of rank r    for each rank q that it sums for, itself first: what each rank of its
//                       machine has for q, but for its own, which it reads where it is
//   sums                for each q on another machine; its contributions are one message
//   received            by the other machines: their sums for r; a machine of one rank sends what
//                       it has, in the dtype that it has
//
// The order: the ranks of a machine, then the machines. What crosses has the dtype in which sums
// are kept, float32 or float64, whatever reduce_dtype is.

#include "../common/checks.h"
#include "../common/wide.h"
#include "engine.h"

#include <ATen/ops/alias.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>

namespace deepsp {
namespace {

// What two levels do with the blocks of a scatter.
struct Levels {
  Levels(const Shards& shards, const Machines& machines, Dtypes wire)
      : machines(machines), here(machines.of[shards.rank]), shards(shards), wide(shards) {
    for (size_t i = 0; i < shards.size(); ++i) {
      wide.tensors[i].inner = shards[i].inner / static_cast<int64_t>(c10::elementSize(wire[i])) *
                              static_cast<int64_t>(c10::elementSize(wide_dtype(wire[i])));
    }
  }

  // Whether fewer bytes cross. Alike on all ranks.
  bool pay() const {
    int64_t whole = 0, widened = 0;
    for (size_t i = 0; i < shards.size(); ++i) {
      whole += shards[i].full();
      widened += wide[i].full();
    }
    int64_t saved = 0;
    for (const auto& ranks : machines.ranks) {
      const auto count = static_cast<int64_t>(ranks.size());
      saved += count == 1 ? 0 : count * whole - widened;
    }
    return saved > 0;
  }

  const std::vector<int64_t>& ranks() const { return machines.ranks[here]; }
  int64_t ranks_of(int64_t machine) const {
    return static_cast<int64_t>(machines.ranks[machine].size());
  }

  // Calls visit(q, where its contributions begin) for each rank q that rank p of this machine sums
  // for. Returns the bytes of all.
  template <class Visit>
  int64_t each_summed(int64_t p, const Visit& visit) const {
    int64_t begin = 0;
    const auto add = [&](int64_t q) {
      visit(q, begin);
      begin += ranks_of(here) * shards.block(q);
    };
    add(p);
    for (int64_t q = 0; q < shards.parts(); ++q) {
      if (q != p && machines.sums_for(here, q) == p) {
        add(q);
      }
    }
    return begin;
  }
  int64_t slot(int64_t begin, int64_t q, int64_t rank) const {
    return begin + machines.below(here, rank) * shards.block(q);
  }

  // How a machine's sum travels.
  const Shards& sent(int64_t machine) const { return ranks_of(machine) == 1 ? shards : wide; }
  // Where it arrives, for this rank; that of a machine behind the last: the size of all.
  int64_t arrives(int64_t machine) const {
    int64_t begin = 0;
    for (int64_t m = 0; m < machine; ++m) {
      begin += m == here ? 0 : (sent(m).block(shards.rank) + 15) / 16 * 16;
    }
    return begin;
  }

  const Machines& machines;
  int64_t here;  // this rank's
  const Shards& shards;
  Shards wide;  // the same blocks, as sums
};

// A sum that this rank makes for another one.
struct Sent {
  int64_t to;
  Bytes block;
  std::vector<StridedSum> sums;
};

}  // namespace

std::shared_ptr<const Machines> Reshard::levels(Dtypes wire) const {
  auto machines = at_.point_to_point && shards_.slot() > 0 ? machines_of(group_) : nullptr;
  return machines && Levels(shards_, *machines, wire).pay() ? machines : nullptr;
}

void Reshard::copy_block(const Tensors& inputs, int64_t p, char* to) const {
  std::vector<StridedCopy> copies;
  for (size_t i = 0; i < inputs.size(); ++i) {
    copies.push_back(copy_of(
        i, p, part_of(inputs[i], i, p), shards_[i].row(), to + shards_.offset(i, p),
        shards_[i].row(p)));
  }
  run(copies, inputs[0].device());
}

void Reshard::add_machine_sum(
    const at::Tensor& sum,
    const Tensors& inputs,
    size_t i,
    int64_t p,
    char* slots,
    const std::vector<int64_t>& ranks,
    std::vector<StridedSum>& sums) const {
  const int64_t item = item_of(inputs[i]);
  std::vector<Addend> addends;
  for (const int64_t rank : ranks) {
    const bool own = rank == rank_;
    addends.push_back(
        {own ? part_of(inputs[i], i, p) : slots + shards_.offset(i, p),
         (own ? shards_[i].row() : shards_[i].row(p)) / item});
    slots += shards_.block(p);
  }
  add_sum(
      sum, shards_[i].outer, shards_[i].row(p) / item, inputs[i].scalar_type(), std::nullopt,
      addends, sums);
}

at::Tensor Reshard::launch_levels(
    const Tensors& inputs, const BufferShape& shape, const Machines& machines) const {
  const std::vector<at::ScalarType> wire = dtypes_of(inputs);
  const Levels levels(shards_, machines, wire);
  const bool alone_here = levels.ranks().size() == 1;
  const std::vector<int64_t> sizes = ints(shape.sizes);
  const int64_t elements = c10::multiply_integers(sizes);
  const auto item = static_cast<int64_t>(shape.options.dtype().itemsize());
  Transfer transfer(
      &group_,
      [&](int64_t p) -> int64_t {
        if (machines.of[p] != levels.here) {
          return 0;  // it is sent messages
        }
        const int64_t bytes = levels.each_summed(p, [](int64_t, int64_t) {});
        return std::max(elements, (bytes + item - 1) / item);
      },
      sizes, shape.options, shape.kind);
  const at::Tensor& buffer = transfer.buffer();
  auto flight = std::make_unique<Flight>();
  const auto make_bytes = [&](int64_t size) {
    return empty_buffer({size}, shape.options.dtype(at::kByte));
  };

  const at::Tensor received = make_bytes(levels.arrives(machines.count()));
  const int tag = exchange_point_to_point(
      group_, [&](int64_t p) { return machines.of[p] != levels.here; },
      [&](int64_t p) {
        const int64_t from = machines.of[p];
        return machines.sums_for(from, rank_) == p
                   ? Bytes{data_of(received) + levels.arrives(from), levels.sent(from).block(rank_)}
                   : Bytes{};
      },
      [&](int64_t p) {
        const int64_t size = alone_here ? shards_.block(p) : 0;
        if (size == 0 || (inputs.size() == 1 && shards_[0].outer == 1)) {
          return Bytes{part_of(inputs[0], 0, p), size};
        }
        RECORD_FUNCTION("deepsp::pack", {});
        const at::Tensor block = make_bytes(size);
        flight->holds.push_back(block);
        copy_block(inputs, p, data_of(block));
        return Bytes{data_of(block), size};
      },
      *flight);
  transfer.write(
      [&](int64_t p, char* theirs) {
        levels.each_summed(p, [&](int64_t q, int64_t begin) {
          copy_block(inputs, q, theirs + levels.slot(begin, q, rank_));
        });
      },
      *flight);

  std::vector<Sent> sent;
  Tensors alive;  // while the thread reads and writes them
  levels.each_summed(rank_, [&](int64_t q, int64_t begin) {
    const int64_t size = levels.wide.block(q);
    if (alone_here || q == rank_ || size == 0) {
      return;
    }
    alive.push_back(make_bytes(size));
    char* const to = data_of(alive.back());
    sent.push_back({q, {to, size}, {}});
    for (size_t i = 0; i < inputs.size(); ++i) {
      const at::ScalarType dtype = wide_dtype(wire[i]);
      const int64_t elements = shards_[i].part(q) / item_of(inputs[i]);
      const at::Tensor sum = at::from_blob(to + levels.wide.offset(i, q), {elements}, dtype);
      add_machine_sum(sum, inputs, i, q, data_of(buffer) + begin, levels.ranks(), sent.back().sums);
    }
  });
  if (!sent.empty()) {
    flight->holds.insert(flight->holds.end(), alive.begin(), alive.end());
    for (const at::Tensor& x : inputs) {
      alive.push_back(at::alias(x));
    }
    transfer.relay(
        [group = group_, tag, sent = std::move(sent), alive = std::move(alive)] {
          std::vector<Work> works;
          for (const auto& [to, block, sums] : sent) {
            run(sums, at::kCPU);
            works.push_back(launch_send(group, to, block, tag));
          }
          return works;
        },
        *flight);
  }

  flight->own = inputs;
  flight->own.push_back(received);
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
  const Levels levels(shards_, machines, wire);
  const at::Tensor received = flight->own.back();
  const Tensors inputs(flight->own.begin(), flight->own.end() - 1);
  Tensors alive;
  std::vector<StridedSum> of_machines, sums;
  for (size_t i = 0; i < results.size(); ++i) {
    const at::ScalarType wide = wide_dtype(wire[i]);
    const int64_t row = shards_[i].row(rank_) / static_cast<int64_t>(c10::elementSize(wire[i]));
    const int64_t outer = shards_[i].outer;
    std::vector<Addend> addends;
    for (int64_t m = 0; m < machines.count(); ++m) {
      const char* const arrived =
          data_of(received) + levels.arrives(m) + levels.sent(m).offset(i, rank_);
      const bool is_sum = m != levels.here && (wide == wire[i] || machines.ranks[m].size() > 1);
      if (is_sum) {
        addends.push_back({arrived, row});
        continue;
      }
      const at::Tensor sum = empty_buffer({outer * row}, buffer.options().dtype(wide));
      alive.push_back(sum);
      addends.push_back({data_of(sum), row});
      if (m == levels.here) {
        add_machine_sum(sum, inputs, i, rank_, data_of(buffer), levels.ranks(), of_machines);
      } else {
        add_sum(sum, outer, row, wire[i], std::nullopt, {{arrived, row}}, of_machines);
      }
    }
    add_sum(results[i], outer, row, wide, reduce_dtype, addends, sums);
  }
  run(of_machines, buffer.device());
  run(sums, buffer.device());
}

}  // namespace deepsp
