#include <ATen/record_function.h>

#include "engine.h"

namespace deepsp {
namespace {

// From here on, dq, dk and dv of one sequence (B = 1) travel one by one, each
// straight from where attention's backward left it, instead of packed together:
// the packing copy saved is then worth more than two more messages' latency.
// Counted over the whole group, so that every rank decides alike. Measured:
// benchmarks/results/split_border.md.
constexpr int64_t kSplitBytes = int64_t(16) << 20;

// Whether x [B, S, h, D] lies in memory as [S, B, h, D].
bool lies_by_tokens(const at::Tensor& x) {
  int64_t expected = 1;
  for (const int64_t d : {3, 2, 0, 1}) {
    if (x.size(d) != 1 && x.stride(d) != expected) {
      return false;
    }
    expected *= x.size(d);
  }
  return true;
}

// Where rank p's part of tensor i begins in the buffer, and how long a token of
// the block around it is. Packed blocks lie one after another by rank; split,
// each tensor has the blocks of all ranks to itself.
struct Arrival {
  int64_t offset;
  int64_t columns;
};

Arrival arrival_of(const Layout& layout, int64_t chunk, int64_t p, size_t i, bool split) {
  const int64_t rows = layout.seq_lens[layout.rank] * layout.batch;
  int64_t before = 0;
  if (!split) {
    for (int64_t r = 0; r < p; ++r) {
      before += layout.columns(r, chunk);
    }
    return {rows * before + layout.column(i, p, chunk), layout.columns(p, chunk)};
  }
  for (int64_t r = 0; r < layout.parts(); ++r) {
    before += layout.column(i, r, chunk);
    if (r < p) {
      before += layout.heads.range(i, r, chunk).size() * layout.head_dims[i];
    }
  }
  return {rows * before, layout.heads.range(i, p, chunk).size() * layout.head_dims[i]};
}

bool travels_split(const Layout& layout, int64_t item) {
  int64_t per_token = 0;
  for (size_t i = 0; i < layout.heads.tensors(); ++i) {
    per_token += layout.heads.num_heads(i) * layout.head_dims[i];
  }
  return layout.heads.tensors() > 1 && layout.batch == 1 &&
         layout.token(layout.parts()) * per_token * item / layout.heads.chunks() >= kSplitBytes;
}

// The copies that make the block [S_p, B, X_rank] for rank p, of inputs
// [first, last).
void block_by_heads(
    at::TensorList inputs,
    const Layout& layout,
    int64_t p,
    char* block,
    std::vector<StridedCopy>& copies) {
  const int64_t item = item_of(inputs[0]);
  int64_t columns = 0;
  for (const at::Tensor& x : inputs) {
    columns += x.size(2) * x.size(3);
  }
  int64_t column = 0;
  for (const at::Tensor& x : inputs) {
    copies.push_back(copy_of(
        view_of(x, layout.token(p), 0),
        block_view(block, layout.batch, columns, column, x.size(3), item),
        {layout.seq_lens[p], layout.batch, x.size(2), x.size(3)}, item));
    column += x.size(2) * x.size(3);
  }
}

// Sends `inputs`, which travel together, by point to point.
void send_by_heads(
    at::TensorList inputs,
    const Layout& layout,
    const Group& group,
    const std::function<Bytes(int64_t)>& receive,
    Flight& flight) {
  const int64_t item = item_of(inputs[0]);
  int64_t row_bytes = 0;
  for (const at::Tensor& x : inputs) {
    row_bytes += layout.batch * x.size(2) * x.size(3) * item;
  }
  if (inputs.size() == 1 && lies_by_tokens(inputs[0])) {
    flight.holds.push_back(inputs[0]);
    exchange_point_to_point(
        group, receive,
        [&](int64_t p) {
          return Bytes{
              data_of(inputs[0]) + layout.token(p) * row_bytes, layout.seq_lens[p] * row_bytes};
        },
        flight);
    return;
  }
  RECORD_FUNCTION("deepsp::pack", {});
  const int64_t tokens = layout.token(layout.parts()) - layout.seq_lens[layout.rank];
  const at::Tensor sent = empty_buffer({tokens * row_bytes / item}, inputs[0]);
  flight.holds.push_back(sent);
  char* next = data_of(sent);
  std::vector<StridedCopy> copies;
  exchange_point_to_point(
      group, receive,
      [&](int64_t p) {
        const Bytes block{next, layout.seq_lens[p] * row_bytes};
        copies.clear();
        block_by_heads(inputs, layout, p, block.data, copies);
        run(copies, inputs[0].device());
        next += block.size;
        return block;
      },
      flight);
}

}  // namespace

void launch_to_seq(
    at::TensorList inputs,
    const Layout& layout,
    int64_t chunk,
    const Group* group,
    const at::Tensor& buffer) {
  const c10::Device device = inputs[0].device();
  const int64_t item = item_of(inputs[0]);
  char* const arrivals = data_of(buffer);

  if (group != nullptr && group->point_to_point) {
    auto flight = std::make_unique<Flight>();
    flight->own = inputs.vec();
    flight->split = travels_split(layout, item);
    const auto receive = [&](size_t first) {
      return [&, first](int64_t p) {
        const Arrival at = arrival_of(layout, chunk, p, first, flight->split);
        return Bytes{
            arrivals + at.offset * item,
            layout.seq_lens[layout.rank] * layout.batch * at.columns * item};
      };
    };
    if (flight->split) {
      for (size_t i = 0; i < inputs.size(); ++i) {
        send_by_heads(inputs.slice(i, 1), layout, *group, receive(i), *flight);
      }
    } else {
      send_by_heads(inputs, layout, *group, receive(0), *flight);
    }
    launch_into(buffer, std::move(flight));
    return;
  }

  const auto gives = layout.counts_by_heads(chunk);
  const auto gets = layout.counts_by_tokens(chunk);
  const auto given_at = prefix_sums(gives);
  at::Tensor sent;
  if (group != nullptr && inputs.size() == 1 && lies_by_tokens(inputs[0])) {
    sent = inputs[0].as_strided({given_at.back()}, {1});
  } else {
    // With one rank there is nobody to send to: the block is made where it
    // would arrive.
    sent =
        group ? empty_buffer({given_at.back()}, inputs[0]) : buffer.narrow(0, 0, given_at.back());
    RECORD_FUNCTION("deepsp::pack", {});
    std::vector<StridedCopy> copies;
    for (int64_t p = 0; p < layout.parts(); ++p) {
      block_by_heads(inputs, layout, p, data_of(sent) + given_at[p] * item, copies);
    }
    run(copies, device);
  }
  if (group != nullptr) {
    const int64_t got = prefix_sums(gets).back();
    launch_into(
        *group, buffer,
        launch_all_to_all(*group, lent(buffer.narrow(0, 0, got)), sent, gets, gives), sent);
  }
}

namespace {

// Into outputs [B, S_rank, H_i, D_i].
void merge_into(
    const std::vector<at::Tensor>& outputs,
    const std::vector<at::Tensor>& buffers,
    const Layout& layout,
    bool landed) {
  const c10::Device device = buffers[0].device();
  const int64_t item = item_of(buffers[0]);
  const int64_t chunks = layout.heads.chunks();
  const int64_t tokens = layout.seq_lens[layout.rank];

  std::vector<std::unique_ptr<Flight>> flights;
  for (const at::Tensor& buffer : buffers) {
    flights.push_back(landed ? nullptr : flight_into(buffer));
  }

  // Tensor i's heads from `head` on, as rank p sent them in `chunk`.
  const auto source = [&](size_t i, int64_t p, int64_t chunk, int64_t head) -> View {
    const int64_t first = layout.heads.range(i, p, chunk).begin;
    const Flight* flight = flights[chunk].get();
    if (flight && !flight->own.empty() && p == layout.rank) {
      return view_of(flight->own[i], layout.token(p), head - first);
    }
    const int64_t dim = layout.head_dims[i];
    const Arrival at = arrival_of(layout, chunk, p, i, flight && flight->split);
    View view = block_view(
        data_of(buffers[chunk]) + at.offset * item, layout.batch, at.columns, 0, dim, item);
    view.data += (head - first) * dim * item;
    return view;
  };

  std::vector<std::vector<StridedCopy>> copies(chunks * layout.parts());  // by chunk and source
  std::vector<StridedSum> sums;
  for (size_t i = 0; i < layout.heads.tensors(); ++i) {
    const int64_t dim = layout.head_dims[i];
    for (const HeadSegment& segment : layout.heads.segments(i)) {
      const View to = view_of(outputs[i], 0, segment.heads.begin);
      const int64_t n[kCopyDims] = {tokens, layout.batch, segment.heads.size(), dim};
      if (segment.readers.size() == 1) {
        const int64_t p = segment.readers[0];
        const int64_t chunk = segment.chunks[0];
        copies[chunk * layout.parts() + p].push_back(
            copy_of(source(i, p, chunk, segment.heads.begin), to, n, item));
      } else {
        const Float dtype = float_type(buffers[0].scalar_type());
        StridedSum sum{dtype, dtype, wide(dtype), to.data, {}, {}, {}};
        std::copy_n(n, kSumDims, sum.n);
        std::copy_n(to.stride, kSumDims, sum.dst_stride);
        for (size_t r = 0; r < segment.readers.size(); ++r) {
          const View from = source(i, segment.readers[r], segment.chunks[r], segment.heads.begin);
          SumSource& added = sum.sources.emplace_back(SumSource{from.data, {}});
          std::copy_n(from.stride, kSumDims, added.stride);
        }
        sums.push_back(std::move(sum));
      }
    }
  }

  RECORD_FUNCTION("deepsp::merge", {});
  std::vector<StridedCopy> all;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    // This rank's own block is there while the others travel.
    for (int64_t step = 0; step < layout.parts(); ++step) {
      const int64_t p = (layout.rank - step + layout.parts()) % layout.parts();
      if (flights[chunk]) {
        flights[chunk]->wait_receive(p);
      }
      const auto& ready = copies[chunk * layout.parts() + p];
      if (device.is_cpu()) {
        run(ready, device);
      } else {
        all.insert(all.end(), ready.begin(), ready.end());
      }
    }
  }
  run(all, device);
  run(sums, device);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (flights[chunk]) {
      flights[chunk]->wait_sends();
      mark_landed(buffers[chunk], flights[chunk]->together);
    }
  }
}

}  // namespace

