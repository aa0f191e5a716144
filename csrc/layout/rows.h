#pragma once
// Rows of matrices that ranks send each other, any number from each to each. Int is int64_t, or
// c10::SymInt where shapes are symbolic.

#include <cstdint>
#include <vector>

namespace deepsp {

template <class Int>
struct RowCounts {
  std::vector<Int> sent;  // by source and receiver
  int64_t size;           // ranks
  int64_t rank;           // this one

  int64_t ranks() const { return size; }

  // How many rows rank r receives from each rank; `home`: of those that it sent, on their way back.
  std::vector<Int> counts(int64_t r, bool home) const {
    std::vector<Int> counts;
    for (int64_t p = 0; p < size; ++p) {
      counts.push_back(home ? sent[r * size + p] : sent[p * size + r]);
    }
    return counts;
  }
  // From the ranks before `end` (none: all).
  Int total(int64_t r, bool home, int64_t end = INT64_MAX) const {
    Int sum = 0;
    for (int64_t p = 0; p < size && p < end; ++p) {
      sum = sum + (home ? sent[r * size + p] : sent[p * size + r]);
    }
    return sum;
  }

  // The rows of rank r's buffer. A buffer's gradient is the other direction's buffer, so both have
  // the larger one's size.
  Int buffer(int64_t r) const {
    const Int there = total(r, false), back = total(r, true);
    return there > back ? there : back;
  }
};

}  // namespace deepsp
