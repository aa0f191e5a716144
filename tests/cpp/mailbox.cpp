// The protocol by which ranks write into each other's memory, on threads: each is a member, and
// their memories are plain. Built with TSan it shows that no member reads a block before it is
// written, or writes one that is still read.

#include "../../csrc/transport/mailbox.h"
#include "../../csrc/transport/shared_memory.h"
#include "common.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include <unistd.h>

using namespace deepsp;

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMembers = 4;
constexpr uint64_t kExchanges = 3 * kSlots + 100;  // slots are used again, and again
constexpr uint64_t kBlocks = 200;                  // of each member
constexpr uint64_t kMost = 3000;                   // bytes of a block

struct Memory {
  void* data = nullptr;
  explicit Memory(uint64_t bytes) {
    data = std::aligned_alloc(kPlaceUnit, bytes);
    std::memset(data, 0, bytes);
  }
  ~Memory() { std::free(data); }
};

// Alike for all members: what an exchange is like.
struct Exchange {
  std::array<uint64_t, kMembers> bytes;  // that each source has for each owner
  uint64_t call;

  explicit Exchange(uint64_t n) : call(n * 7919 + 1) {
    std::mt19937_64 random(n);
    for (uint64_t& of_owner : bytes) {
      of_owner = random() % 4 == 0 ? 0 : random() % (kMost / kMembers);
    }
  }
  uint64_t buffer(int owner) const { return bytes[owner] * kMembers; }
};

char pattern(uint64_t n, int source, int owner) {
  return static_cast<char>(n * 31 + source * 7 + owner + 1);
}

struct Member {
  Mailbox mailbox;
  std::vector<BlockPlace> free;
  std::mt19937_64 random;

  Member(int me, const std::vector<char*>& memories) : mailbox(me, memories), random(me) {
    for (uint64_t b = 0; b < kBlocks; ++b) {
      free.push_back(
          {me, static_cast<uint64_t>(Mailbox::control_bytes(kMembers) + b * kPlaceUnit)});
    }
  }

  int me() const { return static_cast<int>(mailbox.member()); }

  struct Buffer {
    uint64_t n;
    BlockPlace place;
  };

  BlockPlace place_of(uint64_t n, int owner, const Exchange& exchange) {
    if (const auto found = mailbox.find(n, owner)) {
      return *found;
    }
    auto brought = mailbox.take_spare(owner, 1);
    if (!brought.has_value()) {
      brought = free.back();
      free.pop_back();
    }
    BlockHead* const head = mailbox.head(*brought);
    head->call = exchange.call;
    head->bytes = exchange.buffer(owner);
    head->size_class = 1;
    const BlockPlace place = mailbox.publish(n, owner, *brought);
    if (!(place == *brought)) {
      mailbox.give_spare(owner, *brought);
    }
    return place;
  }

  Buffer open_and_write(uint64_t n) {
    const Exchange exchange(n);
    require(
        mailbox.wait([&] { return mailbox.has_room(n); }, Clock::now() + std::chrono::minutes(1)) ||
            mailbox.has_room(n),
        "room");
    mailbox.take_back([&](const BlockPlace& block) { free.push_back(block); });
    Buffer mine{n, {me(), 0}};
    for (int step = 0; step < kMembers; ++step) {
      nap(random);
      const int owner = (me() + step) % kMembers;
      if (exchange.bytes[owner] > 0) {
        const BlockPlace place = place_of(n, owner, exchange);
        BlockHead* const head = mailbox.head(place);
        require(head->call == exchange.call && head->bytes == exchange.buffer(owner), "the call");
        std::memset(
            Mailbox::data(head) + me() * exchange.bytes[owner], pattern(n, me(), owner),
            exchange.bytes[owner]);
        mine.place = owner == me() ? place : mine.place;
      }
      if (owner != me()) {
        mailbox.deliver(n, owner);
      }
    }
    mailbox.pass(n);
    return mine;
  }

  void read(const Buffer& buffer) {
    const Exchange exchange(buffer.n);
    for (int source = 0; source < kMembers; ++source) {
      require(
          source == me() || mailbox.wait(
                                [&] { return mailbox.has_arrived(buffer.n, source); },
                                Clock::now() + std::chrono::minutes(1)),
          "it arrives");
      const uint64_t bytes = exchange.bytes[me()];
      if (bytes == 0) {
        continue;
      }
      const char* const data = Mailbox::data(mailbox.head(buffer.place)) + source * bytes;
      require(
          std::all_of(
              data, data + bytes, [&](char c) { return c == pattern(buffer.n, source, me()); }),
          "what was written");
    }
    if (exchange.bytes[me()] == 0) {
      return;
    }
    // What is given may be written at once.
    if (random() % 4 != 0) {
      mailbox.give_spare(me(), buffer.place);
    } else {
      release(buffer.place);
    }
  }

  void release(const BlockPlace& block) {
    if (block.member == me()) {
      free.push_back(block);
    } else {
      mailbox.give_back(block);
    }
  }

  void run() {
    std::deque<Buffer> flying;
    for (uint64_t n = 0; n < kExchanges; ++n) {
      flying.push_back(open_and_write(n));
      while (flying.size() > 1 + random() % 5) {
        // Not always in the order of their starts.
        const auto which = flying.begin() + static_cast<long>(random() % flying.size());
        read(*which);
        flying.erase(which);
      }
      if (n % 997 == 0) {  // one runs ahead of the others now and then
        std::this_thread::sleep_for(std::chrono::milliseconds(random() % 5));
      }
    }
    for (const Buffer& buffer : flying) {
      read(buffer);
    }
  }
};

