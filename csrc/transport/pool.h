#pragma once
// Buffers on the CPU. A fresh block of tens of MiB costs several copies' worth
// of page faults, so blocks are kept and handed out again: a block goes back to
// the pool when the last tensor on it, autograd's included, lets go.

#include <ATen/core/Tensor.h>

#include <memory>

namespace deepsp {

struct Flight;

// A contiguous uninitialised CPU tensor on a block of the pool.
at::Tensor pool_empty(at::IntArrayRef sizes, at::ScalarType dtype);

// The exchange that is filling the tensor's memory, null where none is. take_flight leaves none
// behind. A block of the pool owns its flight, and waits for it before it is given back; other
// memory's is in a table (flight_table.h).
void set_flight(const at::Tensor& buffer, std::unique_ptr<Flight> flight);
std::unique_ptr<Flight> take_flight(const at::Tensor& buffer);

// Bytes that lie idle; what is in use is never counted. At most `limit` stay.
int64_t pool_idle_bytes();
int64_t pool_limit();
void pool_set_limit(int64_t bytes);
// Gives all idle blocks back to the system.
void pool_clear();

}  // namespace deepsp
