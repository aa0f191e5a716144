#pragma once
// How the blocks of one exchange leave: straight into the memory of the ranks that are reached so,
// by messages to the others.

#include "choice.h"
#include "launch.h"

#include <functional>
#include <optional>

namespace deepsp {

class Departure {
 public:
  // The buffers of all ranks, in elements, alike on every rank. group: null where nothing travels.
  // kind: what else must be alike on all ranks, where ranks write into each other's memory.
  Departure(
      const Group* group,
      const std::function<int64_t(int64_t)>& elements,
      at::IntArrayRef sizes,
      const at::TensorOptions& options,
      uint64_t kind = 0);

  // This rank's buffer, of shape `sizes`.
  const at::Tensor& buffer() const { return buffer_; }
  // Whether rank p's memory is reached; any rank's; every other rank's.
  bool reaches(int64_t p) const { return mapped_ != nullptr && mapped_->reaches(p); }
  bool reaches_any() const { return mapped_ != nullptr; }
  bool reaches_all() const;

  // Makes this rank's block for every rank that is reached: write(p, where p's buffer begins). To
  // be called once. Nothing happens where none is.
  void write(const std::function<void(int64_t, char*)>& write, Flight& flight);
  // exchange_point_to_point, with the others.
  void send(
      const std::function<Bytes(int64_t)>& receive,
      const std::function<Bytes(int64_t)>& send,
      Flight& flight) const;

  // Between GPUs that reach each other's memory, this takes the place of write and send:
  // write(buffers) makes this rank's blocks for all ranks, itself included, of what it `reads`, by
  // launches on the current stream.
  bool staged() const { return staged_ != nullptr; }
  std::unique_ptr<Flight> stage(
      at::TensorList reads, const std::function<void(const Buffers&)>& write) const;

 private:
  const Group* group_;
  std::shared_ptr<Mapped> mapped_;
  std::shared_ptr<Staged> staged_;
  std::vector<int64_t> bytes_;  // of all ranks' buffers, where some rank writes into them
  at::Tensor buffer_;
  std::optional<Mapped::Exchange> exchange_;  // ends before the buffer goes
};

}  // namespace deepsp
