#pragma once
// One exchange: how a rank's blocks get into the buffers of all ranks of its group. What the other
// folders of csrc include.
//
// The transport has three floors. A file includes files of its own floor or of lower ones:
//   agree  transfer, choice, handshake, agreement
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

class Transfer {
 public:
  // elements(p): the size of rank p's buffer, alike on every rank. group: null if nothing is sent.
  // kind: what else must be alike if ranks write into each other's memory.
  Transfer(
      const Group* group,
      const std::function<int64_t(int64_t)>& elements,
      at::IntArrayRef sizes,
      const at::TensorOptions& options,
      uint64_t kind = 0);

  // This rank's buffer, of shape `sizes`.
  const at::Tensor& buffer() const { return buffer_; }
  // Whether this rank writes into the memory of rank p; of any rank; of every other rank.
  bool reaches(int64_t p) const { return mapped_ != nullptr && mapped_->reaches(p); }
  bool reaches_any() const { return mapped_ != nullptr; }
  bool reaches_all() const { return group_ == nullptr || (mapped_ && mapped_->reaches_all()); }

  // Writes this rank's blocks to all ranks that it reaches: write(p, where p's buffer begins). To
  // be called once, also if it reaches none.
  void write(const std::function<void(int64_t, char*)>& write, Flight& flight);
  // exchange_point_to_point, with the other ranks.
  void send(
      const std::function<Bytes(int64_t)>& receive,
      const std::function<Bytes(int64_t)>& send,
      Flight& flight) const;

  // Whether stage() takes the place of write() and send(), between GPUs that reach each other's
  // memory. The copies make this rank's blocks for all ranks, itself included, from `reads`.
  bool staged() const { return staged_ != nullptr; }
  std::unique_ptr<Flight> stage(at::TensorList reads, const AddCopies& add_copies) const;

 private:
  const Group* group_;
  std::shared_ptr<Mapped> mapped_;
  std::shared_ptr<Staged> staged_;
  std::vector<int64_t> bytes_;  // of all ranks' buffers, if some rank writes into them
  at::Tensor buffer_;
  std::optional<Mapped::Exchange> exchange_;  // destroyed before the buffer
};

}  // namespace deepsp
