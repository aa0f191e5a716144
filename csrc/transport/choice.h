#pragma once
// How a group's blocks travel: chosen once for each group and kind of device, by all its ranks
// together.

#include "mapped.h"
#include "staged.h"

#include <memory>

namespace deepsp {

// That of a group; null where its blocks travel by messages. The first call for a group is made by
// all its ranks together.
std::shared_ptr<Mapped> mapped_of(const Group& group);
std::shared_ptr<Staged> staged_of(const Group& group, c10::Device device);

}  // namespace deepsp
