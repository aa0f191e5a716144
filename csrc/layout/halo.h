#pragma once
// The halo of a rank: the n tokens of the sequence before the rank's first one, as far as there are
// so many. Each rank before holds a block of it, the last tokens of its part. Int is int64_t, or
// c10::SymInt where shapes are symbolic.

#include <cstdint>
#include <vector>

namespace deepsp {

template <class Int>
struct Halo {
  Int n;
  std::vector<Int> lens;  // tokens of each rank
  int64_t rank;           // this one

  int64_t ranks() const { return static_cast<int64_t>(lens.size()); }

  // Calls act(p, tokens) for the ranks p that send to rank r, the nearest one first: the blocks of
  // its halo, or, `home`, blocks that go back to r, which held them. What r sends in one direction
  // is what it receives in the other one.
  template <class Act>
  void each_block(int64_t r, bool home, const Act& act) const {
    const int64_t step = home ? 1 : -1;
    Int left = n;
    for (int64_t p = r + step; p >= 0 && p < ranks() && left > 0; p += step) {
      const Int& held = lens[home ? r : p];
      // Not min(): a graph is for one of the two, and its shapes stay polynomials.
      act(p, held < left ? held : left);
      left = left - lens[p];
    }
  }

  // How many tokens rank r receives from each rank; from those before `end` (none: all).
  std::vector<Int> counts(int64_t r, bool home) const {
    std::vector<Int> counts(lens.size(), Int(0));
    each_block(r, home, [&](int64_t p, const Int& tokens) { counts[p] = tokens; });
    return counts;
  }
  Int total(int64_t r, bool home, int64_t end = INT64_MAX) const {
    Int sum = 0;
    each_block(r, home, [&](int64_t p, const Int& tokens) { sum = p < end ? sum + tokens : sum; });
    return sum;
  }

  // The tokens of rank r's buffer. A buffer's gradient is the other direction's buffer, so both
  // have the larger one's size.
  Int buffer(int64_t r) const {
    const Int fetched = total(r, false), back = total(r, true);
    return fetched > back ? fetched : back;
  }
};

}  // namespace deepsp
