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

// Where rank p's part of tensor i lies in the buffer: its first element, and how far apart tokens,
// and sequences of the batch, are.
struct Arrival {
  int64_t offset;
  int64_t token;
  int64_t sequence;

  View view(char* buffer, int64_t dim, int64_t item) const {
    return {buffer + offset * item, {token, sequence, dim, 1}};
  }
};

Arrival arrival_of(const Layout& layout, int64_t chunk, int64_t p, size_t i, Order order) {
  const int64_t tokens = layout.seq_lens[layout.rank];
  const int64_t rows = tokens * layout.batch;
  int64_t before = 0;
  if (order == Order::packed) {
    for (int64_t r = 0; r < p; ++r) {
      before += layout.columns(r, chunk);
    }
    const int64_t columns = layout.columns(p, chunk);
    return {rows * before + layout.column(i, p, chunk), layout.batch * columns, columns};
  }
  for (int64_t r = 0; r < layout.parts(); ++r) {
    before += layout.column(i, r, chunk);
  }
  int64_t left = 0, columns = 0;
  for (int64_t r = 0; r < layout.parts(); ++r) {
    left += r < p ? layout.width(i, r, chunk) : 0;
    columns += layout.width(i, r, chunk);
  }
  switch (order) {
    case Order::apart:
      return {
          rows * (before + left), layout.batch * layout.width(i, p, chunk),
          layout.width(i, p, chunk)};
    case Order::batches:
      return {rows * before + left, columns, tokens * columns};
    default:
      return {rows * before + left, layout.batch * columns, columns};
  }
}

// Whether each head of tensor i is one rank's alone.
bool has_one_reader_each(const Layout& layout, size_t i) {
  const auto segments = layout.heads.segments(i);
  return std::all_of(segments.begin(), segments.end(), [](const HeadSegment& segment) {
    return segment.readers.size() == 1;
  });
}

// Whether tensor i arrives as it is wanted, [B, S_rank, H_i, D_i], with tokens first or not.
bool arrives_whole(const Layout& layout, size_t i, Order order, bool tokens_first) {
  const bool by_token = order == Order::rows, by_sequence = order == Order::batches;
  const bool fits = layout.batch == 1 ? by_token || by_sequence
                    : tokens_first    ? by_token
                                      : by_sequence;
  return fits && layout.heads.chunks() == 1 && has_one_reader_each(layout, i);
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

// Sends `inputs`, which travel together, by messages.
void send_by_heads(
    at::TensorList inputs,
    const Layout& layout,
    const Departure& departure,
    const std::function<Bytes(int64_t)>& receive,
    Flight& flight) {
  const int64_t item = item_of(inputs[0]);
  int64_t row_bytes = 0;
  for (const at::Tensor& x : inputs) {
    row_bytes += layout.batch * x.size(2) * x.size(3) * item;
  }
  if (inputs.size() == 1 && lies_by_tokens(inputs[0])) {
    flight.holds.push_back(inputs[0]);
    departure.send(
        receive,
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
  departure.send(
      receive,
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

// The copies of those inputs that are defined to where rank p's buffer has this rank's part of
// them.
void place_by_tokens(
    at::TensorList inputs,
    const Layout& layout,
    int64_t chunk,
    int64_t p,
    char* buffer,
    Order order,
    std::vector<StridedCopy>& copies) {
  Layout theirs = layout;
  theirs.rank = p;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].defined()) {
      const int64_t dim = layout.head_dims[i], item = item_of(inputs[i]);
      copies.push_back(copy_of(
          view_of(inputs[i], layout.token(p), 0),
          arrival_of(theirs, chunk, layout.rank, i, order).view(buffer, dim, item),
          {layout.seq_lens[p], layout.batch, inputs[i].size(2), dim}, item));
    }
  }
}

// Sends messages to the ranks whose memory isn't reached, as those do that reach nobody's; what
// they send is put where the rest lies as it arrives.
void exchange_messages(
    at::TensorList inputs,
    const Layout& layout,
    int64_t chunk,
    const Departure& departure,
    Order order,
    Flight& flight) {
  const at::Tensor& buffer = departure.buffer();
  const int64_t item = item_of(buffer), tokens = layout.seq_lens[layout.rank];
  const bool split = travels_split(layout, item);
  // By message and rank.
  std::vector<std::vector<at::Tensor>> landed(split ? inputs.size() : 1);
  for (size_t m = 0; m < landed.size(); ++m) {
    landed[m].resize(layout.parts());
    for (int64_t p = 0; p < layout.parts(); ++p) {
      if (p != layout.rank && !departure.reaches(p)) {
        const int64_t columns = split ? layout.width(m, p, chunk) : layout.columns(p, chunk);
        landed[m][p] = empty_buffer({tokens * layout.batch * columns}, buffer);
      }
    }
  }
  flight.on_arrival.resize(layout.parts());
  for (int64_t p = 0; p < layout.parts(); ++p) {
    if (!landed[0][p].defined()) {
      continue;
    }
    std::vector<at::Tensor> of_p;
    for (const auto& of_message : landed) {
      of_p.push_back(of_message[p]);
    }
    // Not the buffer itself, which owns the flight.
    flight.on_arrival[p] = [=, to = data_of(buffer)] {
      std::vector<StridedCopy> copies;
      for (size_t i = 0; i < layout.heads.tensors(); ++i) {
        const int64_t dim = layout.head_dims[i];
        const int64_t columns = split ? layout.width(i, p, chunk) : layout.columns(p, chunk);
        const int64_t column = split ? 0 : layout.column(i, p, chunk);
        copies.push_back(copy_of(
            block_view(data_of(of_p[split ? i : 0]), layout.batch, columns, column, dim, item),
            arrival_of(layout, chunk, p, i, order).view(to, dim, item),
            {tokens, layout.batch, layout.heads.range(i, p, chunk).size(), dim}, item));
      }
      run(copies, of_p[0].device());
    };
  }
  for (size_t m = 0; m < landed.size(); ++m) {
    send_by_heads(
        split ? inputs.slice(m, 1) : inputs, layout, departure,
        [&](int64_t p) {
          return Bytes{data_of(landed[m][p]), static_cast<int64_t>(landed[m][p].nbytes())};
        },
        flight);
  }
}

// Writes what ranks get whose memory is reached; the others get and send messages, which are put
// where the rest lies as they arrive.
void write_by_heads(
    at::TensorList inputs,
    const Layout& layout,
    int64_t chunk,
    Departure& departure,
    Order order,
    bool is_expected,
    Flight& flight) {
  const at::Tensor& buffer = departure.buffer();
  if (!departure.reaches_all()) {
    exchange_messages(inputs, layout, chunk, departure, order, flight);
  }
  RECORD_FUNCTION("deepsp::pack", {});
  std::vector<StridedCopy> copies;
  departure.write(
      [&](int64_t p, char* theirs) {
        copies.clear();
        place_by_tokens(inputs, layout, chunk, p, theirs, order, copies);
        run(copies, buffer.device());
      },
      flight);
  // This rank's own, where nothing is expected to be copied once more.
  std::vector<at::Tensor> whole;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool is_whole = arrives_whole(layout, i, order, is_expected && order == Order::rows);
    flight.own.push_back(is_whole ? at::Tensor() : inputs[i]);
    whole.push_back(is_whole ? inputs[i] : at::Tensor());
  }
  copies.clear();
  place_by_tokens(whole, layout, chunk, layout.rank, data_of(buffer), order, copies);
  run(copies, buffer.device());
}

}  // namespace

