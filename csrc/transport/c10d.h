#pragma once
// c10d's own classes, whose headers are large: only for sources of this folder.

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

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

}  // namespace deepsp
