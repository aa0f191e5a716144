#pragma once
// What each rank of a group asks of the transport, and what all ranks know when they have agreed.

#include "agreement.h"

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace deepsp {

// automatic: shared memory where that is possible.
enum class Wanted { automatic, mapped, messages };
// ValueError unless `word` is "auto", "mapped" or "messages"; `name`: the argument's name.
Wanted parse_wanted(const std::string& word, const char* name);

// Which ranks reach each other's memory. All ranks have the same.
struct Reach {
  // For each rank: the lowest rank it shares memory with; its own, if it shares none.
  std::vector<int64_t> machine;
  // For each rank: why it shares none; empty if it does.
  std::vector<std::string> why;

  bool reaches(int64_t rank, int64_t other) const { return machine[rank] == machine[other]; }
  // No rank shares memory, all for the same reason.
  static Reach nobody(int64_t size, const std::string& why);
};

// Ranks may share memory if they have the same: kernel, network namespace and user.
std::string machine_id();

// What a rank asks for. A wrong word in its environment is sent to the other ranks, too: if it
// raised at once, they would wait for this rank.
struct Request {
  Wanted wanted = Wanted::automatic;
  Text<40> unknown_word;  // of DEEPSP_TRANSPORT; empty: it has a known one, or none
};
// `use` if given, else DEEPSP_TRANSPORT.
Request request_of(std::optional<Wanted> use);
// ValueError unless all ranks ask for the same.
void check_requests(const Group& group, const std::function<const Request&(int64_t)>& request_of);

}  // namespace deepsp
