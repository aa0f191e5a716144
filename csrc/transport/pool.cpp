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

namespace deepsp {
namespace {

// Blocks are multiples of this, so that shapes that differ a little share them.
constexpr size_t kGranule = size_t(64) << 10;
constexpr size_t kAlignment = 64;

struct Block {
  void* data = nullptr;
  size_t bytes = 0;
  std::unique_ptr<Flight> flight;
};

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

// Never destroyed, for the same reason.
FlightTable& table() {
  static FlightTable* const instance = new FlightTable;
  return *instance;
}

void release(void* context) {
  Block* block = static_cast<Block*>(context);
  block->flight.reset();  // waits
  pool().give(block);
}

Block* block_of(const at::Tensor& tensor) {
  const at::DataPtr& data = tensor.storage().data_ptr();
  return data.get_deleter() == &release ? static_cast<Block*>(data.get_context()) : nullptr;
}

}  // namespace

at::Tensor pool_empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  const auto type = c10::scalarTypeToTypeMeta(dtype);
  uint64_t bytes = 0;
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      !c10::safe_multiplies_u64(sizes, &bytes) &&
          !c10::mul_overflows(bytes, uint64_t(type.itemsize()), &bytes) && bytes >> 62 == 0,
      "deepsp: no memory for a buffer of shape ", sizes, ", ", dtype);
  Block* block = pool().take(bytes);
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), bytes, at::DataPtr(block->data, block, &release, at::kCPU),
      /*allocator=*/nullptr,
      /*resizable=*/false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), type);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
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

int64_t pool_idle_bytes() {
  return pool().idle_bytes();
}

int64_t pool_limit() {
  return pool().limit();
}

void pool_set_limit(int64_t bytes) {
  check_at_least(bytes, 0, "bytes");
  pool().set_limit(bytes);
}

void pool_clear() {
  pool().clear();
}

}  // namespace deepsp