std::vector<at::Tensor> merge_by_tokens(
    const std::vector<at::Tensor>& buffers, const Layout& layout, bool tokens_first) {
  const int64_t tokens = layout.seq_lens[layout.rank];
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < layout.heads.tensors(); ++i) {
    const int64_t heads = layout.heads.num_heads(i), dim = layout.head_dims[i];
    outputs.push_back(
        tokens_first ? empty_buffer({tokens, layout.batch, heads, dim}, buffers[0]).transpose(0, 1)
                     : empty_buffer({layout.batch, tokens, heads, dim}, buffers[0]));
  }
  merge_into(outputs, buffers, layout, /*landed=*/false);
  return outputs;
}

at::Tensor merge_to_rows(
    const std::vector<at::Tensor>& buffers, const Layout& layout, bool landed) {
  const int64_t tokens = layout.seq_lens[layout.rank];
  int64_t columns = 0;
  for (size_t i = 0; i < layout.heads.tensors(); ++i) {
    columns += layout.heads.num_heads(i) * layout.head_dims[i];
  }
  const at::Tensor rows = empty_buffer({tokens, layout.batch, columns}, buffers[0]);
  std::vector<at::Tensor> outputs;
  int64_t column = 0;
  for (size_t i = 0; i < layout.heads.tensors(); ++i) {
    const int64_t heads = layout.heads.num_heads(i), dim = layout.head_dims[i];
    outputs.push_back(rows.narrow(2, column, heads * dim)
                          .view({tokens, layout.batch, heads, dim})
                          .transpose(0, 1));
    column += heads * dim;
  }
  merge_into(outputs, buffers, layout, landed);
  return rows.view({tokens * layout.batch, columns});
}

