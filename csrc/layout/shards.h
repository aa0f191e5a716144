#pragma once
// Tensors whose rows (dimension 0) are shared out among ranks, and how large the pieces
// are that travel together. Sizes in bytes, of the dtype on the wire. Int is int64_t, or
// c10::SymInt where shapes are symbolic.
//
// A block is what one rank holds of all tensors, one after another; both directions move
// blocks: gathering, every rank receives every block; scattering, every rank receives its
// own from everybody. So one buffer size serves both: as many slots as there are ranks,
// each of the size of the largest block.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace deepsp {

template <class Int>
struct ShardLayout {
  std::vector<std::vector<Int>> sizes;  // [tensor][rank]: rows
  std::vector<Int> row_bytes;           // of each tensor
  int64_t rank;                         // this one

  size_t tensors() const { return sizes.size(); }
  int64_t parts() const { return static_cast<int64_t>(sizes[0].size()); }

  Int bytes(size_t i, int64_t p) const { return sizes[i][p] * row_bytes[i]; }

  // The first row of rank p; row(i, parts()) is their number.
  Int row(size_t i, int64_t p) const {
    Int sum = 0;
    for (int64_t r = 0; r < p; ++r) {
      sum = sum + sizes[i][r];
    }
    return sum;
  }

  // What tensor i takes in rank p's block: several tensors begin at multiples of 16
  // bytes, whatever their dtypes; one is left as it is, so that blocks stack to it.
  Int piece(size_t i, int64_t p) const {
    return tensors() == 1 ? bytes(i, p) : (bytes(i, p) + 15) / 16 * 16;
  }

  // Where tensor i begins in rank p's block.
  Int offset(size_t i, int64_t p) const {
    Int sum = 0;
    for (size_t j = 0; j < i; ++j) {
      sum = sum + piece(j, p);
    }
    return sum;
  }

  Int block(int64_t p) const { return offset(tensors(), p); }

  // The largest block.
  Int slot() const {
    Int largest = block(0);
    for (int64_t p = 1; p < parts(); ++p) {
      const Int other = block(p);
      // Not max(): a graph is for one of the two, and its shapes stay polynomials.
      largest = other > largest ? other : largest;
    }
    return largest;
  }

  Int buffer_bytes() const { return slot() * Int(parts()); }
};

}  // namespace deepsp
