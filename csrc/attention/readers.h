#pragma once
// Which query heads of a rank read which of the kv heads that it has received.

#include "../layout/heads.h"

#include <algorithm>
#include <vector>

namespace deepsp {

// Some query heads, and how many of them read each kv head from `kv.begin` on.
struct Readers {
  Range q;
  Range kv;
  std::vector<int64_t> counts;

  Readers(const HeadLayout& layout, int64_t rank, int64_t chunk)
      : Readers(layout.range(0, rank, chunk), layout.num_heads(0) / layout.num_heads(1)) {}

  // `each`: how many query heads read a kv head.
  Readers(Range heads, int64_t each)
      : q(heads), kv{heads.begin / each, (heads.end + each - 1) / each} {
    for (int64_t head = kv.begin; head < kv.end; ++head) {
      counts.push_back(std::min(q.end, (head + 1) * each) - std::max(q.begin, head * each));
    }
  }

  bool uniform() const {
    return std::all_of(
        counts.begin(), counts.end(), [&](int64_t n) { return n == counts.front(); });
  }
};

}  // namespace deepsp
