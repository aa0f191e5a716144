// The exchange of halos, in either direction, for CPU, CUDA and meta tensors. Blocks lie one after
// another, by rank, in what is sent and in what is received, and are sent from where they are.

#include "../common/copies.h"
#include "../transport/agreement.h"
#include "../transport/transfer.h"
#include "checks.h"

#include <ATen/ops/empty.h>

namespace deepsp {
namespace {

at::Tensor exchange(
    const at::Tensor& rows, const Halo<int64_t>& halo, bool home, const Group& group) {
  const int64_t token = rows.size(1), bytes = token * item_of(rows), rank = halo.rank;
  Transfer transfer(
      group.alone ? nullptr : &group, [&](int64_t p) { return halo.buffer(p) * token; },
      {halo.buffer(rank), token}, rows.options());
  const at::Tensor& buffer = transfer.buffer();
  if (group.alone) {
    return buffer;
  }
  auto gives = halo.counts(rank, !home), gets = halo.counts(rank, home);
  const auto send = [&](int64_t p) {
    return Bytes{data_of(rows) + halo.total(rank, !home, p) * bytes, gives[p] * bytes};
  };
  const auto receive = [&](int64_t p) {
    return Bytes{data_of(buffer) + halo.total(rank, home, p) * bytes, gets[p] * bytes};
  };
  // To the block's place in the buffer of rank p.
  const auto add_copy = [&](int64_t p, char* theirs, std::vector<StridedCopy>& copies) {
    if (const Bytes block = send(p); block.size > 0) {
      char* const to = theirs + halo.total(p, home, rank) * bytes;
      copies.push_back(copy_of_bytes(block.data, to, block.size));
    }
  };
  if (group.point_to_point) {
    auto flight = std::make_unique<Flight>();
    flight->holds.push_back(rows);
    transfer.send(receive, send, *flight);
    transfer.write(
        [&](int64_t p, char* theirs) {
          std::vector<StridedCopy> copies;
          add_copy(p, theirs, copies);
          run(copies, rows.device());
        },
        *flight);
    if (waits_at_once()) {
      flight->wait_all();
    }
    attach(buffer, std::move(flight));
  } else if (transfer.staged()) {
    attach(buffer, transfer.stage({rows}, add_copy));
  } else {
    for (int64_t p = 0; p < halo.ranks(); ++p) {
      gives[p] *= token;
      gets[p] *= token;
    }
    const at::Tensor to = unowned(buffer.narrow(0, 0, halo.total(rank, home)).view({-1}));
    attach(group, buffer, launch_all_to_all(group, to, rows.view({-1}), gets, gives), rows);
  }
  return buffer;
}

c10::IValue halo_start(const Given& given) {
  const at::Tensor rows = given["rows"];
  const SymHalo shapes = check_halo(given);
  const bool home = given["home"];
  const c10::SymInt token = rows.dim() > 0 ? rows.sym_size(-1) : 1;
  check_rows(rows, "rows", shapes.total(shapes.rank, !home), token);
  if (rows.is_meta()) {
    return at::empty_symint({shapes.buffer(shapes.rank), token}, rows.options());
  }
  const Halo<int64_t> halo{given["n"], ints(shapes.lens), shapes.rank};
  const Group group = agreed_group(
      home ? "previous_tokens_backward" : "previous_tokens", given["group_name"], halo.rank,
      halo.ranks(), rows.device(), "seq_lens", [&]() -> std::vector<std::string> {
        return {
            to_text("n ", halo.n), to_text("seq_lens ", halo.lens),
            to_text("tokens of ", rows.size(1), " elements"),
            to_text("dtype ", rows.scalar_type())};
      });
  return exchange(rows.contiguous(), halo, home, group);
}

c10::IValue halo_wait(const Given& given) {
  const at::Tensor buffer = given["buffer"];
  const SymHalo halo = check_halo(given);
  const c10::SymInt token = buffer.dim() > 0 ? buffer.sym_size(-1) : 1;
  check_rows(buffer, "buffer", halo.buffer(halo.rank), token);
  if (!buffer.is_meta()) {
    wait_and_take(buffer);
  }
  return buffer.narrow_symint(0, 0, halo.total(halo.rank, given["home"]))
      .clone(at::MemoryFormat::Contiguous);
}

}  // namespace

DEEPSP_KERNELS(m) {
  implement<halo_start>(m, "_halo_start");
  implement<halo_wait>(m, "_halo_wait");
}

}  // namespace deepsp