void launch_to_seq(
    at::TensorList inputs,
    const Layout& layout,
    int64_t chunk,
    const Group* group,
    Departure& departure,
    Order reached,
    bool is_expected) {
  const at::Tensor& buffer = departure.buffer();
  const c10::Device device = inputs[0].device();
  const int64_t item = item_of(inputs[0]);
  char* const arrivals = data_of(buffer);

  if (departure.reaches_any()) {
    auto flight = std::make_unique<Flight>();
    flight->order = reached;
    write_by_heads(inputs, layout, chunk, departure, reached, is_expected, *flight);
    launch_into(buffer, std::move(flight));
    return;
  }
  if (group != nullptr && group->point_to_point) {
    auto flight = std::make_unique<Flight>();
    flight->own = inputs.vec();
    flight->order = travels_split(layout, item) ? Order::apart : Order::packed;
    const auto receive = [&](size_t first) {
      return [&, first](int64_t p) {
        const Arrival at = arrival_of(layout, chunk, p, first, flight->order);
        return Bytes{
            arrivals + at.offset * item,
            layout.seq_lens[layout.rank] * layout.batch * at.sequence * item};
      };
    };
    if (flight->order == Order::apart) {
      for (size_t i = 0; i < inputs.size(); ++i) {
        send_by_heads(inputs.slice(i, 1), layout, departure, receive(i), *flight);
      }
    } else {
      send_by_heads(inputs, layout, departure, receive(0), *flight);
    }
    launch_into(buffer, std::move(flight));
    return;
  }

  if (departure.staged()) {
    auto flight = departure.stage(inputs, [&](const Buffers& buffers) {
      std::vector<StridedCopy> copies;
      for (int64_t p = 0; p < layout.parts(); ++p) {
        place_by_tokens(inputs, layout, chunk, p, buffers[p], reached, copies);
      }
      run(copies, device);
    });
    flight->order = reached;
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
    if (flight && p == layout.rank && !flight->own.empty() && flight->own[i].defined()) {
      return view_of(flight->own[i], layout.token(p), head - first);
    }
    const int64_t dim = layout.head_dims[i];
    View view = arrival_of(layout, chunk, p, i, flight ? flight->order : Order::packed)
                    .view(data_of(buffers[chunk]), dim, item);
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
        const View from = source(i, p, chunk, segment.heads.begin);
        if (from.data != to.data) {  // else it has arrived where it is wanted
          copies[chunk * layout.parts() + p].push_back(copy_of(from, to, n, item));
        }
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

  const bool merges = !sums.empty() || std::any_of(
                                           copies.begin(), copies.end(),
                                           [](const auto& of_block) { return !of_block.empty(); });
  at::RecordFunction merging(at::RecordScope::FUNCTION);
  if (merges && merging.isActive()) {
    merging.before("deepsp::merge");
  }
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
      mark_landed(buffers[chunk], *flights[chunk]);
    }
  }
}

}  // namespace

