#pragma once
// Which query heads of a rank read which of the kv heads that it has received.

#include "../layout/heads.h"

#include <algorithm>
#include <vector>

namespace deepsp {

// The kv heads that some query heads read, and how many of them read each.
struct Readers {
  Range kv;
  std::vector<int64_t> counts;

  // `each`: how many query heads read a kv head.
  Readers(Range q, int64_t each) : kv{q.begin / each, (q.end + each - 1) / each} {
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
