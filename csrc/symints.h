#pragma once
// Symbolic sizes as plain ones, in kernels, where all are known.

#include <c10/core/SymIntArrayRef.h>

#include <vector>

namespace deepsp {

inline std::vector<int64_t> ints(c10::SymIntArrayRef values) {
  std::vector<int64_t> result;
  for (const c10::SymInt& value : values) {
    result.push_back(value.guard_int(__FILE__, __LINE__));
  }
  return result;
}

}  // namespace deepsp
