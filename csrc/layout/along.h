#pragma once
// A tensor shared out along one of its dimensions, as blocks of bytes that travel. Seen from that
// dimension it is [outer, n, inner]; rank p holds [outer, sizes[p], inner]. Int is int64_t, or
// c10::SymInt where shapes are symbolic.
//
// A buffer has as many slots as there are ranks, each as large as the largest block, in both
// directions: gathering, every rank receives every block; scattering, its own from everybody.

#include <cstdint>
#include <utility>
#include <vector>

namespace deepsp {

template <class Int>
struct AlongLayout {
  Int outer;
  std::vector<Int> sizes;
  Int inner;
  int64_t rank;  // this one

  AlongLayout(Int outer, std::vector<Int> sizes, Int inner, int64_t rank)
      : outer(outer), sizes(std::move(sizes)), inner(inner), rank(rank) {
    if (parts() == 1) {  // nothing is shared out: one block, wherever the dimension is
      this->inner = outer * inner;
      this->outer = 1;
    }
  }

  int64_t parts() const { return static_cast<int64_t>(sizes.size()); }

  // Where rank p's part begins along n; begin(parts()) is n.
  Int begin(int64_t p) const {
    Int sum = 0;
    for (int64_t r = 0; r < p; ++r) {
      sum = sum + sizes[r];
    }
    return sum;
  }

  // Elements of a row of the whole, and of rank p's part: what lies together.
  Int row() const { return begin(parts()) * inner; }
  Int row(int64_t p) const { return sizes[p] * inner; }
  // Elements of rank p's block, and of the whole.
  Int block(int64_t p) const { return outer * row(p); }
  Int elements() const { return outer * row(); }

  Int slot() const {
    Int largest = block(0);
    for (int64_t p = 1; p < parts(); ++p) {
      const Int other = block(p);
      // Not max(): a graph is for one of the two, and its shapes stay polynomials.
      largest = other > largest ? other : largest;
    }
    return largest;
  }
};

}  // namespace deepsp
