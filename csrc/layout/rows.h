#pragma once
// Rows of matrices that ranks send each other, in blocks: any number from each rank to each, or
// halos. The halo of a rank is the n tokens of the sequence before its first one, as far as there
// are so many; each rank before holds a block of it, the last tokens of its part. Int is int64_t,
// or c10::SymInt where shapes are symbolic.

#include <cstdint>
#include <optional>
#include <vector>

namespace deepsp {

template <class Int>
struct RowPlan {
  std::vector<Int> counts;  // halos: tokens of each rank; else rows, by source and receiver
  std::optional<Int> halo;  // n
  int64_t size;             // ranks
  int64_t rank;             // this one

  int64_t ranks() const { return size; }

  // Calls act(p, rows) for the blocks that rank r receives from ranks p, or, `home`, for those that
  // go back to r, which sent them. What r sends in one direction it receives in the other one.
  // Halos: the nearest rank first.
  template <class Act>
  void each_block(int64_t r, bool home, const Act& act) const {
    if (!halo.has_value()) {
      for (int64_t p = 0; p < size; ++p) {
        act(p, counts[home ? r * size + p : p * size + r]);
      }
      return;
    }
    const int64_t step = home ? 1 : -1;
    Int left = *halo;
    for (int64_t p = r + step; p >= 0 && p < size && left > 0; p += step) {
      const Int& held = counts[home ? r : p];
      // Not min(): a graph is for one of the two, and its shapes stay polynomials.
      act(p, held < left ? held : left);
      left = left - counts[p];
    }
  }

  // How many rows rank r receives from each rank; from those before `end` (none: all).
  std::vector<Int> received(int64_t r, bool home) const {
    std::vector<Int> rows(size, Int(0));
    each_block(r, home, [&](int64_t p, const Int& n) { rows[p] = n; });
    return rows;
  }
  Int total(int64_t r, bool home, int64_t end = INT64_MAX) const {
    Int sum = 0;
    each_block(r, home, [&](int64_t p, const Int& n) { sum = p < end ? sum + n : sum; });
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
