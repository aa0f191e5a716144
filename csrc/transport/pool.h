#pragma once
// Buffers on the CPU. A fresh block of tens of MiB costs several copies' worth
// of page faults, so blocks are kept and handed out again: a block goes back to
// the pool when the last tensor on it, autograd's included, lets go.

#include <ATen/core/Tensor.h>

#include <memory>

namespace deepsp {

struct Flight;
class Memory;

// What a buffer's tensors lie on.
struct Block {
  void* data = nullptr;
  size_t bytes = 0;
  std::unique_ptr<Flight> flight;
  std::shared_ptr<Memory> memory = nullptr;  // that it belongs to; null: the pool's own
};

// Memory that keeps idle blocks of its own, which count as the pool's do.
class Memory {
 public:
  virtual ~Memory() = default;
  // A block that no tensor is on any more. Its flight has ended.
  virtual void give(std::unique_ptr<Block> block) = 0;
  virtual int64_t idle_bytes() = 0;
  // Frees idle blocks until no more than so many bytes are left.
  virtual void trim(int64_t bytes) = 0;
};
// From here on it counts.
void pool_watch(const std::shared_ptr<Memory>& memory);

// A contiguous uninitialised CPU tensor on a block of the pool.
at::Tensor pool_empty(at::IntArrayRef sizes, at::ScalarType dtype);
// A tensor on a block, from `offset` bytes on.
at::Tensor tensor_on(
    std::unique_ptr<Block> block, size_t offset, at::IntArrayRef sizes, at::ScalarType dtype);
// A contiguous tensor with storage of its own on part of the memory of `buffer`, which lives as
// long.
at::Tensor tensor_in(
    const at::Tensor& buffer, int64_t first_byte, at::IntArrayRef sizes, at::ScalarType dtype);

// The exchange that is filling the tensor's memory, null where none is. take_flight leaves none
// behind. A block of the pool owns its flight, and waits for it before it is given back; other
// memory's is in a table (flight_table.h).
void set_flight(const at::Tensor& buffer, std::unique_ptr<Flight> flight);
std::unique_ptr<Flight> take_flight(const at::Tensor& buffer);

// Bytes that lie idle; what is in use is never counted. At most `limit` stay.
int64_t pool_idle_bytes();
int64_t pool_limit();
// Frees what is over the limit: others may have given a rank blocks that they took for it.
void pool_trim();
void pool_set_limit(int64_t bytes);
// Gives all idle blocks back to the system.
void pool_clear();

}  // namespace deepsp
