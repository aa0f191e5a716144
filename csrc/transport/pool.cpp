#include "pool.h"

#include "../common/checks.h"
#include "flight.h"
#include "flight_table.h"

#include <ATen/EmptyTensor.h>
#include <c10/util/safe_numerics.h>

#include <algorithm>
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

class Pool {
 public:
  Block* take(size_t bytes) {
    const size_t rounded = std::max(kGranule, (bytes + kGranule - 1) / kGranule * kGranule);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      // A block up to a quarter too large is better than a new one.
      auto found = by_size_.lower_bound(rounded);
      if (found != by_size_.end() && found->first <= rounded + rounded / 4) {
        // Of that size, the one that was given back last: it may still be cached.
        found = std::prev(by_size_.upper_bound(found->first));
        const auto entry = found->second;
        Block* block = entry->release();
        by_size_.erase(found);
        idle_.erase(entry);
        idle_bytes_ -= block->bytes;
        return block;
      }
    }
    auto block = std::make_unique<Block>();
    block->bytes = rounded;
    block->data = std::aligned_alloc(kAlignment, rounded);
    TORCH_CHECK_WITH(
        OutOfMemoryError, block->data, "deepsp: no memory for a buffer of ", rounded, " bytes");
    return block.release();
  }

  void give(Block* block) {
    std::list<std::unique_ptr<Block, Free>> evicted;  // freed outside the lock
    std::lock_guard<std::mutex> lock(mutex_);
    idle_.emplace_front(block);
    by_size_.emplace(block->bytes, idle_.begin());
    idle_bytes_ += block->bytes;
    evict(limit_, evicted);
  }

  void set_limit(int64_t bytes) {
    std::list<std::unique_ptr<Block, Free>> evicted;
    std::lock_guard<std::mutex> lock(mutex_);
    limit_ = bytes;
    evict(limit_, evicted);
  }

  void clear() {
    std::list<std::unique_ptr<Block, Free>> evicted;
    std::lock_guard<std::mutex> lock(mutex_);
    evict(0, evicted);
  }

  int64_t idle_bytes() {
    std::lock_guard<std::mutex> lock(mutex_);
    return idle_bytes_;
  }

  int64_t limit() {
    std::lock_guard<std::mutex> lock(mutex_);
    return limit_;
  }

 private:
  struct Free {
    void operator()(Block* block) const {
      std::free(block->data);
      delete block;
    }
  };
  using Idle = std::list<std::unique_ptr<Block, Free>>;  // most recently used first

  void evict(int64_t limit, Idle& evicted) {
    while (idle_bytes_ > limit) {
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
  int64_t limit_ = int64_t(2) << 30;
};

// Never destroyed: tensors may outlive static destructors.
Pool& pool() {
  static Pool* const instance = new Pool;
  return *instance;
}

// Of other memory, what lives.
class Watched {
 public:
  void add(const std::shared_ptr<Memory>& memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    all_.push_back(memory);
  }

  std::vector<std::shared_ptr<Memory>> living() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<Memory>> found;
    for (auto it = all_.begin(); it != all_.end();) {
      if (auto memory = it->lock()) {
        found.push_back(std::move(memory));
        ++it;
      } else {
        it = all_.erase(it);
      }
    }
    return found;
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<Memory>> all_;
};

Watched& watched_memory() {
  static Watched* const instance = new Watched;
  return *instance;
}

// Never destroyed, for the same reason.
FlightTable& table() {
  static FlightTable* const instance = new FlightTable;
  return *instance;
}

void release(void* context) {
  Block* block = static_cast<Block*>(context);
  std::unique_ptr<Block> owned(block);
  block->flight.reset();  // waits
  const std::shared_ptr<Memory> memory = block->memory;
  if (memory) {
    return memory->give(std::move(owned));
  }
  pool().give(owned.release());
  if (pool_idle_bytes() > pool_limit()) {
    pool_trim();
  }
}

Block* block_of(const at::Tensor& tensor) {
  const at::DataPtr& data = tensor.storage().data_ptr();
  return data.get_deleter() == &release ? static_cast<Block*>(data.get_context()) : nullptr;
}

}  // namespace

namespace {

size_t bytes_of(at::IntArrayRef sizes, at::ScalarType dtype) {
  uint64_t bytes = 0;
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      !c10::safe_multiplies_u64(sizes, &bytes) &&
          !c10::mul_overflows(bytes, uint64_t(c10::elementSize(dtype)), &bytes) && bytes >> 62 == 0,
      "deepsp: no memory for a buffer of shape ", sizes, ", ", dtype);
  return bytes;
}

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

}  // namespace

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
  const auto let_go = [](void* whole) { delete static_cast<c10::Storage*>(whole); };
  return tensor_over(
      at::DataPtr(data, new c10::Storage(buffer.storage()), let_go, at::kCPU), sizes, dtype);
}

void set_flight(const at::Tensor& buffer, std::unique_ptr<Flight> flight) {
  Block* block = block_of(buffer);
  if (!block) {
    return table().set(buffer.storage(), std::move(flight));
  }
  TORCH_INTERNAL_ASSERT(!block->flight);
  block->flight = std::move(flight);
}

std::unique_ptr<Flight> take_flight(const at::Tensor& buffer) {
  Block* block = block_of(buffer);
  return block ? std::move(block->flight) : table().take(buffer.storage());
}

void pool_watch(const std::shared_ptr<Memory>& memory) {
  watched_memory().add(memory);
}

int64_t pool_idle_bytes() {
  int64_t bytes = pool().idle_bytes();
  for (const auto& memory : watched_memory().living()) {
    bytes += memory->idle_bytes();
  }
  return bytes;
}

namespace {

void trim(int64_t limit) {
  int64_t left = limit - pool().idle_bytes();
  for (const auto& memory : watched_memory().living()) {
    memory->trim(std::max<int64_t>(left, 0));
    left -= memory->idle_bytes();
  }
}

}  // namespace

void pool_trim() {
  trim(pool_limit());
}

int64_t pool_limit() {
  return pool().limit();
}

void pool_set_limit(int64_t bytes) {
  check_at_least(bytes, 0, "bytes");
  pool().set_limit(bytes);
  trim(bytes);
}

void pool_clear() {
  pool().clear();
  trim(0);
}

}  // namespace deepsp
