// What a rank computed for all ranks' tokens, sent to the ranks that hold them, and merged there.

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

bool travels_split(const Layout& plan, int64_t item) {
  int64_t per_token = 0;
  for (size_t i = 0; i < plan.heads.tensors(); ++i) {
    per_token += plan.heads.num_heads(i) * plan.head_dims[i];
  }
  return plan.stacks() && plan.heads.tensors() > 1 && plan.batch == 1 &&
         plan.total() * per_token * item / plan.chunks() >= kSplitBytes;
}

}  // namespace

bool has_one_reader_each(const Layout& plan, size_t i) {
  const auto segments = plan.heads.segments(i);
  return std::all_of(segments.begin(), segments.end(), [](const HeadSegment& segment) {
    return segment.readers.size() == 1;
  });
}

bool arrives_whole(const Layout& plan, size_t i, Order order, bool tokens_first) {
  const bool by_token = order == Order::rows, by_sequence = order == Order::batches;
  const bool fits = plan.batch == 1 ? by_token || by_sequence
                    : tokens_first  ? by_token
                                    : by_sequence;
  return fits && plan.chunks() == 1 && has_one_reader_each(plan, i);
}

// ------------------------------------------------------------------- where blocks lie

BlockPlaces::BlockPlaces(
    const Layout& plan, int64_t source, int64_t chunk, Order order, int64_t padding)
    : plan_(plan), tokens_(plan.seq_lens[source]), order_(order) {
  if (order == Order::packed) {
    before_.push_back(0);
    for (int64_t p = 0; p < plan.ranks(); ++p) {
      const int64_t behind = p == source ? padding : 0;
      before_.push_back(before_.back() + plan.elements(source, p, chunk) + behind);
    }
    return;
  }
  for (size_t i = 0; i < plan.heads.tensors(); ++i) {
    lefts_.push_back({0});
    for (int64_t p = 0; p < plan.ranks(); ++p) {
      lefts_[i].push_back(lefts_[i].back() + plan.width(i, p, chunk));
    }
  }
}

BlockPlaces::At BlockPlaces::of(int64_t p, const Part<int64_t>& part) const {
  if (order_ == Order::packed) {
    return {before_[p] + part.offset + part.column, plan_.batch * part.columns, part.columns};
  }
  int64_t before = 0;  // columns of the tensors before
  for (size_t j = 0; j < part.tensor; ++j) {
    before += lefts_[j].back();
  }
  const int64_t rows = tokens_ * plan_.batch, left = lefts_[part.tensor][p];
  const int64_t columns = lefts_[part.tensor].back();
  switch (order_) {
    case Order::apart: {
      const int64_t width = lefts_[part.tensor][p + 1] - left;
      return {rows * (before + left), plan_.batch * width, width};
    }
    case Order::batches:
      return {rows * before + left, columns, tokens_ * columns};
    default:
      return {rows * before + left, plan_.batch * columns, columns};
  }
}

void place_by_tokens(
    at::TensorList inputs,
    const Layout& plan,
    int64_t chunk,
    int64_t p,
    char* buffer,
    Order order,
    std::vector<StridedCopy>& copies) {
  const BlockPlaces places(plan, p, chunk, order);
  for (const auto& part : plan.parts(p, plan.rank, chunk)) {
    const at::Tensor& x = inputs[part.result];
    if (x.defined()) {
      const int64_t item = item_of(x);
      copies.push_back(copy_of(
          view_of(x, part.row, 0),
          places.of(plan.rank, part).view(buffer, plan.head_dims[part.tensor], item),
          Extent(plan, part).n, item));
    }
  }
}

