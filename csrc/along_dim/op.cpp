// The kernels, the same for CPU and CUDA. One copy at most: none of what travels where the
// dimension is the outermost that counts; else, gathering, what arrived is copied to its rows, and
// scattering, rows are packed for sending. Few long rows travel one by one instead, straight to
// their places.

#include "../collectives/agreement.h"
#include "../collectives/exchange.h"
#include "../exchange/copies.h"
#include "../symints.h"
#include "checks.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <sstream>

namespace deepsp {
namespace {

// Rows that travel one by one: at most so many, each of at least so many bytes on every rank.
constexpr int64_t kRows = 8;
constexpr int64_t kRowBytes = int64_t(64) << 10;

Along concrete(const SymAlong& layout) {
  return {
      layout.outer.guard_int(__FILE__, __LINE__), ints(layout.sizes),
      layout.inner.guard_int(__FILE__, __LINE__), layout.rank};
}

// One exchange on real tensors, in bytes.
struct Transport {
  Along layout;
  int64_t item;
  Group group;

  Transport(const char* op, Along along, const at::Tensor& like, std::string_view group_name)
      : layout(std::move(along)),
        item(item_of(like)),
        group(resolve_group(op, group_name, layout.rank, layout.parts(), like.device(), "sizes")) {}

  bool by_rows() const {
    if (!group.point_to_point || layout.outer == 1 || layout.outer > kRows) {
      return false;
    }
    for (int64_t p = 0; p < layout.parts(); ++p) {
      if (row(p) < kRowBytes) {
        return false;
      }
    }
    return true;
  }

  // In how many messages a block travels.
  int64_t messages() const { return by_rows() ? layout.outer : 1; }

  int64_t row() const { return layout.row() * item; }
  int64_t row(int64_t p) const { return layout.row(p) * item; }
  int64_t begin(int64_t p) const { return layout.begin(p) * layout.inner * item; }
  int64_t block(int64_t p) const { return layout.block(p) * item; }

  // Whether what is gathered lies in the buffer as the whole does.
  bool lands_whole() const {
    return by_rows() || (layout.outer == 1 && (group.point_to_point || even()));
  }
  bool even() const {
    for (int64_t p = 1; p < layout.parts(); ++p) {
      if (layout.sizes[p] != layout.sizes[0]) {
        return false;
      }
    }
    return true;
  }
  // Where rank p's block begins in a buffer that gathers.
  int64_t gathered(int64_t p) const {
    return lands_whole() ? begin(p) : group.point_to_point ? layout.outer * begin(p) : p * slot();
  }
  int64_t slot() const { return layout.slot() * item; }