void members_exchange() {
  std::vector<std::unique_ptr<Memory>> memories;
  std::vector<char*> data;
  for (int m = 0; m < kMembers; ++m) {
    memories.push_back(
        std::make_unique<Memory>(Mailbox::control_bytes(kMembers) + kBlocks * kPlaceUnit));
    data.push_back(static_cast<char*>(memories.back()->data));
  }
  std::vector<std::unique_ptr<Member>> members;
  for (int m = 0; m < kMembers; ++m) {
    members.push_back(std::make_unique<Member>(m, data));
  }
  std::vector<std::thread> threads;
  for (auto& member : members) {
    threads.emplace_back([&] { member->run(); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (auto& member : members) {
    uint64_t spares = 0;
    while (const auto spare = member->mailbox.take_spare(member->me(), 1)) {
      member->release(*spare);
      ++spares;
    }
    require(spares > 0 && spares < 30, "no more spares than buffers were used at once");
    require(member->mailbox.spare_bytes(member->me()) == 0, "they are counted");
  }
  for (auto& member : members) {
    member->mailbox.take_back([&](const BlockPlace& block) { member->free.push_back(block); });
    std::set<uint64_t> places;
    for (const BlockPlace& block : member->free) {
      require(block.member == member->me(), "every block comes back");
      places.insert(block.place);
    }
    require(places.size() == kBlocks && member->free.size() == kBlocks, "none is lost, none twice");
  }
}

// A member that never comes leaves the others waiting until their deadline; one that fails, until
// it says so.
void waits_end() {
  Memory first(Mailbox::control_bytes(2) + kPlaceUnit),
      second(Mailbox::control_bytes(2) + kPlaceUnit);
  const std::vector<char*> data{static_cast<char*>(first.data), static_cast<char*>(second.data)};
  Mailbox one(0, data), other(1, data);
  const auto begin = Clock::now();
  require(
      !one.wait([&] { return one.has_arrived(0, 1); }, begin + std::chrono::milliseconds(30)),
      "nothing arrives");
  require(Clock::now() - begin >= std::chrono::milliseconds(30), "it waits until the deadline");
  std::thread failing([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    other.end(End::failed);
    other.end(End::left);
  });
  require(
      one.wait([&] { return one.ended(1) == End::failed; }, Clock::now() + std::chrono::minutes(1)),
      "a failure is told");
  failing.join();
  // A member may be kSlots exchanges ahead of another, and no more.
  for (uint64_t n = 0; n < kSlots; ++n) {
    require(one.has_room(n), "room");
    one.pass(n);
  }
  require(!one.has_room(kSlots), "no room");
  other.pass(0);
  require(one.has_room(kSlots) && !one.has_room(kSlots + 1), "room for one");
}

void sizes_have_classes() {
  uint64_t last = 0;
  for (uint64_t units = 1; units < 100000; ++units) {
    const uint64_t bytes = units * kPlaceUnit - 5, size_class = size_class_of(bytes);
    require(size_class < kSizeClasses && size_class >= last, "classes ascend");
    const uint64_t whole = bytes_of_class(size_class);
    require(whole >= bytes && whole < bytes + bytes / 8 + kPlaceUnit, "an eighth at most");
    require(size_class_of(whole) == size_class, "the largest of its class");
    last = size_class;
  }
  require(size_class_of(uint64_t(1) << 47) < kSizeClasses, "as much as a process can address");
}

void ranges_are_found() {
  FreeRanges ranges(100, 200);
  const auto a = ranges.take(30), b = ranges.take(30), c = ranges.take(30);
  require(a == 100 && b == 130 && c == 160, "first fit");
  require(!ranges.take(20).has_value(), "none is as long");
  ranges.give(*a, 30);
  ranges.give(*c, 30);
  require(!ranges.take(41).has_value(), "what doesn't touch isn't one");
  ranges.give(*b, 30);
  require(ranges.take(100) == 100, "what touches is one");
}

void memory_is_shared() {
  SharedMemory mine(4 * kPlaceUnit);
  std::strcpy(mine.data() + kPlaceUnit, "here");
  SharedMemory theirs{Descriptor(dup(mine.file()))};
  require(theirs.bytes() == mine.bytes(), "as long");
  require(ftruncate(theirs.file(), 0) != 0, "no process makes it shorter");
  require(std::strcmp(theirs.data() + kPlaceUnit, "here") == 0, "the same memory");
  require(theirs.populate(0, 4 * kPlaceUnit), "pages can be had");
  mine.punch(kPlaceUnit, kPlaceUnit);
  require(theirs.data()[kPlaceUnit] == 0, "pages can be given back");
}

// Groups share the addresses of a process.
void addresses_suffice() {
  constexpr uint64_t kGiB = uint64_t(1) << 30;
  const uint64_t before = SharedMemory::bytes_to_map(UINT64_MAX, 8);
  require(before == (uint64_t(1) << 47) / 2 / 4 / 8, "a quarter of a half, by rank");
  require(SharedMemory::bytes_to_map(kGiB, 8) == kGiB, "no more than the machine has");
  {
    const SharedMemory mine(kGiB);
    const SharedMemory theirs{Descriptor(dup(mine.file()))};
    const uint64_t left = SharedMemory::bytes_to_map(UINT64_MAX, 8);
    require(left == before - 2 * kGiB / 4 / 8, "what other groups map counts");
  }
  require(SharedMemory::bytes_to_map(UINT64_MAX, 8) == before, "as long as they do");
}

}  // namespace

int main() {
  addresses_suffice();
  sizes_have_classes();
  ranges_are_found();
  memory_is_shared();
  waits_end();
  members_exchange();
  std::puts("mailbox: fine");
}