namespace {

// Sends the blocks of all inputs, or of one of whole heads alone, by messages.
void send_by_heads(
    at::TensorList inputs,
    std::optional<size_t> only,
    const Layout& plan,
    int64_t chunk,
    const Transfer& transfer,
    const std::function<Bytes(int64_t)>& receive,
    Flight& flight) {
  const at::Tensor& x = inputs[only.value_or(0)];
  const int64_t item = item_of(x);
  // Elements of the blocks for the ranks before p.
  const auto before = [&](int64_t p) {
    return only ? plan.first(p) * plan.batch * x.size(2) * x.size(3)
                : plan.elements_before(p, plan.rank, chunk);
  };
  const auto bytes = [&](int64_t p) { return (before(p + 1) - before(p)) * item; };
  if ((only || inputs.size() == 1) && lies_by_tokens(x)) {
    flight.holds.push_back(x);
    transfer.send(
        receive, [&](int64_t p) { return Bytes{data_of(x) + before(p) * item, bytes(p)}; }, flight);
    return;
  }
  RECORD_FUNCTION("deepsp::pack", {});
  const int64_t own = bytes(plan.rank) / item;
  const at::Tensor sent = empty_buffer({before(plan.ranks()) - own}, x);
  flight.holds.push_back(sent);
  char* next = data_of(sent);
  transfer.send(
      receive,
      [&](int64_t p) {
        const Bytes block{next, bytes(p)};
        if (only) {
          const int64_t h = x.size(2), dim = x.size(3);
          const View to{block.data, {plan.batch * h * dim, h * dim, dim, 1}};
          run({copy_of(
                  view_of(x, plan.first(p), 0), to, {plan.seq_lens[p], plan.batch, h, dim}, item)},
              x.device());
        } else {
          pack_by_heads(inputs, plan, chunk, Place{p, block.data});
        }
        next += block.size;
        return block;
      },
      flight);
}

// Exchanges messages with ranks outside shared memory; each block is copied to where the rest lies
// as it arrives.
void exchange_messages(
    at::TensorList inputs,
    const Layout& plan,
    int64_t chunk,
    const Transfer& transfer,
    Order order,
    Flight& flight) {
  const at::Tensor& buffer = transfer.buffer();
  const int64_t item = item_of(buffer);
  const bool split = travels_split(plan, item);
  const BlockPlaces places(plan, plan.rank, chunk, order);
  // By message and rank.
  std::vector<std::vector<at::Tensor>> received(
      split ? inputs.size() : 1, std::vector<at::Tensor>(plan.ranks()));
  flight.on_arrival.resize(plan.ranks());
  for (int64_t p = 0; p < plan.ranks(); ++p) {
    if (p == plan.rank || transfer.reaches(p)) {
      continue;
    }
    std::vector<at::Tensor> holds;
    std::vector<StridedCopy> copies;
    for (Part<int64_t> part : plan.parts(plan.rank, p, chunk)) {
      const int64_t dim = plan.head_dims[part.tensor];
      at::Tensor& block = received[split ? part.tensor : 0][p];
      if (split) {
        part.columns = part.heads.size() * dim;
        part.column = 0;
      }
      if (!block.defined()) {
        block = empty_buffer(
            {split ? part.tokens() * plan.batch * part.columns
                   : plan.elements(plan.rank, p, chunk)},
            buffer);
        holds.push_back(block);
      }
      const Part<int64_t>& at = part;
      copies.push_back(copy_of(
          view_in_block(data_of(block), plan, at, item),
          places.of(p, at).view(data_of(buffer), dim, item), Extent(plan, at).n, item));
    }
    // Not the buffer itself, which owns the flight.
    flight.on_arrival[p] = [holds, copies, device = buffer.device()] { run(copies, device); };
  }
  for (size_t m = 0; m < received.size(); ++m) {
    send_by_heads(
        inputs, split ? std::make_optional(m) : std::nullopt, plan, chunk, transfer,
        [&](int64_t p) {
          return Bytes{data_of(received[m][p]), static_cast<int64_t>(received[m][p].nbytes())};
        },
        flight);
  }
}

// Writes what ranks get whose memory is reached; exchanges messages with the others.
void write_by_heads(
    at::TensorList inputs,
    const Layout& plan,
    int64_t chunk,
    Transfer& transfer,
    Order order,
    bool is_expected,
    Flight& flight) {
  const at::Tensor& buffer = transfer.buffer();
  if (!transfer.reaches_all()) {
    exchange_messages(inputs, plan, chunk, transfer, order, flight);
  }
  RECORD_FUNCTION("deepsp::pack", {});
  std::vector<StridedCopy> copies;
  transfer.write(
      [&](int64_t p, char* theirs) {
        copies.clear();
        place_by_tokens(inputs, plan, chunk, p, theirs, order, copies);
        run(copies, buffer.device());
      },
      flight);
  // This rank's own, where it isn't expected to be copied once more.
  std::vector<at::Tensor> whole;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool is_whole =
        inputs_are_reused() || arrives_whole(plan, i, order, is_expected && order == Order::rows);
    flight.own.push_back(is_whole ? at::Tensor() : inputs[i]);
    whole.push_back(is_whole ? inputs[i] : at::Tensor());
  }
  copies.clear();
  place_by_tokens(whole, plan, chunk, plan.rank, data_of(buffer), order, copies);
  run(copies, buffer.device());
}

}  // namespace

