#pragma once
// The mover: one exchange, described by what each rank gives and gets. How blocks get across (not
// at all, into peers' memory, by staged copies, by a collective, or by messages) is decided here.
// What the other folders of csrc include.
//
// The transport has three floors. A file includes files of its own floor or of lower ones:
//   agree  moves, choice, handshake, agreement
//   move   launch, mapped, mailbox, shared_memory, peer_socket, staged, stages
//   wait   attach, pool, flight, errors, c10d, group
// Agree: ranks tell each other what they can and want, and choose how blocks get across. Move:
// messages and collectives, writes into peers' memory, staged copies between GPUs. Wait: buffers,
// and the flights that fill them.

#include "../common/copies.h"
#include "choice.h"
#include "launch.h"

#include <functional>
#include <optional>

namespace deepsp {

// Makes packed blocks: for each rank p, at `block`.
struct PackedBlock {
  int64_t p;
  char* block;
};
using MakeBlocks = std::function<void(c10::ArrayRef<PackedBlock>)>;

// Where blocks of these sizes begin, one after another, and where the last one ends.
inline std::vector<int64_t> prefix_sums(const std::vector<int64_t>& counts) {
  std::vector<int64_t> sums{0};
  for (const int64_t count : counts) {
    sums.push_back(sums.back() + count);
  }
  return sums;
}

// A place in a buffer, in bytes.
struct Span {
  int64_t begin;
  int64_t size;
};

// A block from each rank to each, packed: a message for each pair of ranks.
struct Blocks {
  // Where rank p's block goes in this rank's buffer.
  std::function<Span(int64_t)> receive;
  // The block for rank p, in memory that stays as it is until the wait. Its data is ignored if
  // there is `make`.
  std::function<Bytes(int64_t)> send;
  // Makes blocks in a buffer that is sent; null: they are sent from where they lie.
  MakeBlocks make = nullptr;
};

struct Moves {
  // A collective takes the first one only, whose blocks lie in rank order without gaps.
  std::vector<Blocks> blocks;
  // Appends the copies of all of this rank's blocks for rank p into p's buffer; null: the block
  // of `blocks[0]` is made there, `begin(p)` bytes behind the buffer's beginning.
  AddCopies place = nullptr;
  std::function<int64_t(int64_t)> begin = nullptr;
  // What is sent or copied. A collective sends the first one, dense, unless blocks are made.
  std::vector<at::Tensor> reads = {};
  // The block that this rank sends to all: a collective is an all-gather, of slots of this size.
  at::Tensor slot = {};
};

class Transfer {
 public:
  // elements(p): the size of rank p's buffer, alike on every rank. In a group of one rank nothing
  // is sent. kind: what else must be alike if ranks write into each other's memory.
  Transfer(
      const Group& group,
      const std::function<int64_t(int64_t)>& elements,
      at::IntArrayRef sizes,
      const at::TensorOptions& options,
      uint64_t kind = 0);

  // This rank's buffer, of shape `sizes`.
  const at::Tensor& buffer() const { return buffer_; }
  bool alone() const { return group_ == nullptr; }
  // Whether all ranks, this one included, write into each other's buffers: `place` decides how
  // blocks lie there. Else they are received packed.
  bool places_all() const { return staged_ != nullptr || (mapped_ && mapped_->reaches_all()); }
  // Whether start() also moves this rank's block for itself. If not, that is left to the caller,
  // who can read it from where it is.
  bool moves_own() const { return !alone() && !group_->point_to_point; }

  // Starts the exchange. The flight isn't attached to the buffer yet. To be called once.
  std::unique_ptr<Flight> start(const Moves& moves);
  // Attaches the flight to the buffer; waits for it first if waits_at_once().
  void attach(std::unique_ptr<Flight> flight) const;

 private:
  bool reaches(int64_t p) const { return mapped_ != nullptr && mapped_->reaches(p); }
  // The blocks for all ranks, made one after another in a new buffer.
  at::Tensor make_all(const Blocks& blocks) const;
  void send(const Blocks& blocks, Flight& flight) const;
  void write(const Moves& moves, Flight& flight);
  std::unique_ptr<Flight> stage(const Moves& moves) const;
  std::unique_ptr<Flight> launch_collective(const Moves& moves) const;

  const Group* group_;
  std::shared_ptr<Mapped> mapped_;
  std::shared_ptr<Staged> staged_;
  std::vector<int64_t> bytes_;  // of all ranks' buffers, if some rank writes into them
  at::Tensor buffer_;
  std::optional<Mapped::Exchange> exchange_;  // destroyed before the buffer
};

}  // namespace deepsp
