#pragma once
// Finds out, once and by all ranks of a group together, what they want and whose memory they reach.

#include "agreement.h"
#include "mapped.h"
#include "staged.h"

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace deepsp {

// Whether it is "auto" (shared memory where that is possible), "mapped" or "messages".
bool is_transport(std::string_view use);

// Which ranks reach each other's memory. All ranks have the same.
struct Reach {
  // For each rank: the lowest rank it shares memory with; its own, if it shares none.
  std::vector<int64_t> machine;
  // For each rank: why it shares none; empty if it does.
  std::vector<std::string> why;

  bool reaches(int64_t rank, int64_t other) const { return machine[rank] == machine[other]; }
  // No rank shares memory, all for the same reason.
  static Reach none(int64_t size, const std::string& why);
};

// All ranks of the group call these, each with what it wants. A wrong word raises here, on every
// rank: if it raised before, the other ranks would wait. So do different words, and "mapped" if
// some pair of ranks can't reach each other's memory. On the CPU: the peers of this rank, none if
// it shares no memory. Between GPUs: their staged copies, or null.
std::pair<Reach, Peers> map_peers(const Group& group, const std::string& use);
std::pair<Reach, std::shared_ptr<Staged>> stage_peers(
    const Group& group, const std::string& use, c10::Device device);

}  // namespace deepsp
