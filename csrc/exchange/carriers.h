#pragma once
// Groups that span machines: heads that several ranks of a machine read cross to that machine once.
// For each rank that holds tokens, one of the readers is their carrier: it receives them and relays
// them to the others, and on the way back it sends the sum of what all have for them.

#include "../transport/transfer.h"
#include "checks.h"

#include <functional>
#include <memory>

namespace deepsp {

// The readers of a machine take turns.
inline int64_t carrier_of(const std::vector<int64_t>& readers, int64_t source) {
  return readers[source % readers.size()];
}

// Heads that several ranks of one machine read with one chunk.
struct SharedHeads {
  size_t tensor;
  Range heads;
  std::vector<int64_t> readers;  // ascending

  int64_t carrier(int64_t source) const { return carrier_of(readers, source); }
};

// What a message has of a block, and where: [tokens, B, heads, D], contiguous.
struct Crossing {
  Part<int64_t> part;         // of the block
  Range heads;                // some of the part's
  int64_t offset;             // in the message, in elements
  const SharedHeads* shared;  // null: only the owner reads them
};

class Carriers {
 public:
  // machines: null if the group's messages go by a collective.
  Carriers(const Layout& plan, int64_t chunk, std::shared_ptr<const Machines> machines);

  // Whether anything crosses once that several ranks read.
  bool any() const { return any_; }
  // What the ranks of `owner`'s machine share.
  const std::vector<SharedHeads>& shared(int64_t owner) const {
    return shared_[machines_->of[owner]];
  }
  const std::shared_ptr<const Machines>& machines() const { return machines_; }
  bool together(int64_t p, int64_t q) const { return machines_->of[p] == machines_->of[q]; }

  // The message between a source of tokens and an owner of heads on another machine.
  std::vector<Crossing> crossing(int64_t source, int64_t owner) const;
  at::Tensor empty_message(const std::vector<Crossing>& crossing, const at::Tensor& like) const;
  View in_message(char* message, const Crossing& x, int64_t item) const;
  // The part of their block that has the heads.
  Part<int64_t> part_of(const SharedHeads& shared, int64_t source, int64_t owner) const;

  // seq_to_heads: the message, kept in `holds`, between a source's tokens and an owner, one of
  // which is this rank; and the copies from the block that it belongs to, or to it.
  Bytes message(
      char* block,
      int64_t source,
      int64_t owner,
      const at::Tensor& like,
      std::vector<at::Tensor>& holds,
      std::vector<StridedCopy>& copies) const;
  // The copies, by source, of what this rank carries: to the others that read it.
  // block(source, owner): where that lies.
  void add_relays(
      const std::function<char*(int64_t, int64_t)>& block,
      int64_t item,
      std::vector<std::vector<StridedCopy>>& copies) const;

  // heads_to_seq: readers put what they have for a source of tokens into slots behind the buffer
  // of its carrier. Calls visit(carrier, source, heads, reader, elements before the slot) for each
  // of this machine. Returns the elements of all slots, by carrier.
  using Visit = std::function<void(int64_t, int64_t, const SharedHeads&, int64_t, int64_t)>;
  std::vector<int64_t> each_slot(const Visit& visit) const;

 private:
  const Layout& plan_;
  int64_t chunk_;
  std::shared_ptr<const Machines> machines_;
  std::vector<std::vector<SharedHeads>> shared_;  // by machine
  bool any_ = false;
};

// heads_to_seq: the carriers' sums, and all messages beside them.
class CarriedSums {
 public:
  CarriedSums(
      at::TensorList inputs,
      const Layout& plan,
      int64_t chunk,
      const Carriers& carriers,
      const at::Tensor& buffer);

  // The exchange of messages. Those without sums are sent at once.
  void exchange(const Group& group, const Transfer& transfer, Order order, Flight& flight);
  // The copies of what this rank has into the slots behind rank p's buffer.
  void add_slots(int64_t p, char* buffer, std::vector<StridedCopy>& copies) const;
  // When all ranks of the machine have written to their slots, a thread sums and sends.
  void send_later(const Group& group, const Transfer& transfer, Flight& flight);

 private:
  struct Slot {
    int64_t source;
    const SharedHeads* shared;
    int64_t reader;
    int64_t offset;
  };
  struct Later {
    int64_t target;
    Bytes message;
    std::vector<StridedSum> sums;
  };

  char* slots_in(int64_t p, char* buffer) const;
  View own(const Part<int64_t>& part, Range heads) const;
  View slot_of(Crossing x, int64_t source, int64_t reader) const;

  at::TensorList inputs_;
  const Layout& plan_;
  int64_t chunk_;
  const Carriers& carriers_;
  const at::Tensor& buffer_;
  int64_t item_;
  std::vector<std::vector<Slot>> to_others_;    // of this rank, by carrier
  std::vector<std::vector<Slot>> from_others_;  // of what this rank carries, by source
  int tag_ = 0;
  std::vector<Later> later_;
};

// The runs of tensor i's heads, with those readers from which this rank receives something for its
// tokens: of other machines, the carriers. machines: null if each reader sends what it has.
std::vector<HeadSegment> segments_for(const Layout& plan, size_t i, const Machines* machines);

}  // namespace deepsp