namespace {

// This rank's own block, as if it had travelled.
void place_own(
    const Flight& flight, const at::Tensor& buffer, const Layout& layout, int64_t chunk) {
  RECORD_FUNCTION("deepsp::own", {});
  const int64_t item = item_of(buffer);
  std::vector<StridedCopy> copies;
  for (size_t i = 0; i < flight.own.size(); ++i) {
    const Arrival at = arrival_of(layout, chunk, layout.rank, i, flight.split);
    const int64_t dim = layout.head_dims[i];
    copies.push_back(copy_of(
        view_of(flight.own[i], layout.token(layout.rank), 0),
        block_view(data_of(buffer) + at.offset * item, layout.batch, at.columns, 0, dim, item),
        {layout.seq_lens[layout.rank], layout.batch, flight.own[i].size(2), dim}, item));
  }
  run(copies, buffer.device());
}

}  // namespace

void settle(const at::Tensor& buffer, const Layout& layout, int64_t chunk) {
  const auto flight = flight_into(buffer);
  if (!flight) {
    return;
  }
  flight->wait_all();
  if (flight->own.empty()) {
    return;
  }
  place_own(*flight, buffer, layout, chunk);
  // Nothing is on its way any more, but a wait must know how the buffer is laid out.
  auto settled = std::make_unique<Flight>();
  settled->split = flight->split;
  settled->together = flight->together;
  launch_into(buffer, std::move(settled));
}

