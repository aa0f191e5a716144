#include "transport.h"

#include "../collectives/agreement.h"
#include "../collectives/pool.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <sstream>

namespace deepsp {
namespace {

// Smaller ones aren't worth a block of the pool: malloc has them at hand.
constexpr int64_t kPoolBytes = int64_t(256) << 10;

StridedCopy copy_of_bytes(const char* from, char* to, int64_t bytes) {
  return {from, to, {1, 1, 1, 1}, {}, {}, bytes};
}

// This rank's own contributions, to where they would have arrived.
void place_own(const std::vector<at::Tensor>& inputs, const Plan& plan, const at::Tensor& buffer) {
  std::vector<StridedCopy> copies;
  const int64_t rank = plan.layout.rank;
  for (size_t i = 0; i < inputs.size(); ++i) {
    copies.push_back(copy_of_bytes(
        data_of(inputs[i]) + plan.layout.row(i, rank) * plan.layout.row_bytes[i],
        data_of(buffer) + plan.scattered(i, rank), plan.layout.bytes(i, rank)));
  }
  run(copies, buffer.device());
}

}  // namespace

at::Tensor empty_result(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const int64_t bytes =
      c10::multiply_integers(sizes) *
      static_cast<int64_t>(c10::elementSize(c10::typeMetaToScalarType(options.dtype())));
  return options.device().is_cpu() && bytes >= kPoolBytes
             ? pool_empty(sizes, c10::typeMetaToScalarType(options.dtype()))
             : at::empty(sizes, options);
}

Group group_of(
    const char* op, std::string_view name, const ShardLayout<int64_t>& layout, c10::Device device) {
  return resolve_group(op, name, layout.rank, layout.parts(), device, "sizes, for each tensor,");
}

void check_ranks_agree(
    const Group& group,
    const char* name,
    at::TensorList tensors,
    const ShardLayout<int64_t>& layout,
    Dtypes dtypes) {
  if (!debugging()) {
    return;
  }
  std::vector<std::string> arguments;
  for (size_t i = 0; i < tensors.size(); ++i) {
    std::ostringstream text;
    text << name << "s[" << i << "] " << tensors[i].scalar_type() << " with rows of "
         << tensors[i].sizes().slice(1) << ", sizes " << at::IntArrayRef(layout.sizes[i])
         << " and dtype " << dtypes[i];
    arguments.push_back(text.str());
  }
  check_agreement(group, tensors[0].device(), arguments);
}

Plan plan_of(const ShardLayout<int64_t>& layout, const Group& group, c10::Device device) {
  return {layout, group.point_to_point || (group.size == 1 && device.is_cpu())};
}

at::Tensor buffer_for(
    const ShardLayout<int64_t>& layout, at::ScalarType dtype, const at::TensorOptions& options) {
  const int64_t elements = layout.buffer_bytes() / static_cast<int64_t>(c10::elementSize(dtype));
  const at::Tensor buffer = options.device().is_cpu() ? pool_empty({elements}, dtype)
                                                      : at::empty({elements}, options.dtype(dtype));
  clear_if_watched(buffer);
  return buffer;
}

void launch_gather(
    const MakePieces& make, const Plan& plan, const Group& group, const at::Tensor& buffer) {
  RECORD_FUNCTION("deepsp::cast", {});
  char* const base = data_of(buffer);
  const int64_t rank = plan.layout.rank;
  std::vector<Piece> packed;
  for (size_t i = 0; i < plan.layout.tensors(); ++i) {
    if (!plan.in_place[i]) {
      packed.push_back({i, base + plan.gathered(i, rank)});
    }
  }
  if (!plan.point_to_point) {
    make(packed.empty() ? std::vector<Piece>{{0, base + plan.gathered(0, rank)}} : packed);
    const int64_t slot = plan.layout.slot();
    if (group.size > 1 && slot > 0) {
      const at::Tensor bytes = buffer.view(at::kByte);
      launch_into(
          group, buffer, all_gather(group, bytes, bytes.narrow(0, rank * slot, slot)), bytes);
      if (watched() && buffer.is_cpu()) {
        flight_into(buffer)->wait_all();
      }
    }
    return;
  }

  auto flight = std::make_unique<Flight>();
  // Pieces are made when their receives are posted, and sent from where they were made.
  const auto exchange = [&](const std::vector<Piece>& pieces, const auto& bytes_of) {
    if (group.size == 1) {
      return make(pieces);
    }
    bool made = false;
    exchange_point_to_point(
        group, bytes_of,
        [&](int64_t) {
          if (!made) {
            make(pieces);
            made = true;
          }
          return bytes_of(rank);
        },
        *flight);
  };
  if (!packed.empty()) {
    exchange(packed, [&](int64_t p) {
      return Bytes{base + plan.gathered_block(p), plan.packed_bytes(p)};
    });
  }
  for (size_t i = 0; i < plan.layout.tensors(); ++i) {
    if (plan.in_place[i]) {
      exchange({{i, base + plan.gathered(i, rank)}}, [&](int64_t p) {
        return Bytes{base + plan.gathered(i, p), plan.layout.bytes(i, p)};
      });
    }
  }
  if (watched()) {
    flight->wait_all();
  }
  launch_into(buffer, std::move(flight));
}

std::vector<at::Tensor> land_gather(
    const at::Tensor& buffer,
    const Plan& plan,
    const std::vector<std::vector<int64_t>>& shapes,
    Dtypes dtypes,
    bool fresh) {
  RECORD_FUNCTION("deepsp::land", {});
  const ShardLayout<int64_t>& layout = plan.layout;
  const at::Tensor bytes = buffer.view(at::kByte);
  std::vector<at::Tensor> results;
  std::vector<StridedCopy> copies;
  for (size_t i = 0; i < layout.tensors(); ++i) {
    const at::ScalarType dtype = dtypes[i];
    const int64_t rows = layout.row(i, layout.parts());
    if (plan.in_place[i] && !fresh) {
      results.push_back(bytes.narrow(0, plan.gathered(i, 0), rows * layout.row_bytes[i])
                            .view(dtype)
                            .view(shapes[i]));
      continue;
    }
    results.push_back(empty_result(shapes[i], buffer.options().dtype(dtype)));
    char* to = data_of(results.back());
    for (int64_t p = 0; p < layout.parts(); ++p) {
      copies.push_back(
          copy_of_bytes(data_of(buffer) + plan.gathered(i, p), to, layout.bytes(i, p)));
      to += layout.bytes(i, p);
    }
  }
  run(copies, buffer.device());
  return results;
}

void launch_scatter(
    const std::vector<at::Tensor>& inputs,
    const Plan& plan,
    const Group& group,
    const at::Tensor& buffer) {
  const ShardLayout<int64_t>& layout = plan.layout;
  char* const base = data_of(buffer);
  const auto rows_for = [&](size_t i, int64_t p) {
    return Bytes{data_of(inputs[i]) + layout.row(i, p) * layout.row_bytes[i], layout.bytes(i, p)};
  };
  // Rank p's packed block, at `to`.
  const auto add_block = [&](int64_t p, char* to, std::vector<StridedCopy>& copies) {
    for (size_t i = 0; i < layout.tensors(); ++i) {
      if (!plan.in_place[i]) {
        copies.push_back(copy_of_bytes(rows_for(i, p).data, to, layout.bytes(i, p)));
        to += layout.piece(i, p);
      }
    }
  };

  if (!plan.point_to_point) {
    if (group.size == 1) {
      return place_own(inputs, plan, buffer);
    }
    const int64_t slot = layout.slot();
    if (slot == 0) {
      return;
    }
    at::Tensor sent = inputs[0].view({-1});
    if (plan.any_packed()) {
      RECORD_FUNCTION("deepsp::pack", {});
      sent = at::empty_like(buffer);
      clear_if_watched(sent);
      std::vector<StridedCopy> copies;
      for (int64_t p = 0; p < group.size; ++p) {
        add_block(p, data_of(sent) + p * slot, copies);
      }
      run(copies, buffer.device());
    }
    const std::vector<int64_t> counts(
        group.size, slot / static_cast<int64_t>(buffer.element_size()));
    launch_into(group, buffer, exchange_all_to_all(group, buffer, sent, counts, counts), sent);
    if (watched() && buffer.is_cpu()) {
      flight_into(buffer)->wait_all();
    }
    return;
  }

  auto flight = std::make_unique<Flight>();
  if (group.size > 1 && plan.any_packed()) {
    RECORD_FUNCTION("deepsp::pack", {});
    int64_t bytes = 0;
    for (int64_t p = 0; p < group.size; ++p) {
      bytes += p == group.rank ? 0 : plan.packed_bytes(p);
    }
    const at::Tensor sent = pool_empty({bytes}, at::kByte);
    clear_if_watched(sent);
    flight->holds.push_back(sent);
    char* next = data_of(sent);
    exchange_point_to_point(
        group,
        [&](int64_t p) {
          return Bytes{base + plan.scattered_block(p), plan.packed_bytes(group.rank)};
        },
        [&](int64_t p) {
          const Bytes block{next, plan.packed_bytes(p)};
          std::vector<StridedCopy> copies;
          add_block(p, block.data, copies);
          run(copies, buffer.device());
          next += block.size;
          return block;
        },
        *flight);
  }
  for (size_t i = 0; i < layout.tensors(); ++i) {
    if (group.size > 1 && plan.in_place[i]) {
      exchange_point_to_point(
          group,
          [&](int64_t p) {
            return Bytes{base + plan.scattered(i, p), layout.bytes(i, group.rank)};
          },
          [&](int64_t p) { return rows_for(i, p); }, *flight);
    }
  }
  // They are sent from where they are, and this rank's own rows are read there.
  flight->own = inputs;
  if (watched()) {
    flight->wait_all();
    place_own(inputs, plan, buffer);
    flight->own.clear();
  }
  launch_into(buffer, std::move(flight));
}

}  // namespace deepsp
