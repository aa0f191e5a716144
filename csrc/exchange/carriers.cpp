#include "carriers.h"

#include "engine.h"

#include <ATen/ops/alias.h>

#include <map>

namespace deepsp {
namespace {

// The readers of a machine with one chunk.
using Readers = std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>>;

Readers by_machine_and_chunk(const HeadSegment& segment, const Machines& machines) {
  Readers found;
  for (size_t r = 0; r < segment.readers.size(); ++r) {
    found[{machines.of[segment.readers[r]], segment.chunks[r]}].push_back(segment.readers[r]);
  }
  return found;
}

Bytes bytes_of(const at::Tensor& message) {
  return {data_of(message), static_cast<int64_t>(message.nbytes())};
}

}  // namespace

Carriers::Carriers(const Layout& plan, int64_t chunk, std::shared_ptr<const Machines> machines)
    : plan_(plan), chunk_(chunk), machines_(std::move(machines)) {
  if (machines_ == nullptr || machines_->count() == 1) {
    return;
  }
  shared_.resize(machines_->count());
  for (size_t i = 1; plan.levels.empty() && i < plan.heads.tensors(); ++i) {
    for (const HeadSegment& segment : plan.heads.segments(i)) {
      for (auto& [key, readers] : by_machine_and_chunk(segment, *machines_)) {
        if (key.second == chunk && readers.size() > 1) {
          shared_[key.first].push_back({i, segment.heads, readers});
          any_ = true;
        }
      }
    }
  }
}

std::vector<Crossing> Carriers::crossing(int64_t source, int64_t owner) const {
  std::vector<Crossing> found;
  int64_t offset = 0;
  for (const auto& part : plan_.parts(source, owner, chunk_)) {
    const auto add = [&](Range heads, const SharedHeads* shared) {
      if (heads.size() > 0 && part.tokens() > 0) {
        found.push_back({part, heads, offset, shared});
        offset += part.tokens() * plan_.batch * heads.size() * plan_.head_dims[part.tensor];
      }
    };
    int64_t next = part.heads.begin;
    for (const SharedHeads& shared : this->shared(owner)) {
      const auto& readers = shared.readers;
      if (shared.tensor == part.tensor && std::count(readers.begin(), readers.end(), owner) > 0) {
        add({next, shared.heads.begin}, nullptr);
        if (shared.carrier(source) == owner) {
          add(shared.heads, &shared);
        }
        next = shared.heads.end;
      }
    }
    add({next, part.heads.end}, nullptr);
  }
  return found;
}

at::Tensor Carriers::empty_message(
    const std::vector<Crossing>& crossing, const at::Tensor& like) const {
  int64_t elements = 0;
  for (const Crossing& x : crossing) {
    elements += x.part.tokens() * plan_.batch * x.heads.size() * plan_.head_dims[x.part.tensor];
  }
  return empty_buffer({elements}, like);
}

View Carriers::in_message(char* message, const Crossing& x, int64_t item) const {
  const int64_t dim = plan_.head_dims[x.part.tensor], columns = x.heads.size() * dim;
  return {message + x.offset * item, {plan_.batch * columns, columns, dim, 1}};
}

Part<int64_t> Carriers::part_of(const SharedHeads& shared, int64_t source, int64_t owner) const {
  const auto parts = plan_.parts(source, owner, chunk_);
  return *std::find_if(
      parts.begin(), parts.end(), [&](const auto& x) { return x.tensor == shared.tensor; });
}

Bytes Carriers::message(
    char* block,
    int64_t source,
    int64_t owner,
    const at::Tensor& like,
    std::vector<at::Tensor>& holds,
    std::vector<StridedCopy>& copies) const {
  const int64_t item = item_of(like);
  const auto crossing = this->crossing(source, owner);
  holds.push_back(empty_message(crossing, like));
  const Bytes message = bytes_of(holds.back());
  for (const Crossing& x : crossing) {
    View from = heads_of(view_in_block(block, plan_, x.part, item), x.part, x.heads, item);
    View to = in_message(message.data, x, item);
    if (owner == plan_.rank) {
      std::swap(from, to);
    }
    copies.push_back(copy_of(from, to, Extent(plan_, x.part, x.heads).n, item));
  }
  return message;
}

void Carriers::add_relays(
    const std::function<char*(int64_t, int64_t)>& block,
    int64_t item,
    std::vector<std::vector<StridedCopy>>& copies) const {
  for (int64_t source = 0; source < plan_.ranks(); ++source) {
    for (const SharedHeads& shared : this->shared(plan_.rank)) {
      if (together(source, plan_.rank) || shared.carrier(source) != plan_.rank) {
        continue;
      }
      const auto view = [&](int64_t owner) {
        const auto part = part_of(shared, source, owner);
        return heads_of(
            view_in_block(block(source, owner), plan_, part, item), part, shared.heads, item);
      };
      const Extent extent(plan_, part_of(shared, source, plan_.rank), shared.heads);
      for (const int64_t reader : shared.readers) {
        if (reader != plan_.rank) {
          copies[source].push_back(copy_of(view(plan_.rank), view(reader), extent.n, item));
        }
      }
    }
  }
}

std::vector<int64_t> Carriers::each_slot(const Visit& visit) const {
  std::vector<int64_t> next(plan_.ranks());
  for (int64_t source = 0; any_ && source < plan_.ranks(); ++source) {
    for (const SharedHeads& shared : this->shared(plan_.rank)) {
      const int64_t carrier = shared.carrier(source);
      for (const int64_t reader : shared.readers) {
        if (reader != carrier && !together(source, plan_.rank)) {
          visit(carrier, source, shared, reader, next[carrier]);
          next[carrier] += plan_.seq_lens[source] * plan_.batch * shared.heads.size() *
                           plan_.head_dims[shared.tensor];
        }
      }
    }
  }
  return next;
}

CarriedSums::CarriedSums(
    at::TensorList inputs,
    const Layout& plan,
    int64_t chunk,
    const Carriers& carriers,
    const at::Tensor& buffer)
    : inputs_(inputs),
      plan_(plan),
      chunk_(chunk),
      carriers_(carriers),
      buffer_(buffer),
      item_(item_of(buffer)),
      to_others_(plan.ranks()),
      from_others_(plan.ranks()) {
  carriers.each_slot([&](int64_t carrier, int64_t source, const SharedHeads& shared, int64_t reader,
                         int64_t offset) {
    const Slot slot{source, &shared, reader, offset};
    if (reader == plan.rank) {
      to_others_[carrier].push_back(slot);
    } else if (carrier == plan.rank) {
      from_others_[source].push_back(slot);
    }
  });
}

void CarriedSums::exchange(
    const Group& group, const Transfer& transfer, Order order, Flight& flight) {
  const BlockPlaces places(plan_, plan_.rank, chunk_, order);
  flight.on_arrival.resize(plan_.ranks());
  tag_ = exchange_point_to_point(
      group, [&](int64_t p) { return !transfer.reaches(p); },
      [&](int64_t p) {
        const auto crossing = carriers_.crossing(plan_.rank, p);
        const at::Tensor message = carriers_.empty_message(crossing, buffer_);
        std::vector<StridedCopy> copies;
        for (const Crossing& x : crossing) {
          const View whole =
              places.of(p, x.part).view(data_of(buffer_), plan_.head_dims[x.part.tensor], item_);
          copies.push_back(copy_of(
              carriers_.in_message(data_of(message), x, item_),
              heads_of(whole, x.part, x.heads, item_), Extent(plan_, x.part, x.heads).n, item_));
        }
        // Not the buffer itself, which owns the flight.
        flight.on_arrival[p] = [message, copies] { run(copies, at::kCPU); };
        return bytes_of(message);
      },
      [&](int64_t p) {
        const auto crossing = carriers_.crossing(p, plan_.rank);
        const at::Tensor message = carriers_.empty_message(crossing, buffer_);
        flight.holds.push_back(message);
        std::vector<StridedCopy> copies;
        std::vector<StridedSum> sums;
        for (const Crossing& x : crossing) {
          const View to = carriers_.in_message(data_of(message), x, item_);
          const Extent extent(plan_, x.part, x.heads);
          const View mine = own(x.part, x.heads);
          if (x.shared == nullptr) {
            copies.push_back(copy_of(mine, to, extent.n, item_));
            continue;
          }
          std::vector<View> sources;
          for (const int64_t reader : x.shared->readers) {
            sources.push_back(reader == plan_.rank ? mine : slot_of(x, p, reader));
          }
          sums.push_back(sum_of(sources, to, extent, buffer_.scalar_type()));
        }
        run(copies, at::kCPU);
        if (sums.empty()) {
          return bytes_of(message);
        }
        later_.push_back({p, bytes_of(message), std::move(sums)});
        return Bytes{};
      },
      flight);
}

void CarriedSums::add_slots(int64_t p, char* buffer, std::vector<StridedCopy>& copies) const {
  for (const auto& [source, shared, reader, offset] : to_others_[p]) {
    const Crossing x{carriers_.part_of(*shared, source, plan_.rank), shared->heads, offset, shared};
    copies.push_back(copy_of(
        own(x.part, x.heads), carriers_.in_message(slots_in(p, buffer), x, item_),
        Extent(plan_, x.part, x.heads).n, item_));
  }
}

void CarriedSums::send_later(const Group& group, const Transfer& transfer, Flight& flight) {
  if (later_.empty()) {
    return;
  }
  Tensors alive = flight.holds;
  for (const at::Tensor& x : inputs_) {
    alive.push_back(at::alias(x));  // which Python doesn't know
  }
  transfer.send_later(
      [group, tag = tag_, later = std::move(later_), alive = std::move(alive)] {
        std::vector<Work> works;
        for (const auto& [target, message, sums] : later) {
          run(sums, at::kCPU);
          works.push_back(launch_send(group, target, message, tag));
        }
        return works;
      },
      flight);
}

char* CarriedSums::slots_in(int64_t p, char* buffer) const {
  return buffer + plan_.buffer_elements(p, chunk_, plan_.columns_by_tokens(chunk_)) * item_;
}

View CarriedSums::own(const Part<int64_t>& part, Range heads) const {
  return heads_of(view_of(inputs_[part.result], part.row, 0), part, heads, item_);
}

View CarriedSums::slot_of(Crossing x, int64_t source, int64_t reader) const {
  for (const Slot& slot : from_others_[source]) {
    if (slot.shared == x.shared && slot.reader == reader) {
      x.offset = slot.offset;
    }
  }
  return carriers_.in_message(slots_in(plan_.rank, data_of(buffer_)), x, item_);
}

std::vector<HeadSegment> segments_for(const Layout& plan, size_t i, const Machines* machines) {
  std::vector<HeadSegment> segments = plan.heads.segments(i);
  if (machines == nullptr || machines->count() == 1) {
    return segments;
  }
  for (HeadSegment& segment : segments) {
    const Readers all = by_machine_and_chunk(segment, *machines);
    HeadSegment kept{segment.heads, {}, {}};
    for (size_t r = 0; r < segment.readers.size(); ++r) {
      const int64_t reader = segment.readers[r], chunk = segment.chunks[r];
      const auto& sharing = all.at({machines->of[reader], chunk});
      if (machines->of[reader] == machines->of[plan.rank] ||
          carrier_of(sharing, plan.rank) == reader) {
        kept.readers.push_back(reader);
        kept.chunks.push_back(chunk);
      }
    }
    segment = std::move(kept);
  }
  return segments;
}

}  // namespace deepsp