Arrivals::Arrivals(const at::Tensor& buffer, const Layout& layout, int64_t chunk)
    : buffer_(buffer), layout_(layout), chunk_(chunk), flight_(flight_into(buffer)) {
  split_ = flight_ && flight_->split;
  if (flight_ && !flight_->own.empty()) {
    place_own(*flight_, buffer_, layout_, chunk_);
    flight_->own.clear();
  }
}

void Arrivals::wait(int64_t p) {
  if (flight_) {
    flight_->wait_receive(p);
  }
}

at::Tensor Arrivals::part(size_t i, int64_t p, Range heads) const {
  const Arrival at = arrival_of(layout_, chunk_, p, i, split_);
  const int64_t dim = layout_.head_dims[i];
  const int64_t first = layout_.heads.range(i, p, chunk_).begin;
  return buffer_.as_strided(
      {layout_.seq_lens[layout_.rank] * layout_.batch, heads.size() * dim}, {at.columns, 1},
      buffer_.storage_offset() + at.offset + (heads.begin - first) * dim);
}

void Arrivals::finish() {
  if (flight_) {
    flight_->wait_all();
    mark_landed(buffer_, flight_->together);
  }
}

void ensure_landed(const at::Tensor& buffer, const Layout& layout, int64_t chunk) {
  if (!has_landed(buffer)) {
    Arrivals(buffer, layout, chunk).finish();
  }
}

at::Tensor block_of(const at::Tensor& buffer, const Layout& layout, int64_t chunk, int64_t p) {
  const Arrival at = arrival_of(layout, chunk, p, 0, false);
  return buffer.as_strided(
      {layout.seq_lens[layout.rank] * layout.batch, at.columns}, {at.columns, 1},
      buffer.storage_offset() + at.offset);
}

at::Tensor sum_of(const std::vector<at::Tensor>& parts) {
  RECORD_FUNCTION("deepsp::sum", {});
  const at::Tensor out = empty_buffer(parts[0].sizes(), parts[0]);
  std::vector<Addend> addends;
  for (const at::Tensor& part : parts) {
    addends.push_back({data_of(part), part.stride(0)});
  }
  std::vector<StridedSum> sums;
  add_sum(out, out.size(0), out.size(1), out.scalar_type(), std::nullopt, addends, sums);
  run(sums, out.device());
  return out;
}

}  // namespace deepsp
