#pragma once
// Errors of collectives: they name the exchange, the ranks that it waits for, and the reason.

#include "group.h"

#include <c10/util/Exception.h>

#include <exception>
#include <string>
#include <vector>

namespace deepsp {

inline std::string describe(const Group& group) {
  return std::string(group.op) + " of rank " + std::to_string(group.rank) + " in group '" +
         group.name + "' of " + std::to_string(group.size);
}

// "rank 1", "ranks 1 and 2".
inline std::string list_ranks(const std::vector<int64_t>& ranks) {
  std::string names = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    names += i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ";
    names += std::to_string(ranks[i]);
  }
  return names;
}

inline std::string message_of(const std::exception& error) {
  const auto* ours = dynamic_cast<const c10::Error*>(&error);
  return ours ? ours->what_without_backtrace() : error.what();
}

// `ranks`: those whose block is missing; empty if that is unknown.
[[noreturn]] inline void raise_failed(
    const std::string& exchange, const std::vector<int64_t>& ranks, const std::string& why) {
  TORCH_CHECK_WITH(
      DistBackendError, false, exchange, " failed",
      ranks.empty() ? std::string() : " waiting for " + list_ranks(ranks), ": ", why,
      ". Another rank died, hangs, or makes another call (DEEPSP_DEBUG=1 compares them); the "
      "group can't be used any more");
}

// Runs `act`, which communicates; its error names `exchange()`, which is called only then, and the
// rank whose block it waits for (-1: any).
template <class Exchange, class Act>
auto with_context(const Exchange& exchange, int64_t source, const Act& act) {
  try {
    return act();
  } catch (const std::exception& error) {
    const std::vector<int64_t> ranks = source < 0 ? std::vector<int64_t>{} : std::vector{source};
    raise_failed(exchange(), ranks, message_of(error));
  }
}
template <class Act>
auto with_context(const Group& group, int64_t source, const Act& act) {
  return with_context([&] { return describe(group); }, source, act);
}

}  // namespace deepsp
