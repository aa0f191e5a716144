#include "mailbox.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace deepsp {
namespace {

// Spins pay if the peer runs on another core; if ranks share cores, only yields help.
constexpr int kSpins = 400;
constexpr int kYields = 40;

// A word holds the place of a block and a mark. In a slot the mark is the turn of an exchange; on
// top of a stack it counts changes (against ABA).
constexpr int kUnitBits = 32, kMemberBits = 12, kMarkBits = 20;

uint64_t word_of(const BlockPlace& block, uint64_t mark) {
  return mark << (kUnitBits + kMemberBits) | static_cast<uint64_t>(block.member) << kUnitBits |
         block.place / kPlaceUnit;
}

uint64_t mark_of(uint64_t word) {
  return word >> (kUnitBits + kMemberBits);
}

uint64_t next_mark(uint64_t word) {
  return (mark_of(word) + 1) & ((uint64_t(1) << kMarkBits) - 1);
}

// Place 0, where control words lie, means no block.
BlockPlace place_in(uint64_t word) {
  return {
      static_cast<int64_t>(word >> kUnitBits & (kMostMembers - 1)),
      (word & ((uint64_t(1) << kUnitBits) - 1)) * kPlaceUnit};
}

uint64_t turn_of(uint64_t n) {
  return (n / kSlots + 1) & ((uint64_t(1) << kMarkBits) - 1);
}

bool is_of(uint64_t slot, uint64_t n) {
  return mark_of(slot) == turn_of(n);
}

void relax() {
#if defined(__SSE2__)
  _mm_pause();
#endif
}

// Shared between processes, so not FUTEX_PRIVATE.
void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds most) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(most);
  const timespec time{seconds.count(), (most - seconds).count()};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

}  // namespace

// Words that different members write lie in different cache lines.
struct Mailbox::Control {
  alignas(64) std::atomic<uint32_t> bell;
  alignas(64) std::atomic<uint32_t> sleepers;
  alignas(64) std::atomic<End> end;
  alignas(64) std::atomic<uint64_t> opened;
  alignas(64) std::atomic<uint64_t> returned;
  alignas(64) std::atomic<uint64_t> spare_bytes;
  alignas(64) std::atomic<uint64_t> spares[kSizeClasses];
  alignas(64) std::atomic<uint64_t> slots[kSlots];
  // arrived, one line for each source, follows.
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "words are shared between processes");

uint64_t size_class_of(uint64_t bytes) {
  const uint64_t units = std::max<uint64_t>(1, (bytes + kPlaceUnit - 1) / kPlaceUnit);
  uint64_t shift = 0;
  while (units >> shift > 15) {
    ++shift;
  }
  const uint64_t rounded = (units + (uint64_t(1) << shift) - 1) >> shift;  // 1 to 16
  return shift * 8 + rounded;
}

uint64_t bytes_of_class(uint64_t size_class) {
  // Eight classes for each shift: 9 to 16 of its units; the first 16 classes are exact.
  const uint64_t shift = size_class <= 16 ? 0 : (size_class - 9) / 8;
  return ((size_class - shift * 8) << shift) * kPlaceUnit;
}

uint64_t Mailbox::control_bytes(int64_t members) {
  const uint64_t bytes = sizeof(Control) + static_cast<uint64_t>(members) * 64;
  return (bytes + kPlaceUnit - 1) / kPlaceUnit * kPlaceUnit;
}

Mailbox::Mailbox(int64_t member, std::vector<char*> memories)
    : member_(member), memories_(std::move(memories)) {
}

Mailbox::Control& Mailbox::control(int64_t member) const {
  return *reinterpret_cast<Control*>(memories_[member]);
}

std::atomic<uint64_t>& Mailbox::arrived(int64_t owner, int64_t source) const {
  return *reinterpret_cast<std::atomic<uint64_t>*>(
      memories_[owner] + sizeof(Control) + source * 64);
}

bool Mailbox::has_room(uint64_t n) {
  if (n < all_opened_ + kSlots) {
    return true;
  }
  uint64_t least = UINT64_MAX;
  for (int64_t m = 0; m < members(); ++m) {
    least = std::min(least, control(m).opened.load(std::memory_order_acquire));
  }
  all_opened_ = least;
  return n < all_opened_ + kSlots;
}

std::optional<BlockPlace> Mailbox::find(uint64_t n, int64_t owner) const {
  const uint64_t slot = control(owner).slots[n % kSlots].load(std::memory_order_acquire);
  if (!is_of(slot, n)) {
    return std::nullopt;
  }
  return place_in(slot);
}

