#include "heads.h"

#include <algorithm>

namespace deepsp {

Range split_range(int64_t total, int64_t parts, int64_t index) {
  const int64_t each = total / parts;
  const int64_t more = total % parts;
  const int64_t begin = index * each + std::min(index, more);
  return {begin, begin + each + (index < more ? 1 : 0)};
}

HeadLayout::HeadLayout(std::vector<int64_t> num_heads, int64_t parts, int64_t chunks)
    : num_heads_(std::move(num_heads)),
      parts_(parts),
      chunks_(std::min(chunks, num_heads_[0] / parts)) {
}

Range HeadLayout::reads(size_t i, int64_t rank, int64_t chunk) const {
  const Range own = split_range(num_heads_[0], parts_, rank);
  const Range part = split_range(own.size(), chunks_, chunk);
  const int64_t readers = num_heads_[0] / num_heads_[i];
  return {(own.begin + part.begin) / readers, (own.begin + part.end + readers - 1) / readers};
}

Range HeadLayout::range(size_t i, int64_t rank, int64_t chunk) const {
  Range heads = reads(i, rank, chunk);
  if (chunk > 0) {
    heads.begin = std::max(heads.begin, reads(i, rank, chunk - 1).end);
  }
  return heads;
}

Range HeadLayout::range(size_t i, int64_t rank) const {
  return {reads(i, rank, 0).begin, reads(i, rank, chunks_ - 1).end};
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
