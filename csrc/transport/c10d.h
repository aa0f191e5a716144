#pragma once
// c10d's own classes, whose headers are large: only for sources of this folder.

#include "group.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <memory>

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

inline std::chrono::milliseconds timeout_of(const Group& group, c10::Device device) {
  return group.pg->getBackend(device.type())->getBackendOptions()->timeout;
}

}  // namespace deepsp
