#pragma once
// C++ calls of our own ops go through the dispatcher, as Python's do.

#include <ATen/core/dispatch/Dispatcher.h>

namespace deepsp {

template <class Signature>
auto find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace deepsp
