#pragma once
// Buffers on the CPU. A fresh block of tens of MiB costs several copies' worth of page faults, so
// the pool keeps blocks and hands them out again: a block goes back to it when the last tensor on
// it, autograd's included, is freed.

#include "flight.h"

#include <ATen/core/Tensor.h>

#include <memory>

namespace deepsp {

// The memory of a buffer, and the flight that is filling it.
struct Block {
  void* data = nullptr;
  size_t bytes = 0;
  std::unique_ptr<Flight> flight = nullptr;
  std::shared_ptr<PeerMemory> memory = nullptr;  // that it is part of; null: the pool's own
};

// A contiguous uninitialised CPU tensor on a block of the pool.
at::Tensor pool_empty(at::IntArrayRef sizes, at::ScalarType dtype);
// A contiguous CPU tensor on `data`.
at::Tensor tensor_over(at::DataPtr data, at::IntArrayRef sizes, at::ScalarType dtype);
// A tensor on a block, from `offset` bytes on.
at::Tensor tensor_on(
    std::unique_ptr<Block> block, size_t offset, at::IntArrayRef sizes, at::ScalarType dtype);
// A contiguous tensor with storage of its own on part of the memory of `buffer`, which it keeps
// alive.
at::Tensor tensor_in(
    const at::Tensor& buffer, int64_t first_byte, at::IntArrayRef sizes, at::ScalarType dtype);
// The block that a tensor lies on; null: it isn't the pool's.
Block* block_of(const at::Tensor& tensor);

// From here on the pool counts and trims its idle blocks, and disowns it in forked children.
void pool_watch(const std::shared_ptr<PeerMemory>& memory);

// Bytes that lie idle; what is in use is never counted. At most `limit` stay: unless one was set,
// 2 GiB for all ranks of this machine together.
int64_t pool_idle_bytes();
int64_t pool_limit();
// This machine runs so many ranks of a group.
void pool_share(int64_t ranks);
// Frees what is over the limit: peers give a rank back blocks that they used for it.
void pool_trim();
void pool_set_limit(int64_t bytes);
// Gives all idle blocks back to the system.
void pool_clear();

}  // namespace deepsp
