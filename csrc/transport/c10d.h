#pragma once
// c10d's own classes, whose headers are large: for the files of this folder.

#include "group.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <string>

namespace deepsp {

template <class T>
std::shared_ptr<T> shared(c10::intrusive_ptr<T> owner) {
  T* const raw = owner.get();
  return {raw, [owner = std::move(owner)](T*) {}};
}

template <class T>
c10::intrusive_ptr<T> intrusive(const std::shared_ptr<T>& pointer) {
  return c10::intrusive_ptr<T>::reclaim_copy(pointer.get());
}

inline std::string name_of(const Group& group) {
  return std::string(group.op) + " of rank " + std::to_string(group.rank) + " in group '" +
         group.name + "' of " + std::to_string(group.size);
}

// Runs `act`, which talks to other ranks; its error says in which exchange, `what()`, which is
// asked only then. `from`: whose block it is that arrives, -1: any.
template <class What, class Act>
auto named(const What& what, int64_t from, const Act& act) {
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
