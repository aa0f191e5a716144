#pragma once
// Tensors that are shared out among ranks, each along one of its dimensions, and the blocks that
// are sent. Seen from that dimension a tensor is [outer, n, inner]; rank p holds
// [outer, sizes[p], inner]. inner counts bytes of the dtype on the wire where tensors share a
// block, else either bytes or elements. Int is int64_t, or c10::SymInt where shapes are symbolic.
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
struct Shard {
  Int outer;
  std::vector<Int> sizes;
  Int inner;

  int64_t parts() const { return static_cast<int64_t>(sizes.size()); }

  // Where rank p's part begins along n; begin(parts()) is n.
  Int begin(int64_t p) const {
    Int sum = 0;
    for (int64_t r = 0; r < p; ++r) {
      sum = sum + sizes[r];
    }
    return sum;
  }

  // What lies together, of the full tensor, and of rank p's part.
  Int row() const { return begin(parts()) * inner; }
  Int row(int64_t p) const { return sizes[p] * inner; }
  // All of the full tensor, and of rank p's part.
  Int full() const { return outer * row(); }
  Int part(int64_t p) const { return outer * row(p); }
};

template <class Int>
struct ShardLayout {
  std::vector<Shard<Int>> tensors;
  int64_t rank;  // this one

  int64_t parts() const { return tensors[0].parts(); }
  const Shard<Int>& operator[](size_t i) const { return tensors[i]; }
  size_t size() const { return tensors.size(); }

  // What tensor i takes in rank p's block: several tensors begin at multiples of 16
  // bytes, whatever their dtypes; one is left as it is, so that blocks stack to it.
  Int piece(size_t i, int64_t p) const {
    const Int part = tensors[i].part(p);
    return size() == 1 ? part : (part + 15) / 16 * 16;
  }

  // Where tensor i begins in rank p's block.
  Int offset(size_t i, int64_t p) const {
    Int sum = 0;
    for (size_t j = 0; j < i; ++j) {
      sum = sum + piece(j, p);
    }
    return sum;
  }

  Int block(int64_t p) const { return offset(size(), p); }

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
};

}  // namespace deepsp
