#include "mapped_sum.h"

#include "../common/copies.h"
#include "../transport/departure.h"
#include "sums.h"

#include <ATen/record_function.h>

#include <algorithm>

namespace deepsp {
namespace {

// Each rank's part of a flat tensor, in elements: where it begins, and how long it is.
struct Parts {
  std::vector<int64_t> begin, size;

  Parts(int64_t elements, int64_t ranks) {
    int64_t at = 0;
    for (const c10::SymInt& part : sum_parts(elements, ranks)) {
      begin.push_back(at);
      size.push_back(part.expect_int());
      at += size.back();
    }
  }
};

}  // namespace

bool sums_by_memory(const Group& group, c10::Device device, at::ScalarType dtype) {
  if (!device.is_cpu() || !at::isFloatingType(dtype) || c10::elementSize(dtype) == 1) {
    return false;
  }
  const auto mapped = mapped_of(group);
  return mapped != nullptr && mapped->reaches_all();
}

std::unique_ptr<Flight> launch_mapped_sum(const Group& group, const at::Tensor& flat) {
  const Parts parts(flat.numel(), group.size);
  const int64_t item = item_of(flat);
  Departure departure(
      &group, [&](int64_t p) { return group.size * parts.size[p]; },
      {group.size, parts.size[group.rank]}, flat.options());
  auto flight = std::make_unique<Flight>();
  departure.write(
      [&](int64_t p, char* theirs) {
        const int64_t bytes = parts.size[p] * item;
        if (bytes > 0) {
          const char* const from = data_of(flat) + parts.begin[p] * item;
          run({copy_of_bytes(from, theirs + group.rank * bytes, bytes)}, flat.device());
        }
      },
      *flight);
  flight->holds.push_back(departure.buffer());
  return flight;
}

at::Tensor land_mapped_sum(const Group& group, const at::Tensor& flat, Flight& flight) {
  const Parts parts(flat.numel(), group.size);
  const int64_t item = item_of(flat), rank = group.rank;
  const int64_t mine = parts.begin[rank] * item, bytes = parts.size[rank] * item;
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
      addends.push_back(
          {p == rank ? data_of(flat) + mine : data_of(arrived) + p * bytes, parts.size[rank]});
    }
    std::vector<StridedSum> sums;
    add_sum(
        sum.narrow(0, parts.begin[rank], parts.size[rank]), 1, parts.size[rank], flat.scalar_type(),
        std::nullopt, addends, sums);
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
