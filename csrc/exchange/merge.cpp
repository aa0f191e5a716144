// What arrives of a heads_to_seq exchange: merged, or read block by block.

#include <ATen/record_function.h>

#include "engine.h"

namespace deepsp {

// ------------------------------------------------------------------- merging what was received

namespace {

using Parts = std::vector<Part<int64_t>>;

// What was received in the buffers of all chunks.
class Received {
 public:
  Received(
      const std::vector<at::Tensor>& buffers,
      const Layout& plan,
      bool waited,
      const std::vector<int64_t>& paddings)
      : buffers_(buffers), plan_(plan) {
    for (int64_t chunk = 0; chunk < plan.chunks(); ++chunk) {
      flights_.push_back(waited ? nullptr : take_flight(buffers[chunk]));
      places_.emplace_back(
          plan, plan.rank, chunk, flights_.back() ? flights_.back()->order : BlockOrder::packed,
          paddings.empty() ? 0 : paddings[chunk]);
      for (int64_t p = 0; p < plan.ranks(); ++p) {
        parts_.push_back(plan.parts(plan.rank, p, chunk));
      }
    }
  }

  // The block that rank p sent with a chunk.
  const Parts& parts(int64_t chunk, int64_t p) const { return parts_[chunk * plan_.ranks() + p]; }
  // Its part of a tensor of whole heads.
  const Part<int64_t>& part(int64_t chunk, int64_t p, size_t i, size_t level) const {
    const Parts& all = parts(chunk, p);
    return *std::find_if(
        all.begin(), all.end(), [&](const auto& x) { return x.tensor == i && x.level == level; });
  }

  // The heads of a part from `head` on.
  View view(int64_t chunk, int64_t p, const Part<int64_t>& part, int64_t head) const {
    const Flight* flight = flights_[chunk].get();
    if (flight && p == plan_.rank && !flight->own.empty() && flight->own[part.result].defined()) {
      return view_of(flight->own[part.result], part.row, head - part.heads.begin);
    }
    const int64_t dim = plan_.head_dims[part.tensor], item = item_of(buffers_[chunk]);
    const View found = places_[chunk].of(p, part).view(data_of(buffers_[chunk]), dim, item);
    return heads_of(found, part, {head, head}, item);
  }

  void wait(int64_t chunk, int64_t p) const {
    if (flights_[chunk]) {
      flights_[chunk]->wait_receive(p);
    }
  }

  void finish() const {
    for (size_t chunk = 0; chunk < flights_.size(); ++chunk) {
      if (flights_[chunk]) {
        flights_[chunk]->wait_sends();
        mark_waited(buffers_[chunk], *flights_[chunk]);
      }
    }
  }

