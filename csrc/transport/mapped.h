#pragma once
// Shared memory on the CPU: the ranks of a group whose memory this rank reaches.

#include "mailbox.h"
#include "peer_socket.h"
#include "pool.h"
#include "shared_memory.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace deepsp {

// A rank whose memory is mapped here, and the connection to its process.
struct Peer {
  std::unique_ptr<SharedMemory> memory;
  SharedConnection connection;
};
// By rank; null: not reached. This rank's own has no connection.
using Peers = std::vector<std::unique_ptr<Peer>>;

class Mapped final : public PeerMemory {
 public:
  // `peers` includes this rank.
  Mapped(const Group& group, Peers peers);

  int64_t size() const override { return static_cast<int64_t>(peers_.size()); }
  bool reaches(int64_t rank) const override { return rank != rank_ && member_of_[rank] >= 0; }
  bool reaches_all() const { return ranks_.size() == peers_.size(); }

  // One exchange, from its opening until this rank has written its blocks. One at a time.
  class Exchange {
   public:
    // bytes[p]: the size of rank p's buffer, alike on all ranks. `call` tells exchanges apart.
    Exchange(std::shared_ptr<Mapped> mapped, uint64_t call, const std::vector<int64_t>& bytes);
    // If write() didn't return, the group is broken.
    ~Exchange();
    Exchange(const Exchange&) = delete;
    Exchange& operator=(const Exchange&) = delete;

    uint64_t number() const { return number_; }
    // This rank's buffer, once.
    at::Tensor take_buffer(at::IntArrayRef sizes, at::ScalarType dtype);
    // Calls write(p, p's buffer) for each rank p that is reached, to make this rank's block there;
    // the buffer is null if it has no bytes.
    void write(const std::function<void(int64_t, char*)>& write);

   private:
    void open(uint64_t call, const std::vector<int64_t>& bytes);
    BlockPlace find_or_publish(int64_t rank, uint64_t call, uint64_t bytes);

    std::shared_ptr<Mapped> mapped_;
    std::unique_lock<std::mutex> lock_;
    uint64_t number_;
    std::vector<char*> data_;  // by rank
    std::unique_ptr<Block> buffer_;
    bool closed_ = false;
  };

  // The group is gone: ends all exchanges, frees idle memory, and leaves the peers.
  void close();

  void wait(uint64_t exchange, int64_t source) override;
  void fail() override;
  void disown() override;
  void give(std::unique_ptr<Block> block) override;
  int64_t idle_bytes() override;
  void trim(int64_t bytes) override;

 private:
  const SharedMemory& memory_of(int64_t rank) const { return *peers_[rank]->memory; }
  // A block of this rank's memory, for a buffer of so many bytes.
  BlockPlace allocate(uint64_t size_class, uint64_t bytes);
  // Frees a block, or gives it back to the rank that owns its memory.
  void release(const BlockPlace& block);
  void free_returned();
  // Waits until `ready`, and looks at `ranks` now and then. std::runtime_error if one of them is
  // lost, or, with `late`, after the group's timeout.
  void wait_until(
      const std::function<bool()>& ready,
      const std::vector<int64_t>& ranks,
      std::chrono::milliseconds look,
      const std::string& late);
  // Why that rank will write nothing more; empty if it may.
  std::string why_lost(int64_t rank) const;

  int64_t rank_;
  std::vector<int64_t> member_of_;  // by rank; -1: not reached
  std::vector<int64_t> ranks_;      // by member
  std::chrono::milliseconds timeout_;
  Peers peers_;
  std::unique_ptr<Mailbox> mailbox_;

  std::mutex exchanging_;
  uint64_t next_ = 0;

  std::mutex allocating_;
  FreeRanges free_;
  std::atomic<bool> failed_ = false;
  std::atomic<bool> closed_ = false;
  std::atomic<bool> ours_ = true;  // false in a forked child
};

}  // namespace deepsp
