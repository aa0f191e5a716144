#pragma once
// Which ranks of a group reach each other's memory: found out once, by all ranks together.

#include "introduction.h"
#include "shared_memory.h"

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace deepsp {

// Another rank of this machine.
struct Neighbor {
  std::unique_ptr<SharedMemory> memory;
  Descriptor socket;  // stays open as long as the rank is in the group
};

struct Connection {
  Reach reach;
  std::unique_ptr<SharedMemory> memory;              // this rank's; null if it stands alone
  std::vector<std::unique_ptr<Neighbor>> neighbors;  // by rank; null: not reached
};

// All ranks of the group call this. ValueError on every rank if they want different things, or if
// they want memory that some pair can't reach.
Connection connect(const Group& group, const Request& request, std::chrono::milliseconds timeout);

// Whether the rank at the other end of the socket has left.
bool has_left(const Neighbor& neighbor);

}  // namespace deepsp
