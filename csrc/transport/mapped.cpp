#include "mapped.h"

#include "c10d.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <thread>

namespace deepsp {

using Clock = std::chrono::steady_clock;

namespace {

// How long a rank sleeps before it looks whether its peers are still there.
constexpr std::chrono::milliseconds kLook{100};
constexpr const char* kForked = "the group is that of the process that forked this one";

}  // namespace

// ------------------------------------------------------------------- memory

Mapped::Mapped(const Group& group, Peers peers)
    : rank_(group.rank),
      member_of_(group.size, -1),
      timeout_(timeout_of(group, at::kCPU)),
      peers_(std::move(peers)),
      free_(0, 0) {
  std::vector<char*> memories;
  for (int64_t p = 0; p < group.size; ++p) {
    if (peers_[p]) {
      member_of_[p] = static_cast<int64_t>(ranks_.size());
      ranks_.push_back(p);
      memories.push_back(memory_of(p).data());
    }
  }
  const auto members = static_cast<int64_t>(ranks_.size());
  free_ = FreeRanges(Mailbox::control_bytes(members), memory_of(rank_).bytes());
  mailbox_ = std::make_unique<Mailbox>(member_of_[rank_], std::move(memories));
}

BlockPlace Mapped::allocate(uint64_t size_class, uint64_t bytes) {
  std::optional<uint64_t> place;
  {
    std::lock_guard<std::mutex> lock(allocating_);
    place = free_.take(bytes_of_class(size_class));
  }
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      place.has_value() && memory_of(rank_).populate(*place, sizeof(BlockHead) + bytes),
      "deepsp: no shared memory for a buffer of ", bytes, " bytes");
  const BlockPlace block{mailbox_->member(), *place};
  BlockHead& head = *mailbox_->head(block);
  head.size_class = size_class;
  head.member = static_cast<uint64_t>(block.member);
  head.place = block.place;
  return block;
}

void Mapped::release(const BlockPlace& block) {
  if (block.member != mailbox_->member()) {
    return mailbox_->give_back(block);
  }
  const uint64_t bytes = bytes_of_class(mailbox_->head(block)->size_class);
  memory_of(rank_).punch(block.place, bytes);
  std::lock_guard<std::mutex> lock(allocating_);
  free_.give(block.place, bytes);
}

void Mapped::free_returned() {
  mailbox_->take_back([&](const BlockPlace& block) { release(block); });
}

void Mapped::give(std::unique_ptr<Block> given) {
  if (!ours_ || failed_) {
    return;  // a peer may still write there
  }
  const auto* const head = static_cast<const BlockHead*>(given->data);
  const BlockPlace block{static_cast<int64_t>(head->member), head->place};
  const auto bytes = static_cast<int64_t>(bytes_of_class(head->size_class));
  if (closed_ || pool_idle_bytes() + bytes > pool_limit()) {
    release(block);
  } else {
    mailbox_->give_spare(mailbox_->member(), block);
  }
}

int64_t Mapped::idle_bytes() {
  return ours_ && !failed_ ? static_cast<int64_t>(mailbox_->spare_bytes(mailbox_->member())) : 0;
}

void Mapped::trim(int64_t bytes) {
  if (!ours_ || failed_) {
    return;
  }
  free_returned();
  for (uint64_t size_class = kSizeClasses; size_class-- > 0;) {
    while (idle_bytes() > bytes) {
      const auto spare = mailbox_->take_spare(mailbox_->member(), size_class);
      if (!spare.has_value()) {
        break;
      }
      release(*spare);
    }
  }
}

void Mapped::close() {
  std::lock_guard<std::mutex> lock(exchanging_);
  trim(0);
  closed_ = true;
  if (ours_) {
    mailbox_->end(End::left);
  }
}

void Mapped::disown() {
  ours_ = false;
  for (const auto& peer : peers_) {
    if (peer) {
      peer->connection.reset();
    }
  }
}

// ------------------------------------------------------------------- waits

std::string Mapped::why_lost(int64_t rank) const {
  const End end = mailbox_->ended(member_of_[rank]);
  if (end == End::failed) {
    return "its own exchange failed";
  }
  const bool gone = end == End::left || (rank != rank_ && peers_[rank]->connection->is_closed());
  return gone ? "it has left the group, or died" : "";
}

