#include "pool.h"

#include "../common/checks.h"

#include <ATen/EmptyTensor.h>
#include <c10/util/safe_numerics.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <list>
#include <map>
#include <mutex>
#include <vector>

namespace deepsp {
namespace {

// Blocks are multiples of this, so that shapes that differ a little share them.
constexpr size_t kGranule = size_t(64) << 10;
constexpr size_t kAlignment = 64;

constexpr int64_t kIdleBytes = int64_t(2) << 30;  // of all ranks of a machine
std::atomic<int64_t> set_limit{-1};               // -1: none was set
std::atomic<int64_t> ranks_here{1};

class Pool {
 public:
  Block* take(size_t bytes) {
    const size_t rounded = std::max(kGranule, (bytes + kGranule - 1) / kGranule * kGranule);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      // A block up to a quarter too large is better than a new one.
      auto found = by_size_.lower_bound(rounded);
      if (found != by_size_.end() && found->first <= rounded + rounded / 4) {
        // The one of that size that was given back last: it may still be cached.
        found = std::prev(by_size_.upper_bound(found->first));
        const auto entry = found->second;
        Block* block = entry->release();
        by_size_.erase(found);
        idle_.erase(entry);
        idle_bytes_ -= static_cast<int64_t>(block->bytes);
        return block;
      }
    }
    void* const data = std::aligned_alloc(kAlignment, rounded);
    TORCH_CHECK_WITH(
        OutOfMemoryError, data, "deepsp: no memory for a buffer of ", rounded, " bytes");
    return new Block{data, rounded};
  }

  void give(Block* block) {
    Idle evicted;  // freed outside the lock
    std::lock_guard<std::mutex> lock(mutex_);
    idle_.emplace_front(block);
    by_size_.emplace(block->bytes, idle_.begin());
    idle_bytes_ += static_cast<int64_t>(block->bytes);
    evict(pool_limit(), evicted);
  }

  void trim(int64_t to) {
    Idle evicted;
    std::lock_guard<std::mutex> lock(mutex_);
    evict(to, evicted);
  }

  int64_t idle_bytes() {
    std::lock_guard<std::mutex> lock(mutex_);
    return idle_bytes_;
  }

 private:
  struct Free {
    void operator()(Block* block) const {
      std::free(block->data);
      delete block;
    }
  };
  using Idle = std::list<std::unique_ptr<Block, Free>>;  // most recently used first

  void evict(int64_t to, Idle& evicted) {
    while (idle_bytes_ > to) {
      const auto last = std::prev(idle_.end());
      const size_t bytes = (*last)->bytes;
      auto [it, end] = by_size_.equal_range(bytes);
      while (it->second != last) {
        ++it;
      }
      by_size_.erase(it);
      idle_bytes_ -= static_cast<int64_t>(bytes);
      evicted.splice(evicted.begin(), idle_, last);
    }
  }

