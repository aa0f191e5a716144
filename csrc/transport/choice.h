#pragma once
// How a group's ranks exchange blocks: chosen once for each group and device, by all its ranks
// together.

#include "mapped.h"
#include "staged.h"

#include <memory>

namespace deepsp {

// The group's shared memory, or its staged copies between GPUs; null: it uses neither. All ranks of
// the group make its first call together.
std::shared_ptr<Mapped> mapped_of(const Group& group);
std::shared_ptr<Staged> staged_of(const Group& group, c10::Device device);

}  // namespace deepsp
