#pragma once
// A flight: an exchange that is filling a buffer, and how to wait for it.

#include "group.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace c10d {
class Work;
}

namespace deepsp {

using Work = std::shared_ptr<c10d::Work>;

// How blocks lie in the buffer of a heads_to_seq: packed, one after another by rank; apart, the
// same for each tensor, one after another; in rows, each tensor's blocks side by side, token by
// token; in batches, sequence by sequence.
enum class BlockOrder { packed, apart, rows, batches };

struct Block;

// Memory that ranks of a group share: flights wait for it, and the pool counts its idle blocks.
class PeerMemory {
 public:
  virtual ~PeerMemory() = default;

  // The number of ranks of the group.
  virtual int64_t size() const = 0;
  // Whether rank writes into this rank's buffers, and this rank into its.
  virtual bool reaches(int64_t rank) const = 0;
  // Waits until rank `source` has written its block of an exchange. std::runtime_error if it won't.
  virtual void wait(uint64_t exchange, int64_t source) = 0;
  // Ends all exchanges, and tells the other ranks.
  virtual void fail() = 0;
  // After a fork, in the child: the memory is the parent's.
  virtual void disown() = 0;

  // Takes a block that no tensor uses any more. Its flight has ended.
  virtual void give(std::unique_ptr<Block> block) = 0;
  virtual int64_t idle_bytes() = 0;
  // Frees idle blocks until at most so many bytes are left.
  virtual void trim(int64_t bytes) = 0;
};

// It owns all that must live until the exchange is complete. The buffer's block (pool.h) or a table
// (attach.h) owns the flight, so that freeing an unawaited buffer frees its flight.
struct Flight {
  // What is being sent. Declared before the works, so that they end first.
  std::vector<at::Tensor> holds;
  // heads_to_seq: this rank's own block lies in these inputs, not in the buffer; an undefined one
  // does lie in the buffer.
  std::vector<at::Tensor> own;
  BlockOrder order = BlockOrder::packed;
  // Messages: one entry for each exchange, its works by source rank.
  std::vector<std::vector<Work>> receives;
  std::vector<Work> sends;
  // Peers that write into the buffer, and their number for this exchange.
  std::shared_ptr<PeerMemory> mapped;
  uint64_t exchange = 0;
  // A collective of any other backend.
  Work collective;
  bool together = false;  // all blocks arrive at once, by a collective
  // GPU only: the stream of the launch. The backend keeps both tensors alive until the transfer
  // completes, so the destructor doesn't wait.
  std::optional<c10::Stream> stream;
  bool done_on_device = false;  // the group's
  // GPU only: no exchange; the flight only records the stream that made the buffer.
  bool local = false;
  // The wait is done, and the flight stays as a mark: it has no `own`, and can't be waited for.
  bool waited = false;
  // Names the exchange in errors; set by the launch.
  std::string what;

  Flight() = default;
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;
  // On the CPU, waits if that wasn't done: a peer must not write into memory that the pool has
  // handed out again, and the group must not be left halfway.
  ~Flight();

  void wait_receive(int64_t source);
  void wait_sends();
  void wait_all();
  // Waits for one exchange of messages. An error names every rank whose block is missing.
  void wait_messages();
  // If its collective is complete, moves that and the tensors that it sent to a new flight, so that
  // they can be released while the buffer lives; else null.
  std::unique_ptr<Flight> release_if_done();

 private:
  // `source`: the rank whose block is received; -1: any.
  template <class Wait>
  void wait(int64_t source, const Wait& wait);
  void wait(Work& work, int64_t source = -1);
  bool failed_ = false;  // a wait threw: the group is broken
};

// Anomaly mode, or DEEPSP_DEBUG=1: a start then waits at once.
bool waits_at_once();
// Anomaly mode looks for NaN in whole buffers, between blocks and behind them, too.
void clear_if_waiting_at_once(const at::Tensor& buffer);
// Whether the device's current stream is being captured in a CUDA graph: no query or
// synchronization is allowed then.
bool capturing(c10::Device device);
// The number of a GPU's current stream.
int64_t current_stream(c10::Device device);

}  // namespace deepsp
