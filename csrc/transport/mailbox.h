#pragma once
// How the ranks of one machine ("members") write into each other's memory: the protocol, over plain
// memory that all of them map. It uses no torch, no sockets and no files.
//
// Exchanges are numbered alike on all members. In each exchange every member owns one buffer, and
// every member writes its block straight into each owner's buffer. Whoever is first, the owner or a
// member with a block for it, supplies the buffer: it takes a block of its own memory and publishes
// its place in the owner's slot for that exchange, by compare-and-swap. So each byte is copied
// once, and no member waits to begin. When the owner has freed a buffer, the block becomes one of
// the owner's spares, even in another member's memory; the next supplier takes a spare before it
// allocates, so an owner never has more blocks than it used at once.
//
//   slots[n % kSlots] of member r    the place of r's buffer of exchange n, and n's turn
//   arrived[s] of member r           how many exchanges' blocks s has written to r's buffers
//   opened of member s               how many exchanges s has written all blocks of; a slot is
//                                    reused when all members are past its last exchange
//   spares[c] of member r            a stack of r's idle blocks of size class c
//   returned of member b             a stack of freed blocks of b's memory, for b to reuse
//   bell, sleepers of member r       a futex that wakes r when a block has been written for it

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

// The beginning of a block, before the buffer's data.
struct alignas(64) BlockHead {
  uint64_t call;               // a hash of the exchange's op and sizes
  uint64_t bytes;              // of the buffer
  uint64_t size_class;         // of the block
  uint64_t member, place;      // of the block
  std::atomic<uint64_t> next;  // the block below it in a stack
};

// Why a member delivers nothing more.
enum class End : uint32_t { none, failed, left };

// A block in the memory of a member, in bytes from its beginning.
struct BlockPlace {
  int64_t member;
  uint64_t place;  // a multiple of kPlaceUnit, and not 0

  bool operator==(const BlockPlace& other) const {
    return member == other.member && place == other.place;
  }
};

// Blocks have one of a few sizes, at most an eighth apart, so that spares can be reused.
uint64_t size_class_of(uint64_t bytes);
uint64_t bytes_of_class(uint64_t size_class);
constexpr uint64_t kSizeClasses = 256;

class Mailbox {
 public:
  // `memories`: where each member's memory is mapped here. Each begins with the member's control
  // words, zero at first.
  Mailbox(int64_t member, std::vector<char*> memories);

  int64_t member() const { return member_; }
  int64_t members() const { return static_cast<int64_t>(memories_.size()); }
  // The size of the control words in a group of so many members.
  static uint64_t control_bytes(int64_t members);

  BlockHead* head(const BlockPlace& block) const {
    return reinterpret_cast<BlockHead*>(memories_[block.member] + block.place);
  }
  static char* data(BlockHead* head) { return reinterpret_cast<char*>(head + 1); }

  // Whether every member is past exchange n - kSlots, so that n can be opened.
  bool has_room(uint64_t n);
  // The buffer of `owner` for exchange n, if it was published.
  std::optional<BlockPlace> find(uint64_t n, int64_t owner) const;
  // Publishes `block`, with its head filled in, as that buffer. Returns the buffer: another
  // member's block if that was first.
  BlockPlace publish(uint64_t n, int64_t owner, const BlockPlace& block);
  // This member has written its block into `owner`'s buffer.
  void deliver(uint64_t n, int64_t owner);
  // It has written all its blocks.
  void pass(uint64_t n);
  // Whether `source` has written its block into this member's buffer.
  bool has_arrived(uint64_t n, int64_t source) const;

  // Calls `ready` until it holds, at most until `deadline`: spins briefly, yields, then sleeps
  // until a member delivers. Returns whether it held.
  bool wait(const std::function<bool()>& ready, std::chrono::steady_clock::time_point deadline);

  std::optional<BlockPlace> take_spare(int64_t owner, uint64_t size_class);
  // Its head says its size class.
  void give_spare(int64_t owner, const BlockPlace& block);
  // The size of all its spares.
  uint64_t spare_bytes(int64_t owner) const;
  // Frees a block of another member's memory.
  void give_back(const BlockPlace& block);
  // Calls `take` with each block of this member's memory that was given back.
  void take_back(const std::function<void(const BlockPlace&)>& take);

  // This member delivers nothing more; ended() tells the others. The first reason stays.
  void end(End why);
  End ended(int64_t member) const;

 private:
  struct Control;
  Control& control(int64_t member) const;
  std::atomic<uint64_t>& arrived(int64_t owner, int64_t source) const;
  void push(std::atomic<uint64_t>& stack, const BlockPlace& block) const;
  void ring(int64_t member);

  int64_t member_;
  std::vector<char*> memories_;
  uint64_t all_opened_ = 0;  // a lower bound, from the last has_room
};

}  // namespace deepsp
