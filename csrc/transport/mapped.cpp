#include "mapped.h"

#include "../common/checks.h"
#include "c10d.h"
#include "flight.h"

#include <pthread.h>

#include <cstring>
#include <set>
#include <thread>

namespace deepsp {

using Clock = std::chrono::steady_clock;

namespace {

// How long a rank sleeps before it looks whether the others are still there.
constexpr std::chrono::milliseconds kLook{100};
constexpr const char* kForked = "the group is that of the process that forked this one";

// Those of this process, for its children.
std::mutex living_mutex;
std::set<Mapped*>& living() {
  static auto* const all = new std::set<Mapped*>;
  return *all;
}

void watch_forks() {
  static const int watched = pthread_atfork(
      [] { living_mutex.lock(); }, [] { living_mutex.unlock(); },
      [] {
        for (Mapped* mapped : living()) {
          mapped->disown();
        }
        living_mutex.unlock();
      });
  TORCH_INTERNAL_ASSERT(watched == 0);
}

}  // namespace

// ------------------------------------------------------------------- memory

Mapped::Mapped(const Group& group, Connection connection)
    : rank_(group.rank),
      member_of_(group.size, -1),
      timeout_(timeout_of(group, at::kCPU)),
      connection_(std::move(connection)),
      free_(0, 0) {
  std::vector<char*> memories;
  int64_t me = 0;
  for (int64_t p = 0; p < group.size; ++p) {
    if (!connection_.reach.reaches(group.rank, p)) {
      continue;
    }
    member_of_[p] = static_cast<int64_t>(ranks_.size());
    me = p == rank_ ? member_of_[p] : me;
    ranks_.push_back(p);
    memories.push_back(memory_of(p).data());
  }
  free_ = FreeRanges(
      Board::control_bytes(static_cast<int64_t>(ranks_.size())), connection_.memory->bytes());
  board_ = std::make_unique<Board>(me, std::move(memories));
  watch_forks();
  std::lock_guard<std::mutex> lock(living_mutex);
  living().insert(this);
}

Mapped::~Mapped() {
  std::lock_guard<std::mutex> lock(living_mutex);
  living().erase(this);
}

const SharedMemory& Mapped::memory_of(int64_t rank) const {
  return rank == rank_ ? *connection_.memory : *connection_.neighbors[rank]->memory;
}

BlockPlace Mapped::allocate(uint64_t size_class, uint64_t bytes) {
  std::optional<uint64_t> place;
  {
    std::lock_guard<std::mutex> lock(allocating_);
    place = free_.take(bytes_of_class(size_class));
  }
  const SharedMemory& memory = *connection_.memory;
  TORCH_CHECK_WITH(
      OutOfMemoryError, place.has_value() && memory.populate(*place, sizeof(BlockHead) + bytes),
      "deepsp: no shared memory for a buffer of ", bytes, " bytes");
  const BlockPlace block{board_->member(), *place};
  board_->head(block)->size_class = size_class;
  return block;
}

void Mapped::release(const BlockPlace& block) {
  if (block.member != board_->member()) {
    return board_->give_back(block);
  }
  const uint64_t bytes = bytes_of_class(board_->head(block)->size_class);
  connection_.memory->punch(block.place, bytes);
  std::lock_guard<std::mutex> lock(allocating_);
  free_.give(block.place, bytes);
}

void Mapped::free_returned() {
  board_->take_back([&](const BlockPlace& block) { release(block); });
}

void Mapped::give(std::unique_ptr<Block> given) {
  if (!ours_ || failed_) {
    return;  // somebody may still write there
  }
  const char* const data = static_cast<char*>(given->data);
  for (const int64_t p : ranks_) {
    const SharedMemory& memory = memory_of(p);
    if (data < memory.data() || data >= memory.data() + memory.bytes()) {
      continue;
    }
    const BlockPlace block{member_of(p), static_cast<uint64_t>(data - memory.data())};
    const auto bytes = static_cast<int64_t>(bytes_of_class(board_->head(block)->size_class));
    if (closed_ || pool_idle_bytes() + bytes > pool_limit()) {
      return release(block);
    }
    return board_->give_spare(board_->member(), block);
  }
}

int64_t Mapped::idle_bytes() {
  return ours_ && !failed_ ? static_cast<int64_t>(board_->spare_bytes(board_->member())) : 0;
}

void Mapped::trim(int64_t bytes) {
  if (!ours_ || failed_) {
    return;
  }
  free_returned();
  for (uint64_t size_class = kSizeClasses; size_class-- > 0 && idle_bytes() > bytes;) {
    while (idle_bytes() > bytes) {
      const auto spare = board_->take_spare(board_->member(), size_class);
      if (!spare.has_value()) {
        break;
      }
      release(*spare);
    }
  }
}

void Mapped::leave() {
  for (const auto& neighbor : connection_.neighbors) {
    if (neighbor) {
      neighbor->socket = Descriptor();
    }
  }
}

void Mapped::close() {
  std::lock_guard<std::mutex> lock(exchanging_);
  trim(0);
  closed_ = true;
  leave();
}

void Mapped::disown() {
  ours_ = false;
  leave();
}

// ------------------------------------------------------------------- exchanges

std::string Mapped::lost(int64_t source) const {
  if (board_->has_failed(member_of(source))) {
    return "its own exchange failed";
  }
  return has_left(*connection_.neighbors[source]) ? "it has left the group, or died" : "";
}

void Mapped::fail(const std::string& why) {
  fail();
  throw std::runtime_error(why);
}

void Mapped::fail() {
  failed_ = true;
  board_->fail();
}

void Mapped::wait_for_room(uint64_t exchange) {
  const auto deadline = Clock::now() + timeout_;
  while (!board_->has_room(exchange)) {
    for (const int64_t p : ranks_) {
      const std::string why = p == rank_ ? "" : lost(p);
      if (!why.empty() && !board_->has_room(exchange)) {
        throw std::runtime_error("rank " + std::to_string(p) + ": " + why);
      }
    }
    if (Clock::now() >= deadline) {
      throw std::runtime_error(
          "more than " + std::to_string(kSlots) + " exchanges wait for a rank that is behind");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Mapped::wait(uint64_t exchange, int64_t source) {
  const int64_t member = member_of(source);
  const auto arrived = [&] { return board_->has_arrived(exchange, member); };
  if (!ours_) {
    if (!arrived()) {
      throw std::runtime_error(kForked);
    }
    return;
  }
  const auto deadline = Clock::now() + timeout_;
  while (!board_->wait(
      [&] { return arrived() || board_->has_failed(member); },
      std::min(deadline, Clock::now() + kLook))) {
    const std::string why = lost(source);
    if (!why.empty() && !arrived()) {
      fail(why);
    }
    if (Clock::now() >= deadline) {
      fail(
          "nothing came within the group's timeout of " + std::to_string(timeout_.count()) + " ms");
    }
  }
  if (!arrived()) {
    fail(lost(source));
  }
}

Mapped::Exchange::Exchange(
    std::shared_ptr<Mapped> mapped, uint64_t call, const std::vector<int64_t>& bytes)
    : mapped_(std::move(mapped)),
      lock_(mapped_->exchanging_, std::defer_lock),
      data_(bytes.size(), nullptr) {
  if (!mapped_->ours_) {
    throw std::runtime_error(kForked);
  }
  lock_.lock();
  if (mapped_->failed_) {
    throw std::runtime_error("an exchange of this group has failed before");
  }
  number_ = mapped_->next_++;
  try {
    open(call, bytes);
  } catch (...) {
    mapped_->fail();
    throw;
  }
}

void Mapped::Exchange::open(uint64_t call, const std::vector<int64_t>& bytes) {
  mapped_->wait_for_room(number_);
  mapped_->free_returned();
  // This rank's own first: its pages are in this process.
  const auto size = static_cast<int64_t>(bytes.size());
  for (int64_t step = 0; step < size; ++step) {
    const int64_t p = (mapped_->rank_ + step) % size;
    if (mapped_->member_of(p) < 0 || bytes[p] == 0) {
      continue;
    }
    BlockHead* const head =
        mapped_->board_->head(place_of(p, call, static_cast<uint64_t>(bytes[p])));
    data_[p] = Board::data(head);
    if (p == mapped_->rank_) {
      buffer_ = std::make_unique<Block>(Block{head, 0, nullptr, mapped_});
    }
  }
}

// Where rank p's buffer lies: brings it, if nobody has.
BlockPlace Mapped::Exchange::place_of(int64_t rank, uint64_t call, uint64_t bytes) {
  Board& board = *mapped_->board_;
  const int64_t owner = mapped_->member_of(rank);
  auto found = board.find(number_, owner);
  if (!found.has_value()) {
    const uint64_t size_class = size_class_of(sizeof(BlockHead) + bytes);
    const auto spare = board.take_spare(owner, size_class);
    const BlockPlace brought = spare ? *spare : mapped_->allocate(size_class, bytes);
    BlockHead* const head = board.head(brought);
    head->call = call;
    head->bytes = bytes;
    if (watched()) {  // anomaly mode looks for NaN everywhere
      std::memset(Board::data(head), 0, bytes);
    }
    found = board.publish(number_, owner, brought);
    if (*found == brought) {
      return brought;
    }
    board.give_spare(owner, brought);
  }
  const BlockHead& head = *board.head(*found);
  if (head.call != call || head.bytes != bytes) {
    throw std::runtime_error("another rank makes another call, or passes other sizes");
  }
  return *found;
}

Mapped::Exchange::~Exchange() {
  if (!closed_) {
    mapped_->fail();
  }
}

at::Tensor Mapped::Exchange::take_buffer(at::IntArrayRef sizes, at::ScalarType dtype) {
  return buffer_ ? tensor_on(std::move(buffer_), sizeof(BlockHead), sizes, dtype)
                 : pool_empty(sizes, dtype);  // of no elements
}

char* Mapped::Exchange::data(int64_t rank) const {
  return data_[rank];
}

void Mapped::Exchange::deliver(int64_t rank) {
  mapped_->board_->deliver(number_, mapped_->member_of(rank));
}

void Mapped::Exchange::close() {
  mapped_->board_->pass(number_);
  closed_ = true;
  lock_.unlock();
}

}  // namespace deepsp
