#include "heads.h"

#include <algorithm>
#include <numeric>

namespace deepsp {

Range split_range(int64_t total, int64_t parts, int64_t index) {
  const int64_t each = total / parts;
  const int64_t more = total % parts;
  const int64_t begin = index * each + std::min(index, more);
  return {begin, begin + each + (index < more ? 1 : 0)};
}

HeadLayout::HeadLayout(std::vector<int64_t> num_heads, int64_t parts, int64_t chunks, int64_t unit)
    : num_heads_(std::move(num_heads)), parts_(parts), unit_(unit) {
  for (const int64_t heads : num_heads_) {
    unit_ = std::lcm(unit_, num_heads_[0] / heads);
  }
  chunks_ = std::min(chunks, max_chunks());
}

Range HeadLayout::units(int64_t rank) const {
  const Range q = split_range(num_heads_[0], parts_, rank);
  return {q.begin / unit_, (q.end + unit_ - 1) / unit_};
}

int64_t HeadLayout::max_chunks() const {
  int64_t most = num_heads_[0];
  for (int64_t rank = 0; rank < parts_; ++rank) {
    most = std::min(most, units(rank).size());
  }
  return most;
}

Range HeadLayout::query_range(int64_t rank, int64_t chunk) const {
  const Range q = split_range(num_heads_[0], parts_, rank);
  const Range all = units(rank);
  const Range mine = split_range(all.size(), chunks_, chunk);
  // A unit may reach beyond the rank's own heads at either end.
  return {
      std::max(q.begin, (all.begin + mine.begin) * unit_),
      std::min(q.end, (all.begin + mine.end) * unit_)};
}

Range HeadLayout::range(size_t i, int64_t rank, int64_t chunk) const {
  const Range q = query_range(rank, chunk);
  const int64_t readers = num_heads_[0] / num_heads_[i];
  return {q.begin / readers, (q.end + readers - 1) / readers};
}

Range HeadLayout::range(size_t i, int64_t rank) const {
  return {range(i, rank, 0).begin, range(i, rank, chunks_ - 1).end};
}

std::vector<HeadSegment> HeadLayout::segments(size_t i) const {
  std::vector<int64_t> borders;
  for (int64_t rank = 0; rank < parts_; ++rank) {
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      const Range r = range(i, rank, chunk);
      borders.push_back(r.begin);
      borders.push_back(r.end);
    }
  }
  std::sort(borders.begin(), borders.end());
  borders.erase(std::unique(borders.begin(), borders.end()), borders.end());

  std::vector<HeadSegment> result;
  for (size_t n = 0; n + 1 < borders.size(); ++n) {
    HeadSegment segment{{borders[n], borders[n + 1]}, {}, {}};
    for (int64_t rank = 0; rank < parts_; ++rank) {
      for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
        const Range r = range(i, rank, chunk);
        if (r.begin <= segment.heads.begin && segment.heads.end <= r.end) {
          segment.readers.push_back(rank);
          segment.chunks.push_back(chunk);
        }
      }
    }
    result.push_back(std::move(segment));
  }
  return result;
}

}  // namespace deepsp
