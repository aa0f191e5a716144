// The exchange of halos, in either direction, for CPU, CUDA and meta tensors.

#include "../rows/exchange.h"
#include "../transport/agreement.h"
#include "checks.h"

#include <ATen/ops/empty.h>

namespace deepsp {
namespace {

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
  return exchange_rows(rows.contiguous(), halo, home, group);
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
