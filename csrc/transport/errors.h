#pragma once
// A collective that fails, or that another rank never joins, says which and why.

#include "group.h"

#include <c10/util/Exception.h>

#include <exception>
#include <string>
#include <vector>

namespace deepsp {

inline std::string name_of(const Group& group) {
  return std::string(group.op) + " of rank " + std::to_string(group.rank) + " in group '" +
         group.name + "' of " + std::to_string(group.size);
}

// "rank 1", "ranks 1 and 2".
inline std::string names_of(const std::vector<int64_t>& ranks) {
  std::string names = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    names += i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ";
    names += std::to_string(ranks[i]);
  }
  return names;
}

inline std::string text_of(const std::exception& error) {
  const auto* ours = dynamic_cast<const c10::Error*>(&error);
  return ours ? ours->what_without_backtrace() : error.what();
}

// `what`: the exchange; `ranks`: those whose block hasn't come, empty: unknown.
[[noreturn]] inline void raise_failed(
    const std::string& what, const std::vector<int64_t>& ranks, const std::string& why) {
  TORCH_CHECK_WITH(
      DistBackendError, false, what, " failed",
      ranks.empty() ? std::string() : " waiting for " + names_of(ranks), ": ", why,
      ". Another rank died, hangs, or makes another call (DEEPSP_DEBUG=1 compares them); the "
      "group can't be used any more");
}

// Runs `act`, which talks to other ranks. Its error says in which exchange, `what()`, which is
// asked only then. `from`: whose block it is that arrives, -1: any.
template <class What, class Act>
auto with_context(const What& what, int64_t from, const Act& act) {
  try {
    return act();
  } catch (const std::exception& error) {
    raise_failed(
        what(), from >= 0 ? std::vector<int64_t>{from} : std::vector<int64_t>{}, text_of(error));
  }
}

}  // namespace deepsp