void pack_by_heads(
    at::TensorList inputs, const Layout& plan, int64_t chunk, c10::ArrayRef<Place> places) {
  const int64_t item = item_of(inputs[0]);
  std::vector<StridedCopy> copies;
  for (const auto& [p, block] : places) {
    for (const auto& part : plan.parts(p, plan.rank, chunk)) {
      copies.push_back(copy_of(
          view_of(inputs[part.result], part.row, 0), view_in_block(block, plan, part, item),
          Extent(plan, part).n, item));
    }
  }
  run(copies, inputs[0].device());
}

void launch_to_seq(
    at::TensorList inputs,
    const Layout& plan,
    int64_t chunk,
    const Group* group,
    Transfer& transfer,
    Order reached,
    bool is_expected) {
  const at::Tensor& buffer = transfer.buffer();
  const int64_t item = item_of(inputs[0]);

  if (transfer.reaches_any()) {
    auto flight = std::make_unique<Flight>();
    flight->order = reached;
    write_by_heads(inputs, plan, chunk, transfer, reached, is_expected, *flight);
    attach(buffer, std::move(flight));
    return;
  }
  if (group != nullptr && group->point_to_point) {
    auto flight = std::make_unique<Flight>();
    flight->own = inputs.vec();
    const bool split = travels_split(plan, item);
    flight->order = split ? Order::apart : Order::packed;
    const BlockPlaces places(plan, plan.rank, chunk, flight->order);
    for (size_t m = 0; m < (split ? inputs.size() : 1); ++m) {
      const auto receive = [&](int64_t p) {
        if (!split) {
          return Bytes{
              data_of(buffer) + places.block(p) * item, plan.elements(plan.rank, p, chunk) * item};
        }
        const Part<int64_t> part = plan.parts(plan.rank, p, chunk)[m];
        const BlockPlaces::At at = places.of(p, part);
        return Bytes{data_of(buffer) + at.offset * item, part.tokens() * at.token * item};
      };
      send_by_heads(
          inputs, split ? std::make_optional(m) : std::nullopt, plan, chunk, transfer, receive,
          *flight);
    }
    attach(buffer, std::move(flight));
    return;
  }

  if (transfer.staged()) {
    auto flight = transfer.stage(inputs, [&](int64_t p, char* theirs, auto& copies) {
      place_by_tokens(inputs, plan, chunk, p, theirs, reached, copies);
    });
    flight->order = reached;
    attach(buffer, std::move(flight));
    return;
  }

  const auto gives = plan.counts_by_heads(chunk);
  const auto given_at = prefix_sums(gives);
  at::Tensor sent;
  if (group != nullptr && inputs.size() == 1 && lies_by_tokens(inputs[0])) {
    sent = inputs[0].as_strided({given_at.back()}, {1});
  } else {
    // In a group of one rank nothing is sent: the block is made where it would arrive.
    sent =
        group ? empty_buffer({given_at.back()}, inputs[0]) : buffer.narrow(0, 0, given_at.back());
    RECORD_FUNCTION("deepsp::pack", {});
    std::vector<Place> places;
    for (int64_t p = 0; p < plan.ranks(); ++p) {
      places.push_back({p, data_of(sent) + given_at[p] * item});
    }
    pack_by_heads(inputs, plan, chunk, places);
  }
  if (group != nullptr) {
    const auto gets = plan.counts_by_tokens(chunk);
    attach(
        *group, buffer,
        launch_all_to_all(
            *group, unowned(buffer.narrow(0, 0, prefix_sums(gets).back())), sent, gets, gives),
        sent);
  }
}

}  // namespace deepsp