  std::mutex mutex_;
  Idle idle_;
  std::multimap<size_t, Idle::iterator> by_size_;
  int64_t idle_bytes_ = 0;
};

// Never destroyed: tensors may outlive static destructors.
Pool& pool() {
  static Pool* const instance = new Pool;
  return *instance;
}

using PeerMemories = std::vector<std::shared_ptr<PeerMemory>>;

std::mutex watched_mutex;
std::vector<std::weak_ptr<PeerMemory>>& watched_memory() {
  static auto* const all = new std::vector<std::weak_ptr<PeerMemory>>;
  return *all;
}

// The caller holds watched_mutex, and lets go of it before the result: freeing one takes locks.
PeerMemories living_locked() {
  PeerMemories living;
  std::vector<std::weak_ptr<PeerMemory>> left;
  for (const auto& weak : watched_memory()) {
    if (auto memory = weak.lock()) {
      living.push_back(std::move(memory));
      left.push_back(weak);
    }
  }
  watched_memory().swap(left);
  return living;
}

PeerMemories living() {
  std::lock_guard<std::mutex> lock(watched_mutex);
  return living_locked();
}

void trim(int64_t to) {
  pool().trim(to);
  int64_t left = to - pool().idle_bytes();
  for (const auto& memory : living()) {
    memory->trim(std::max<int64_t>(left, 0));
    left -= memory->idle_bytes();
  }
}

void release(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  block->flight.reset();  // waits
  if (const std::shared_ptr<PeerMemory> memory = block->memory) {
    return memory->give(std::move(block));
  }
  pool().give(block.release());
  if (pool_idle_bytes() > pool_limit()) {
    pool_trim();
  }
}

size_t bytes_of(at::IntArrayRef sizes, at::ScalarType dtype) {
  uint64_t bytes = 0;
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      !c10::safe_multiplies_u64(sizes, &bytes) &&
          !c10::mul_overflows(bytes, uint64_t(c10::elementSize(dtype)), &bytes) && bytes >> 62 == 0,
      "deepsp: no memory for a buffer of shape ", sizes, ", ", dtype);
  return bytes;
}

}  // namespace

at::Tensor tensor_over(at::DataPtr data, at::IntArrayRef sizes, at::ScalarType dtype) {
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), bytes_of(sizes, dtype), std::move(data),
      /*allocator=*/nullptr,
      /*resizable=*/false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

at::Tensor tensor_on(
    std::unique_ptr<Block> block, size_t offset, at::IntArrayRef sizes, at::ScalarType dtype) {
  char* const data = static_cast<char*>(block->data) + offset;
  return tensor_over(at::DataPtr(data, block.release(), &release, at::kCPU), sizes, dtype);
}

at::Tensor pool_empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  std::unique_ptr<Block> block(pool().take(bytes_of(sizes, dtype)));
  return tensor_on(std::move(block), 0, sizes, dtype);
}

at::Tensor tensor_in(
    const at::Tensor& buffer, int64_t first_byte, at::IntArrayRef sizes, at::ScalarType dtype) {
  char* const data = static_cast<char*>(buffer.storage().mutable_data()) + first_byte;
  const auto free = [](void* whole) { delete static_cast<c10::Storage*>(whole); };
  return tensor_over(
      at::DataPtr(data, new c10::Storage(buffer.storage()), free, at::kCPU), sizes, dtype);
}

Block* block_of(const at::Tensor& tensor) {
  const at::DataPtr& data = tensor.storage().data_ptr();
  return data.get_deleter() == &release ? static_cast<Block*>(data.get_context()) : nullptr;
}

void pool_watch(const std::shared_ptr<PeerMemory>& memory) {
  static const int forks = pthread_atfork(
      [] { watched_mutex.lock(); }, [] { watched_mutex.unlock(); },
      [] {
        const PeerMemories living = living_locked();
        for (const auto& memory : living) {
          memory->disown();
        }
        watched_mutex.unlock();
      });
  TORCH_INTERNAL_ASSERT(forks == 0);
  std::lock_guard<std::mutex> lock(watched_mutex);
  watched_memory().push_back(memory);
}

int64_t pool_idle_bytes() {
  int64_t bytes = pool().idle_bytes();
  for (const auto& memory : living()) {
    bytes += memory->idle_bytes();
  }
  return bytes;
}

void pool_trim() {
  trim(pool_limit());
}

int64_t pool_limit() {
  const int64_t limit = set_limit;
  return limit >= 0 ? limit : kIdleBytes / ranks_here;
}

void pool_share(int64_t ranks) {
  int64_t before = ranks_here;
  while (ranks > before && !ranks_here.compare_exchange_weak(before, ranks)) {
  }
}

void pool_set_limit(int64_t bytes) {
  check_at_least(bytes, 0, "bytes");
  set_limit = bytes;
  pool_trim();
}

void pool_clear() {
  trim(0);
}

}  // namespace deepsp
