#pragma once
// A collective that fails, or that another rank never joins, says which and why.

#include "group.h"

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace deepsp {

inline std::string name_of(const Group& group) {
  return std::string(group.op) + " of rank " + std::to_string(group.rank) + " in group '" +
         group.name + "' of " + std::to_string(group.size);
}

// Runs `act`, which talks to other ranks. Its error says in which exchange, `what()`, which is
// asked only then. `from`: whose block it is that arrives, -1: any.
template <class What, class Act>
auto with_context(const What& what, int64_t from, const Act& act) {
  try {
    return act();
  } catch (const std::exception& error) {
    const auto* ours = dynamic_cast<const c10::Error*>(&error);
    TORCH_CHECK_WITH(
        DistBackendError, false, what(), " failed",
        from >= 0 ? " waiting for rank " + std::to_string(from) : std::string(), ": ",
        ours ? ours->what_without_backtrace() : error.what(),
        ". Another rank died, hangs, or makes another call (DEEPSP_DEBUG=1 compares them); the "
        "group can't be used any more");
  }
}

}  // namespace deepsp
