#include "mapped_sum.h"

#include "../common/checks.h"
#include "../common/copies.h"
#include "../layout/shards.h"
#include "../transport/departure.h"
#include "sums.h"

#include <ATen/record_function.h>

namespace deepsp {
namespace {

// Each rank's part of a flat tensor.
Shard<int64_t> parts_of(const at::Tensor& flat, const Group& group) {
  return {1, ints(sum_parts(flat.numel(), group.size)), item_of(flat)};
}

}  // namespace

bool sums_by_memory(const Group& group, c10::Device device, at::ScalarType dtype) {
  if (!device.is_cpu() || !at::isFloatingType(dtype) || c10::elementSize(dtype) == 1) {
    return false;
  }
  const auto mapped = mapped_of(group);
  return mapped != nullptr && mapped->reaches_all();
}

std::unique_ptr<Flight> launch_mapped_sum(const Group& group, const at::Tensor& flat) {
  const Shard<int64_t> parts = parts_of(flat, group);
  Departure departure(
      &group, [&](int64_t p) { return group.size * parts.sizes[p]; },
      {group.size, parts.sizes[group.rank]}, flat.options());
  auto flight = std::make_unique<Flight>();
  departure.write(
      [&](int64_t p, char* theirs) {
        const int64_t bytes = parts.part(p);
        if (bytes > 0) {
          const char* const from = data_of(flat) + parts.begin(p) * parts.inner;
          run({copy_of_bytes(from, theirs + group.rank * bytes, bytes)}, flat.device());
        }
      },
      *flight);
  flight->holds.push_back(departure.buffer());
  return flight;
}

at::Tensor land_mapped_sum(const Group& group, const at::Tensor& flat, Flight& flight) {
  const Shard<int64_t> parts = parts_of(flat, group);
  const int64_t rank = group.rank, first = parts.begin(rank), count = parts.sizes[rank];
  const int64_t mine = first * parts.inner, bytes = parts.part(rank);
  const at::Tensor arrived = flight.holds[0];
  flight.wait_all();

  // Ranks that wait for their sums in different orders would mix them up.
  const uint64_t of_exchange = flight.exchange + 1;
  Departure departure(
      &group, [&](int64_t) { return flat.numel(); }, {flat.numel()}, flat.options(), of_exchange);
  const at::Tensor& sum = departure.buffer();
  {
    RECORD_FUNCTION("deepsp::sum", {});
    std::vector<Addend> addends;
    for (int64_t p = 0; p < group.size; ++p) {
      addends.push_back({p == rank ? data_of(flat) + mine : data_of(arrived) + p * bytes, count});
    }
    std::vector<StridedSum> sums;
    add_sum(sum.narrow(0, first, count), 1, count, flat.scalar_type(), std::nullopt, addends, sums);
    run(sums, flat.device());
  }
  Flight back;
  departure.write(
      [&](int64_t, char* theirs) {
        if (bytes > 0) {
          run({copy_of_bytes(data_of(sum) + mine, theirs + mine, bytes)}, flat.device());
        }
      },
      back);
  back.wait_all();
  return sum;
}

}  // namespace deepsp