 private:
  const std::vector<at::Tensor>& buffers_;
  const Layout& plan_;
  std::vector<std::unique_ptr<Flight>> flights_;
  std::vector<BlockPlaces> places_;
  std::vector<Parts> parts_;  // by chunk and rank
};

// Into outputs [B, S_rank, H_i, D_i].
void merge_into(
    const std::vector<at::Tensor>& outputs,
    const std::vector<at::Tensor>& buffers,
    const Layout& plan,
    bool waited,
    const std::vector<int64_t>& paddings = {}) {
  const c10::Device device = buffers[0].device();
  const int64_t item = item_of(buffers[0]), first = plan.first(plan.rank);
  const Received received(buffers, plan, waited, paddings);

  std::vector<std::vector<StridedCopy>> copies(plan.chunks() * plan.ranks());  // and by source
  std::vector<StridedSum> sums;
  const auto add_copy = [&](int64_t chunk, int64_t p, const Part<int64_t>& part, Range heads) {
    const View from = received.view(chunk, p, part, heads.begin);
    const View to = view_of(outputs[part.tensor], part.begin - first, heads.begin);
    if (from.data != to.data) {  // else it was received where it is wanted
      copies[chunk * plan.ranks() + p].push_back(
          copy_of(from, to, Extent(plan, part, heads).n, item));
    }
  };
  // Tensor i of a level, whose block begins with rank `block`.
  const auto add = [&](size_t i, const std::vector<HeadSegment>& segments, size_t level,
                       int64_t block) {
    for (const HeadSegment& segment : segments) {
      if (segment.readers.size() == 1) {
        const int64_t p = block + segment.readers[0], chunk = segment.chunks[0];
        add_copy(chunk, p, received.part(chunk, p, i, level), segment.heads);
        continue;
      }
      std::vector<View> sources;
      Part<int64_t> part{};
      for (size_t r = 0; r < segment.readers.size(); ++r) {
        const int64_t p = block + segment.readers[r], chunk = segment.chunks[r];
        part = received.part(chunk, p, i, level);
        sources.push_back(received.view(chunk, p, part, segment.heads.begin));
      }
      sums.push_back(sum_of(
          sources, view_of(outputs[i], part.begin - first, segment.heads.begin),
          Extent(plan, part, segment.heads), buffers[0].scalar_type()));
    }
  };
  for (size_t i = 0; i < plan.heads.tensors(); ++i) {
    if (plan.levels.empty() && (i > 0 || !plan.cuts_queries())) {
      add(i, plan.heads.segments(i), 0, 0);
    }
    for (size_t n = 0; n < plan.levels.size(); ++n) {
      const auto& level = plan.levels[n];
      const auto block = level.block(plan.rank);
      if (block && (i > 0 || !level.heads.cuts_queries())) {
        add(i, level.heads.segments(i), n, *block);
      }
    }
  }
  // Queries that are cut: each of one rank.
  const auto is_cut = [&](size_t level) {
    return plan.levels.empty() ? plan.cuts_queries() : plan.levels[level].heads.cuts_queries();
  };
  for (int64_t chunk = 0; plan.cuts_queries() && chunk < plan.chunks(); ++chunk) {
    for (int64_t p = 0; p < plan.ranks(); ++p) {
      for (const auto& part : received.parts(chunk, p)) {
        if (part.tensor == 0 && part.tokens() > 0 && is_cut(part.level)) {
          add_copy(chunk, p, part, part.heads);
        }
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
  for (int64_t chunk = 0; chunk < plan.chunks(); ++chunk) {
    // This rank's own block is there while the others are in flight.
    for (int64_t step = 0; step < plan.ranks(); ++step) {
      const int64_t p = (plan.rank - step + plan.ranks()) % plan.ranks();
      received.wait(chunk, p);
      const auto& ready = copies[chunk * plan.ranks() + p];
      if (device.is_cpu()) {
        run(ready, device);
      } else {
        all.insert(all.end(), ready.begin(), ready.end());
      }
    }
  }
  run(all, device);
  run(sums, device);
  received.finish();
}

}  // namespace

std::vector<at::Tensor> merge_by_tokens(
    const std::vector<at::Tensor>& buffers,
    const Layout& plan,
    bool tokens_first,
    const std::vector<int64_t>& paddings) {
  const int64_t item = item_of(buffers[0]);
  const BlockOrder order = order_of(buffers[0]);
  const BlockPlaces places(plan, plan.rank, 0, order);
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < plan.heads.tensors(); ++i) {
    std::vector<int64_t> sizes{
        plan.batch, plan.tokens(), plan.heads.num_heads(i), plan.head_dims[i]};
    if (tokens_first) {
      std::swap(sizes[0], sizes[1]);
    }
    // Where tensor i lies in the buffer as it is wanted, the result is a view of that.
    const bool whole = buffers[0].is_cpu() && is_received_whole(plan, i, order, tokens_first);
    const at::Tensor output =
        whole ? tensor_in(
                    buffers[0], places.of(0, plan.parts(plan.rank, 0, 0)[i]).offset * item, sizes,
                    buffers[0].scalar_type())
              : empty_buffer(sizes, buffers[0]);
    outputs.push_back(tokens_first ? output.transpose(0, 1) : output);
  }
  merge_into(outputs, buffers, plan, /*waited=*/false, paddings);
  return outputs;
}

at::Tensor merge_to_rows(const std::vector<at::Tensor>& buffers, const Layout& plan, bool waited) {
  int64_t columns = 0;
  for (size_t i = 0; i < plan.heads.tensors(); ++i) {
    columns += plan.heads.num_heads(i) * plan.head_dims[i];
  }
  const at::Tensor rows = empty_buffer({plan.tokens(), plan.batch, columns}, buffers[0]);
  std::vector<at::Tensor> outputs;
  int64_t column = 0;
  for (size_t i = 0; i < plan.heads.tensors(); ++i) {
    const int64_t heads = plan.heads.num_heads(i), dim = plan.head_dims[i];
    outputs.push_back(rows.narrow(2, column, heads * dim)
                          .view({plan.tokens(), plan.batch, heads, dim})
                          .transpose(0, 1));
    column += heads * dim;
  }
  merge_into(outputs, buffers, plan, waited);
  return rows.view({plan.tokens() * plan.batch, columns});
}

namespace {

// How far apart rows [tokens x batch] of a part lie.
int64_t row_of(const BlockPlaces::At& at, BlockOrder order) {
  TORCH_CHECK_VALUE(
      order != BlockOrder::batches,
      "expected a buffer whose exchange was started without tokens_first, got one that "
      "heads_to_seq_wait is to merge; leave tokens_first out");
  return at.sequence;
}

// This rank's own block, as if it had been sent.
void place_own(const Flight& flight, const at::Tensor& buffer, const Layout& plan, int64_t chunk) {
  RECORD_FUNCTION("deepsp::own", {});
  std::vector<StridedCopy> copies;
  if (!flight.own.empty()) {
    place_by_tokens(flight.own, plan, chunk, plan.rank, data_of(buffer), flight.order, copies);
  }
  run(copies, buffer.device());
}

at::Tensor block_in(
    const at::Tensor& buffer, const Layout& plan, int64_t chunk, int64_t p, BlockOrder order) {
  const BlockPlaces::At at =
      BlockPlaces(plan, plan.rank, chunk, order).of(p, plan.parts(plan.rank, p, chunk)[0]);
  return buffer.as_strided(
      {plan.tokens() * plan.batch, plan.columns(p, chunk)}, {row_of(at, order), 1},
      buffer.storage_offset() + at.offset);
}

}  // namespace

void settle(const at::Tensor& buffer, const Layout& plan, int64_t chunk) {
  const auto flight = take_flight(buffer);
  if (!flight) {
    return;
  }
  flight->wait_all();
  if (flight->own.empty() && flight->order == BlockOrder::packed && !flight->stream.has_value()) {
    return;
  }
  place_own(*flight, buffer, plan, chunk);
  // Nothing is on its way any more, but a wait must know how the buffer is laid out.
  auto settled = std::make_unique<Flight>();
  settled->order = flight->order;
  settled->together = flight->together;
  settled->stream = flight->stream;
  attach(buffer, std::move(settled));
}

ReceivedBlocks::ReceivedBlocks(const at::Tensor& buffer, const Layout& plan, int64_t chunk)
    : buffer_(buffer), plan_(plan), chunk_(chunk), flight_(take_flight(buffer)) {
  order_ = flight_ ? flight_->order : BlockOrder::packed;
  if (flight_ && !flight_->own.empty()) {
    place_own(*flight_, buffer_, plan_, chunk_);
    flight_->own.clear();
  }
}

void ReceivedBlocks::wait(int64_t p) {
  if (flight_) {
    flight_->wait_receive(p);
  }
}

at::Tensor ReceivedBlocks::part(size_t i, int64_t p, Range heads) const {
  const Part<int64_t> part = plan_.parts(plan_.rank, p, chunk_)[i];
  const BlockPlaces::At at = BlockPlaces(plan_, plan_.rank, chunk_, order_).of(p, part);
  const int64_t dim = plan_.head_dims[i];
  return buffer_.as_strided(
      {plan_.tokens() * plan_.batch, heads.size() * dim}, {row_of(at, order_), 1},
      buffer_.storage_offset() + at.offset + (heads.begin - part.heads.begin) * dim);
}

void ReceivedBlocks::finish() {
  if (flight_) {
    flight_->wait_all();
    mark_waited(buffer_, *flight_);
  }
}

at::Tensor ReceivedBlocks::block(int64_t p) const {
  return block_in(buffer_, plan_, chunk_, p, order_);
}

void ensure_waited(const at::Tensor& buffer, const Layout& plan, int64_t chunk) {
  if (!was_waited(buffer)) {
    ReceivedBlocks(buffer, plan, chunk).finish();
  }
}

at::Tensor received_block(const at::Tensor& buffer, const Layout& plan, int64_t chunk, int64_t p) {
  return block_in(buffer, plan, chunk, p, order_of(buffer));
}

StridedSum sum_of(
    const std::vector<View>& sources, const View& to, const Extent& extent, at::ScalarType scalar) {
  const Float dtype = float_type(scalar);
  StridedSum sum{dtype, dtype, wide(dtype), to.data, {}, {}, {}};
  std::copy_n(extent.n, kSumDims, sum.n);
  std::copy_n(to.stride, kSumDims, sum.dst_stride);
  for (const View& from : sources) {
    SumSource& added = sum.sources.emplace_back(SumSource{from.data, {}});
    std::copy_n(from.stride, kSumDims, added.stride);
  }
  return sum;
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
