#pragma once
// The ranks of a group whose memory this rank reaches: their board, and the blocks of it.

#include "board.h"
#include "connect.h"
#include "pool.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

namespace deepsp {

class Mapped final : public Memory, public std::enable_shared_from_this<Mapped> {
 public:
  // Of a connection that has memory.
  Mapped(const Group& group, Connection connection);
  ~Mapped() override;

  // Of the group.
  size_t size() const { return member_of_.size(); }
  bool reaches(int64_t rank) const { return rank != rank_ && member_of(rank) >= 0; }
  bool reaches_all() const { return ranks_.size() == size(); }

  // One exchange, from its opening until this rank has written all its blocks. One at a time.
  class Exchange {
   public:
    // Of rank p the buffer has bytes[p] bytes, alike on all ranks; `call` tells exchanges apart.
    Exchange(std::shared_ptr<Mapped> mapped, uint64_t call, const std::vector<int64_t>& bytes);
    // Where it wasn't closed, the group is broken.
    ~Exchange();
    Exchange(const Exchange&) = delete;
    Exchange& operator=(const Exchange&) = delete;

    uint64_t number() const { return number_; }
    // This rank's buffer, once.
    at::Tensor take_buffer(at::IntArrayRef sizes, at::ScalarType dtype);
    // That of a rank that is reached; null if it has no bytes.
    char* data(int64_t rank) const;
    // This rank's block is there.
    void deliver(int64_t rank);
    void close();

   private:
    void open(uint64_t call, const std::vector<int64_t>& bytes);
    BlockPlace place_of(int64_t rank, uint64_t call, uint64_t bytes);

    std::shared_ptr<Mapped> mapped_;
    std::unique_lock<std::mutex> lock_;
    uint64_t number_;
    std::vector<char*> data_;  // by rank
    std::unique_ptr<Block> buffer_;
    bool closed_ = false;
  };

  // Waits for the block of `source` in an exchange's buffer. std::runtime_error where it doesn't
  // come.
  void wait(uint64_t exchange, int64_t source);

  // Nothing is exchanged any more, and the other ranks are told.
  void fail();
  // The group is gone: nothing is exchanged any more, and nothing is kept.
  void close();
  // After a fork, in the child: this memory is the parent's.
  void disown();

  void give(std::unique_ptr<Block> block) override;
  int64_t idle_bytes() override;
  void trim(int64_t bytes) override;

 private:
  int64_t member_of(int64_t rank) const { return member_of_[rank]; }
  const SharedMemory& memory_of(int64_t rank) const;
  // A block of this rank's memory, for a buffer of so many bytes.
  BlockPlace allocate(uint64_t size_class, uint64_t bytes);
  // Frees a block, or gives it back to the rank that does.
  void release(const BlockPlace& block);
  void free_returned();
  void leave();
  void wait_for_room(uint64_t exchange);
  // Why nothing more arrives from that rank; empty if it may.
  std::string lost(int64_t source) const;
  [[noreturn]] void fail(const std::string& why);

  int64_t rank_;
  std::vector<int64_t> member_of_;  // by rank; -1: not reached
  std::vector<int64_t> ranks_;      // by member
  std::chrono::milliseconds timeout_;
  Connection connection_;
  std::unique_ptr<Board> board_;

  std::mutex exchanging_;
  uint64_t next_ = 0;

  std::mutex allocating_;
  FreeRanges free_;
  std::atomic<bool> failed_ = false;
  std::atomic<bool> closed_ = false;
  std::atomic<bool> ours_ = true;
};

}  // namespace deepsp
