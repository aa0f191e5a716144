#pragma once
// How the ranks of one machine ("members") write into each other's memory: the protocol, over plain
// memory that all of them map. Knows no torch, no sockets and no files.
//
// Exchanges are numbered alike on all members. For every exchange, every member has one buffer, and
// every member writes its block straight to where the buffer's owner reads it. Whoever comes first,
// the owner or a member that has a block for it, brings the buffer: it takes a block of its own
// memory and publishes its place in the owner's slot for that exchange, by compare-and-swap. So
// each byte is copied once, whoever is early, and nobody waits to begin. A buffer that its owner is
// done with becomes a spare of the owner's, wherever it lies: whoever comes first takes a spare
// before it brings memory of its own, so that an owner has no more blocks than it ever used at
// once.
//
//   slots[n % kSlots] of member r    where r's buffer of exchange n lies: turn, bringer, place
//   arrived[s] of member r           how many exchanges' blocks from s are in r's buffers
//   opened of member s               how many exchanges s has written all blocks of; a slot is used
//                                    again when all members are past the exchange that it was for
//   spares[c] of member r            a stack of r's idle blocks of size class c
//   returned of member b             a stack of blocks in b's memory that nobody keeps any more
//   bell, sleepers of member r       a futex that is rung for r when something has arrived

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace deepsp {

constexpr int64_t kSlots = 1024;
// Blocks begin at multiples of this.
constexpr uint64_t kPlaceUnit = uint64_t(64) << 10;
constexpr int64_t kMostMembers = 1 << 12;

// What stands at the beginning of a block, before the buffer's data.
struct alignas(64) BlockHead {
  uint64_t call;               // which exchange it is for: a number made of its sizes
  uint64_t bytes;              // of that buffer
  uint64_t size_class;         // of the block
  std::atomic<uint64_t> next;  // below it in a stack
};

// A block in the memory of a member, in bytes from its beginning.
struct BlockPlace {
  int64_t member;
  uint64_t place;  // a multiple of kPlaceUnit, and not 0

  bool operator==(const BlockPlace& other) const {
    return member == other.member && place == other.place;
  }
};

// Blocks have one of a few sizes, at most an eighth apart, so that a spare fits or doesn't.
uint64_t size_class_of(uint64_t bytes);
uint64_t bytes_of_class(uint64_t size_class);
constexpr uint64_t kSizeClasses = 256;

class Board {
 public:
  // `memories`: where each member's memory is mapped here. Each begins with the member's control
  // words, which are zero at first.
  Board(int64_t member, std::vector<char*> memories);

  int64_t member() const { return member_; }
  int64_t members() const { return static_cast<int64_t>(memories_.size()); }
  // What the control words of a group of so many members take.
  static uint64_t control_bytes(int64_t members);

  BlockHead* head(const BlockPlace& block) const {
    return reinterpret_cast<BlockHead*>(memories_[block.member] + block.place);
  }
  static char* data(BlockHead* head) { return reinterpret_cast<char*>(head + 1); }

  // Whether every member is past exchange n - kSlots, so that n can be opened.
  bool has_room(uint64_t n);
  // Where the buffer of `owner` for exchange n lies, if somebody has brought it.
  std::optional<BlockPlace> find(uint64_t n, int64_t owner) const;
  // Brings it, with its head filled in. What lies there now: this block, or another's.
  BlockPlace publish(uint64_t n, int64_t owner, const BlockPlace& block);
  // This member's block is in `owner`'s buffer.
  void deliver(uint64_t n, int64_t owner);
  // All its blocks are.
  void pass(uint64_t n);
  // Whether the block of `source` is in this member's buffer.
  bool has_arrived(uint64_t n, int64_t source) const;

  // Calls `ready` until it holds, at most until `deadline`: spins briefly, yields to other
  // threads, then sleeps until somebody delivers. Whether it held.
  bool wait(const std::function<bool()>& ready, std::chrono::steady_clock::time_point deadline);

  // A spare of the owner's of that size.
  std::optional<BlockPlace> take_spare(int64_t owner, uint64_t size_class);
  // Its head says of which size it is.
  void give_spare(int64_t owner, const BlockPlace& block);
  // Of all its spares.
  uint64_t spare_bytes(int64_t owner) const;
  // A block in another member's memory that this one doesn't keep.
  void give_back(const BlockPlace& block);
  // Calls `take` with each block of this member's memory that came back.
  void take_back(const std::function<void(const BlockPlace&)>& take);

  // This member has failed, and delivers nothing more; `has_failed` tells the others.
  void fail();
  bool has_failed(int64_t member) const;

 private:
  struct Control;
  Control& control(int64_t member) const;
  std::atomic<uint64_t>& arrived(int64_t owner, int64_t source) const;
  void push(std::atomic<uint64_t>& stack, const BlockPlace& block) const;
  void ring(int64_t member);

  int64_t member_;
  std::vector<char*> memories_;
  uint64_t all_opened_ = 0;  // at least; what has_room last saw
};

}  // namespace deepsp
