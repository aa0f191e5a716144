#pragma once
// Memory that ranks of a group share, as flights (which wait for it) and the pool (whose limit
// counts its idle blocks) see it. mapped.h implements it.

#include <cstdint>
#include <memory>

namespace deepsp {

struct Block;

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

}  // namespace deepsp