  // Rows of rank p's block between its place in a whole and a block of its own.
  StridedCopy rows(const char* from, int64_t from_row, char* to, int64_t to_row, int64_t p) const {
    return coalesce(
        {from, to, {1, 1, 1, layout.outer}, {0, 0, 0, from_row}, {0, 0, 0, to_row}, row(p)});
  }
};

void check_ranks_agree(const Transport& t, const at::Tensor& input, int64_t dim) {
  if (!debugging()) {
    return;
  }
  std::ostringstream text;
  std::vector<int64_t> shape = input.sizes().vec();
  dim = wrap_dim(dim, input.dim());
  shape[dim] = t.layout.begin(t.layout.parts());
  text << "input " << input.scalar_type() << " of whole shape " << at::IntArrayRef(shape)
       << ", dim " << dim << " and sizes " << at::IntArrayRef(t.layout.sizes);
  check_agreement(t.group, input.device(), {text.str()});
}

at::Tensor buffer_for(const Along& layout, const at::Tensor& like) {
  const at::Tensor buffer = empty_buffer({layout.parts(), layout.slot()}, like);
  clear_if_watched(buffer);
  return buffer;
}

// ------------------------------------------------------------------- gather

// This rank's part to its place in what arrives.
void place_part(const Transport& t, const at::Tensor& part, const at::Tensor& buffer) {
  const int64_t rank = t.layout.rank;
  const int64_t to_row = t.by_rows() ? t.row() : t.row(rank);
  run({t.rows(data_of(part), t.row(rank), data_of(buffer) + t.gathered(rank), to_row, rank)},
      buffer.device());
}

at::Tensor all_gather_start_kernel(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    std::string_view grad,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype /*reduce_dtype*/) {
  is_partial(grad);
  const Transport t("all_gather", concrete(check_part(input, dim, sizes, rank)), input, group_name);
  check_ranks_agree(t, input, dim);
  const at::Tensor buffer = buffer_for(t.layout, input);
  const at::Tensor part = input.contiguous();
  if (!t.group.point_to_point || t.group.size == 1) {
    place_part(t, part, buffer);
    if (t.group.size > 1 && t.slot() > 0) {
      const at::Tensor bytes = buffer.view({-1}).view(at::kByte);
      const at::Tensor mine = bytes.narrow(0, rank * t.slot(), t.slot());
      launch_into(t.group, buffer, all_gather(t.group, bytes, mine), bytes);
      if (watched() && buffer.is_cpu()) {
        flight_into(buffer)->wait_all();
      }
    }
    return buffer;
  }
  auto flight = std::make_unique<Flight>();
  const int64_t messages = t.messages();
  for (int64_t m = 0; m < messages; ++m) {
    exchange_point_to_point(
        t.group,
        [&](int64_t p) {
          return Bytes{data_of(buffer) + t.gathered(p) + m * t.row(), t.block(p) / messages};
        },
        [&](int64_t) {
          const int64_t bytes = t.block(rank) / messages;
          return Bytes{data_of(part) + m * bytes, bytes};
        },
        *flight);
  }
  flight->holds.push_back(part);
  // While the others travel; or on arrival, where all is copied once more.
  if (t.lands_whole() || watched()) {
    place_part(t, part, buffer);
  } else {
    flight->own.push_back(part);
  }
  if (watched()) {
    flight->wait_all();
  }
  launch_into(buffer, std::move(flight));
  return buffer;
}

std::vector<at::Tensor> all_gather_wait_kernel(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    std::string_view grad,
    int64_t rank,
    std::string_view group_name) {
  is_partial(grad);
  const Transport t(
      "all_gather", concrete(check_buffer(buffer, dim, sizes, shape, rank)), buffer, group_name);
  const auto flight = land(buffer);
  if (t.lands_whole()) {
    return {buffer.view({-1}).narrow(0, 0, t.layout.elements()).view(ints(shape))};
  }
  RECORD_FUNCTION("deepsp::land", {});
  const at::Tensor whole = empty_buffer(ints(shape), buffer);
  std::vector<StridedCopy> copies;
  for (int64_t p = 0; p < t.layout.parts(); ++p) {
    const bool own = p == rank && flight && !flight->own.empty();
    const char* from = own ? data_of(flight->own[0]) : data_of(buffer) + t.gathered(p);
    copies.push_back(t.rows(from, t.row(p), data_of(whole) + t.begin(p), t.row(), p));
  }
  run(copies, whole.device());
  return {whole};
}

// ------------------------------------------------------------------- reduce-scatter

at::Tensor reduce_scatter_start_kernel(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name) {
  check_summed(input.scalar_type(), "input");
  const Transport t(
      "reduce_scatter", concrete(check_entire(input, dim, sizes, rank)), input, group_name);
  check_ranks_agree(t, input, dim);
  const at::Tensor buffer = buffer_for(t.layout, input);
  const at::Tensor whole = input.contiguous();
  const int64_t parts = t.layout.parts();
  const auto pack = [&](int64_t p, char* to) {
    run({t.rows(data_of(whole) + t.begin(p), t.row(), to, t.row(p), p)}, whole.device());
  };
  const auto slot_of = [&](int64_t p) { return data_of(buffer) + p * t.block(rank); };
  if (!t.group.point_to_point || t.group.size == 1) {
    at::Tensor sent = whole.view({-1});
    if (t.layout.outer != 1) {
      RECORD_FUNCTION("deepsp::pack", {});
      sent = at::empty_like(sent);
      for (int64_t p = 0; p < parts; ++p) {
        pack(p, data_of(sent) + t.layout.outer * t.begin(p));
      }
    }
    const at::Tensor received = buffer.view({-1}).narrow(0, 0, parts * t.layout.block(rank));
    if (t.group.size == 1) {
      received.copy_(sent);
    } else if (t.layout.elements() > 0) {
      std::vector<int64_t> counts;
      for (int64_t p = 0; p < parts; ++p) {
        counts.push_back(t.layout.block(p));
      }
      const std::vector<int64_t> mine(parts, t.layout.block(rank));
      launch_into(
          t.group, buffer, exchange_all_to_all(t.group, received, sent, mine, counts), sent);
      if (watched() && buffer.is_cpu()) {
        flight_into(buffer)->wait_all();
      }
    }
    return buffer;
  }
  auto flight = std::make_unique<Flight>();
  const int64_t messages = t.messages();
  const bool packs = t.layout.outer != 1 && messages == 1;
  char* next = nullptr;
  if (packs) {
    const at::Tensor sent = empty_buffer({t.layout.elements() - t.layout.block(rank)}, input);
    flight->holds.push_back(sent);
    next = data_of(sent);
  }
  for (int64_t m = 0; m < messages; ++m) {
    exchange_point_to_point(
        t.group,
        [&](int64_t p) {
          const int64_t bytes = t.block(rank) / messages;
          return Bytes{slot_of(p) + m * bytes, bytes};
        },
        [&](int64_t p) {
          if (!packs) {
            return Bytes{data_of(whole) + t.begin(p) + m * t.row(), t.block(p) / messages};
          }
          RECORD_FUNCTION("deepsp::pack", {});
          const Bytes block{next, t.block(p)};
          pack(p, block.data);
          next += block.size;
          return block;
        },
        *flight);
  }
  flight->own.push_back(whole);  // sent from where it is, and its own rows are read there
  if (watched()) {
    flight->wait_all();
    pack(rank, slot_of(rank));
    flight->own.clear();
  }
  launch_into(buffer, std::move(flight));
  return buffer;
}

at::Tensor reduce_scatter_wait_kernel(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    int64_t rank,
    std::string_view group_name,
    ReduceDtype reduce_dtype) {
  check_summed(buffer.scalar_type(), "buffer");
  if (reduce_dtype) {
    check_summed(*reduce_dtype, "reduce_dtype");
  }
  const Transport t(
      "reduce_scatter", concrete(check_buffer(buffer, dim, sizes, shape, rank)), buffer,
      group_name);
  const auto flight = land(buffer);
  RECORD_FUNCTION("deepsp::sum", {});
  const at::Tensor result = empty_buffer(ints(resized(shape, dim, sizes[rank])), buffer);
  const Float dtype = float_type(buffer.scalar_type());
  StridedSum sum{
      dtype, dtype, reduce_dtype ? float_type(*reduce_dtype) : wide(dtype), data_of(result), {},
      {},    {}};
  const bool own_apart = flight && !flight->own.empty();
  std::vector<int64_t> rows;  // strides between rows, of the result and the sources
  for (int64_t p = 0; p < t.layout.parts(); ++p) {
    const bool own = p == rank && own_apart;
    sum.sources.push_back(
        {own ? data_of(flight->own[0]) + t.begin(rank) : data_of(buffer) + p * t.block(rank), {}});
    rows.push_back(own ? t.layout.row() : t.layout.row(rank));
  }
  std::vector<StridedSum> sums;
  add_sum(std::move(sum), t.layout.outer, t.layout.row(rank), rows, sums);
  run(sums, buffer.device());
  return result;
}

// ------------------------------------------------------------------- scatter

// Nothing travels, but its gradient does: the slots of a buffer all show this rank's block.
at::Tensor scatter_start_kernel(
    const at::Tensor& input,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    int64_t rank,
    std::string_view group_name) {
  const Transport t("scatter", concrete(check_entire(input, dim, sizes, rank)), input, group_name);
  const at::Tensor slot = empty_buffer({t.layout.slot()}, input);
  const std::vector<int64_t> shape = ints(resized(input.sym_sizes(), dim, sizes[rank]));
  const int64_t mine = t.layout.block(rank);
  slot.narrow(0, 0, mine)
      .view(shape)
      .copy_(
          input.narrow(wrap_dim(dim, input.dim()), t.layout.begin(rank), sizes[rank].expect_int()));
  if (watched()) {
    slot.narrow(0, mine, slot.numel() - mine).zero_();
  }
  return slot.view({1, -1}).expand({t.layout.parts(), -1});
}

std::vector<at::Tensor> scatter_wait_kernel(
    const at::Tensor& buffer,
    int64_t dim,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef shape,
    int64_t rank,
    std::string_view group_name) {
  const Transport t(
      "scatter", concrete(check_buffer(buffer, dim, sizes, shape, rank)), buffer, group_name);
  return {buffer.select(0, rank)
              .narrow(0, 0, t.layout.block(rank))
              .view(ints(resized(shape, dim, sizes[rank])))};
}

void register_kernels(torch::Library& m) {
  m.impl("all_gather_start", all_gather_start_kernel);
  m.impl("all_gather_wait", all_gather_wait_kernel);
  m.impl("reduce_scatter_start", reduce_scatter_start_kernel);
  m.impl("reduce_scatter_wait", reduce_scatter_wait_kernel);
  m.impl("scatter_start", scatter_start_kernel);
  m.impl("scatter_wait", scatter_wait_kernel);
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CPU, m) {
  register_kernels(m);
}

#ifdef DEEPSP_CUDA
TORCH_LIBRARY_IMPL(deepsp, CUDA, m) {
  register_kernels(m);
}
#endif

}  // namespace deepsp