std::vector<at::Tensor> merge_by_tokens(
    const std::vector<at::Tensor>& buffers, const Layout& layout, bool tokens_first) {
  const int64_t tokens = layout.seq_lens[layout.rank], item = item_of(buffers[0]);
  const Order order = order_of(buffers[0]);
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < layout.heads.tensors(); ++i) {
    const int64_t heads = layout.heads.num_heads(i), dim = layout.head_dims[i];
    std::vector<int64_t> sizes{layout.batch, tokens, heads, dim};
    if (tokens_first) {
      std::swap(sizes[0], sizes[1]);
    }
    // A wait consumes its buffer: what lies in it as it is wanted stays there.
    const int64_t first = arrival_of(layout, 0, 0, i, order).offset * item;
    const bool whole = buffers[0].is_cpu() && arrives_whole(layout, i, order, tokens_first);
    const at::Tensor output = whole ? tensor_in(buffers[0], first, sizes, buffers[0].scalar_type())
                                    : empty_buffer(sizes, buffers[0]);
    outputs.push_back(tokens_first ? output.transpose(0, 1) : output);
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

// How far apart rows [tokens x batch] of a part lie.
int64_t row_of(const Arrival& at, Order order) {
  TORCH_CHECK_VALUE(
      order != Order::batches,
      "expected a buffer whose exchange was started without tokens_first, got one that "
      "heads_to_seq_wait is to merge; leave tokens_first out");
  return at.sequence;
}

// This rank's own block, as if it had travelled.
void place_own(
    const Flight& flight, const at::Tensor& buffer, const Layout& layout, int64_t chunk) {
  RECORD_FUNCTION("deepsp::own", {});
  std::vector<StridedCopy> copies;
  if (!flight.own.empty()) {
    place_by_tokens(flight.own, layout, chunk, layout.rank, data_of(buffer), flight.order, copies);
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
  if (flight->own.empty() && flight->order == Order::packed) {
    return;
  }
  place_own(*flight, buffer, layout, chunk);
  // Nothing is on its way any more, but a wait must know how the buffer is laid out.
  auto settled = std::make_unique<Flight>();
  settled->order = flight->order;
  settled->together = flight->together;
  settled->stream = flight->stream;
  launch_into(buffer, std::move(settled));
}

Arrivals::Arrivals(const at::Tensor& buffer, const Layout& layout, int64_t chunk)
    : buffer_(buffer), layout_(layout), chunk_(chunk), flight_(flight_into(buffer)) {
  order_ = flight_ ? flight_->order : Order::packed;
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
  const Arrival at = arrival_of(layout_, chunk_, p, i, order_);
  const int64_t dim = layout_.head_dims[i];
  const int64_t first = layout_.heads.range(i, p, chunk_).begin;
  return buffer_.as_strided(
      {layout_.seq_lens[layout_.rank] * layout_.batch, heads.size() * dim}, {row_of(at, order_), 1},
      buffer_.storage_offset() + at.offset + (heads.begin - first) * dim);
}

void Arrivals::finish() {
  if (flight_) {
    flight_->wait_all();
    mark_landed(buffer_, *flight_);
  }
}

void ensure_landed(const at::Tensor& buffer, const Layout& layout, int64_t chunk) {
  if (!has_landed(buffer)) {
    Arrivals(buffer, layout, chunk).finish();
  }
}

namespace {

at::Tensor block_in(
    const at::Tensor& buffer, const Layout& layout, int64_t chunk, int64_t p, Order order) {
  const Arrival at = arrival_of(layout, chunk, p, 0, order);
  return buffer.as_strided(
      {layout.seq_lens[layout.rank] * layout.batch, layout.columns(p, chunk)},
      {row_of(at, order), 1}, buffer.storage_offset() + at.offset);
}

}  // namespace

at::Tensor Arrivals::block(int64_t p) const {
  return block_in(buffer_, layout_, chunk_, p, order_);
}

at::Tensor landed_block(const at::Tensor& buffer, const Layout& layout, int64_t chunk, int64_t p) {
  return block_in(buffer, layout, chunk, p, order_of(buffer));
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