void Mapped::fail() {
  if (ours_) {
    failed_ = true;
    mailbox_->end(End::failed);
  }
}

void Mapped::wait_until(
    const std::function<bool()>& ready,
    const std::vector<int64_t>& ranks,
    std::chrono::milliseconds look,
    const std::string& late) {
  const auto deadline = Clock::now() + timeout_;
  const auto ready_or_ended = [&] {
    return ready() || std::any_of(ranks.begin(), ranks.end(), [&](int64_t p) {
             return mailbox_->ended(member_of_[p]) != End::none;
           });
  };
  while (true) {
    mailbox_->wait(ready_or_ended, std::min(deadline, Clock::now() + look));
    for (const int64_t p : ranks) {
      if (ready()) {
        return;
      }
      const std::string why = why_lost(p);
      if (!why.empty() && !ready()) {
        const std::string name = ranks.size() > 1 ? "rank " + std::to_string(p) + ": " : "";
        throw std::runtime_error(name + why);
      }
    }
    if (Clock::now() >= deadline) {
      throw std::runtime_error(late);
    }
  }
}

void Mapped::wait(uint64_t exchange, int64_t source) {
  const int64_t member = member_of_[source];
  const auto arrived = [&] { return mailbox_->has_arrived(exchange, member); };
  if (ours_) {
    wait_until(
        arrived, {source}, kLook,
        "nothing came within the group's timeout of " + std::to_string(timeout_.count()) + " ms");
  } else if (!arrived()) {
    throw std::runtime_error(kForked);
  }
}

// ------------------------------------------------------------------- exchanges

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
  // No bell rings for room.
  mapped_->wait_until(
      [&] { return mapped_->mailbox_->has_room(number_); }, mapped_->ranks_,
      std::chrono::milliseconds(1),
      "more than " + std::to_string(kSlots) + " exchanges wait for a rank that is behind");
  mapped_->free_returned();
  // This rank's own buffer first: its spares are mapped in this process.
  for (int64_t step = 0; step < mapped_->size(); ++step) {
    const int64_t p = (mapped_->rank_ + step) % mapped_->size();
    if (mapped_->member_of_[p] < 0 || bytes[p] == 0) {
      continue;
    }
    const BlockPlace place = find_or_publish(p, call, static_cast<uint64_t>(bytes[p]));
    BlockHead* const head = mapped_->mailbox_->head(place);
    data_[p] = Mailbox::data(head);
    if (p == mapped_->rank_) {
      buffer_ = std::make_unique<Block>(Block{head, 0, nullptr, mapped_});
    }
  }
}

BlockPlace Mapped::Exchange::find_or_publish(int64_t rank, uint64_t call, uint64_t bytes) {
  Mailbox& mailbox = *mapped_->mailbox_;
  const int64_t owner = mapped_->member_of_[rank];
  auto found = mailbox.find(number_, owner);
  if (!found.has_value()) {
    const uint64_t size_class = size_class_of(sizeof(BlockHead) + bytes);
    const auto spare = mailbox.take_spare(owner, size_class);
    const BlockPlace supplied = spare ? *spare : mapped_->allocate(size_class, bytes);
    BlockHead* const head = mailbox.head(supplied);
    head->call = call;
    head->bytes = bytes;
    if (waits_at_once()) {  // anomaly mode looks for NaN in the whole buffer
      std::memset(Mailbox::data(head), 0, bytes);
    }
    found = mailbox.publish(number_, owner, supplied);
    if (*found == supplied) {
      return supplied;
    }
    mailbox.give_spare(owner, supplied);
  }
  const BlockHead& head = *mailbox.head(*found);
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

void Mapped::Exchange::write(const std::function<void(int64_t, char*)>& write) {
  // Each rank begins with the next one, so that no rank is everybody's last.
  for (int64_t step = 1; step < mapped_->size(); ++step) {
    const int64_t p = (mapped_->rank_ + step) % mapped_->size();
    if (mapped_->reaches(p)) {
      write(p, data_[p]);
      mapped_->mailbox_->deliver(number_, mapped_->member_of_[p]);
    }
  }
  mapped_->mailbox_->pass(number_);
  closed_ = true;
  lock_.unlock();
}

}  // namespace deepsp