BlockPlace Mailbox::publish(uint64_t n, int64_t owner, const BlockPlace& block) {
  std::atomic<uint64_t>& slot = control(owner).slots[n % kSlots];
  uint64_t seen = slot.load(std::memory_order_acquire);
  while (!is_of(seen, n)) {
    if (slot.compare_exchange_weak(
            seen, word_of(block, turn_of(n)), std::memory_order_acq_rel,
            std::memory_order_acquire)) {
      return block;
    }
  }
  return place_in(seen);
}

void Mailbox::ring(int64_t member) {
  Control& theirs = control(member);
  theirs.bell.fetch_add(1, std::memory_order_seq_cst);
  if (theirs.sleepers.load(std::memory_order_seq_cst) > 0) {
    futex_wake(theirs.bell);
  }
}

void Mailbox::deliver(uint64_t n, int64_t owner) {
  arrived(owner, member_).store(n + 1, std::memory_order_release);
  ring(owner);
}

void Mailbox::pass(uint64_t n) {
  control(member_).opened.store(n + 1, std::memory_order_release);
}

bool Mailbox::has_arrived(uint64_t n, int64_t source) const {
  return arrived(member_, source).load(std::memory_order_acquire) > n;
}

bool Mailbox::wait(
    const std::function<bool()>& ready, std::chrono::steady_clock::time_point deadline) {
  for (int i = 0; i < kSpins; ++i) {
    if (ready()) {
      return true;
    }
    relax();
  }
  for (int i = 0; i < kYields; ++i) {
    sched_yield();
    if (ready()) {
      return true;
    }
  }
  Control& mine = control(member_);
  while (true) {
    mine.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = mine.bell.load(std::memory_order_seq_cst);
    const bool is_ready = ready();
    const auto left = deadline - std::chrono::steady_clock::now();
    if (!is_ready && left.count() > 0) {
      futex_wait(mine.bell, seen, left);
    }
    mine.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (is_ready || ready()) {
      return true;
    }
    if (left.count() <= 0) {
      return false;
    }
  }
}

void Mailbox::push(std::atomic<uint64_t>& stack, const BlockPlace& block) const {
  uint64_t top = stack.load(std::memory_order_relaxed);
  do {
    head(block)->next.store(top, std::memory_order_relaxed);
  } while (!stack.compare_exchange_weak(
      top, word_of(block, next_mark(top)), std::memory_order_release, std::memory_order_relaxed));
}

void Mailbox::give_spare(int64_t owner, const BlockPlace& block) {
  Control& theirs = control(owner);
  const uint64_t size_class = head(block)->size_class;
  theirs.spare_bytes.fetch_add(bytes_of_class(size_class), std::memory_order_relaxed);
  push(theirs.spares[size_class], block);
}

std::optional<BlockPlace> Mailbox::take_spare(int64_t owner, uint64_t size_class) {
  Control& theirs = control(owner);
  std::atomic<uint64_t>& stack = theirs.spares[size_class];
  uint64_t top = stack.load(std::memory_order_acquire);
  while (true) {
    const BlockPlace block = place_in(top);
    if (block.place == 0) {
      return std::nullopt;
    }
    // If another member takes the block meanwhile and overwrites `next`, the top's mark changes.
    const BlockPlace below = place_in(head(block)->next.load(std::memory_order_relaxed));
    if (stack.compare_exchange_weak(
            top, word_of(below, next_mark(top)), std::memory_order_acq_rel,
            std::memory_order_acquire)) {
      theirs.spare_bytes.fetch_sub(bytes_of_class(size_class), std::memory_order_relaxed);
      return block;
    }
  }
}

uint64_t Mailbox::spare_bytes(int64_t owner) const {
  return control(owner).spare_bytes.load(std::memory_order_relaxed);
}

void Mailbox::give_back(const BlockPlace& block) {
  push(control(block.member).returned, block);
}

void Mailbox::take_back(const std::function<void(const BlockPlace&)>& take) {
  std::atomic<uint64_t>& stack = control(member_).returned;
  if (place_in(stack.load(std::memory_order_relaxed)).place == 0) {
    return;
  }
  BlockPlace block = place_in(stack.exchange(0, std::memory_order_acquire));
  while (block.place != 0) {
    const BlockPlace below = place_in(head(block)->next.load(std::memory_order_relaxed));
    take(block);
    block = below;
  }
}

void Mailbox::end(End why) {
  End none = End::none;
  control(member_).end.compare_exchange_strong(none, why, std::memory_order_seq_cst);
  for (int64_t m = 0; m < members(); ++m) {
    ring(m);
  }
}

End Mailbox::ended(int64_t member) const {
  return control(member).end.load(std::memory_order_acquire);
}

}  // namespace deepsp
