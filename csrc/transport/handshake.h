#pragma once
// Finds out which ranks of a group share memory, and maps it: once, by all ranks together.

#include "mapped.h"
#include "request.h"

#include <chrono>
#include <utility>

namespace deepsp {

// All ranks of the group call this. Returns the peers of this rank, none if it shares no memory.
// ValueError on every rank if they want different things, or if they want memory that some pair
// can't reach.
std::pair<Reach, Peers> map_peers(
    const Group& group, const Request& request, std::chrono::milliseconds timeout);

}  // namespace deepsp
