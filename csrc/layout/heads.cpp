#include "heads.h"

namespace deepsp {

Range split_range(int64_t total, int64_t parts, int64_t index) {
  const int64_t each = total / parts;
  const int64_t more = total % parts;
  const int64_t begin = index * each + std::min(index, more);
  return {begin, begin + each + (index < more ? 1 : 0)};
}

HeadLayout::HeadLayout(
    std::vector<int64_t> num_heads, int64_t ranks, int64_t chunks, int64_t query_parts)
    : num_heads_(std::move(num_heads)),
      ranks_(ranks),
      query_parts_(query_parts),
      parts_(query_parts == kAuto ? ranks : query_parts),
      chunks_(std::min<int64_t>(chunks, query_parts == 1 ? num_heads_[0] / ranks : 2)) {
}

std::vector<Cell> HeadLayout::cells(int64_t rank, int64_t chunk) const {
  const int64_t heads = num_heads_[0];
  if (query_parts_ == 1) {
    return {{queries(rank, chunk), {0, 1}}};
  }
  if (query_parts_ != kAuto) {
    const int64_t groups = ranks_ / query_parts_;
    const int64_t part = rank / groups;
    return {{split_range(heads, groups, rank % groups), {part, part + 1}}};
  }
  // A head's queries are cut into `ranks` parts; each rank has as many parts as there are heads.
  std::vector<Cell> cells;
  for (int64_t at = rank * heads; at < (rank + 1) * heads;) {
    const int64_t head = at / ranks_, first = at % ranks_;
    const int64_t left = (rank + 1) * heads - at;
    if (first == 0 && left >= ranks_) {
      cells.push_back({{head, head + left / ranks_}, {0, ranks_}});
      at += left / ranks_ * ranks_;
    } else {
      const int64_t end = std::min(ranks_, first + left);
      cells.push_back({{head, head + 1}, {first, end}});
      at += end - first;
    }
  }
  return cells;
}

int64_t HeadLayout::most_cells() const {
  size_t most = 0;
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    most = std::max(most, cells(rank).size());
  }
  return static_cast<int64_t>(most);
}

Range HeadLayout::queries(int64_t rank, int64_t chunk) const {
  if (query_parts_ == 1) {
    const Range own = split_range(num_heads_[0], ranks_, rank);
    const Range part = split_range(own.size(), chunks_, chunk);
    return {own.begin + part.begin, own.begin + part.end};
  }
  const std::vector<Cell> cells = this->cells(rank, chunk);
  return {cells.front().heads.begin, cells.back().heads.end};
}

Range HeadLayout::reads(size_t i, int64_t rank, int64_t chunk) const {
  const Range heads = queries(rank, chunk);
  const int64_t readers = num_heads_[0] / num_heads_[i];
  return {heads.begin / readers, (heads.end + readers - 1) / readers};
}

Range HeadLayout::range(size_t i, int64_t rank, int64_t chunk) const {
  Range heads = reads(i, rank, chunk);
  if (chunk > 0 && !(cuts_queries() && i == 0)) {
    heads.begin = std::max(heads.begin, reads(i, rank, chunk - 1).end);
  }
  return heads;
}

Range HeadLayout::range(size_t i, int64_t rank) const {
  return {reads(i, rank, 0).begin, reads(i, rank, chunks_ - 1).end};
}

std::vector<HeadSegment> HeadLayout::segments(size_t i) const {
  struct Reader {
    Range heads;
    int64_t rank;
    int64_t chunk;
  };
  std::vector<Reader> readers;
  std::vector<int64_t> borders;
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      const Range heads = range(i, rank, chunk);
      if (heads.size() > 0) {
        readers.push_back({heads, rank, chunk});
        borders.push_back(heads.begin);
        borders.push_back(heads.end);
      }
    }
  }
  std::sort(borders.begin(), borders.end());
  borders.erase(std::unique(borders.begin(), borders.end()), borders.end());

  std::vector<HeadSegment> result;
  for (size_t n = 0; n + 1 < borders.size(); ++n) {
    result.push_back({{borders[n], borders[n + 1]}, {}, {}});
  }
  for (const Reader& reader : readers) {
    const auto first = std::lower_bound(borders.begin(), borders.end(), reader.heads.begin);
    for (size_t n = first - borders.begin(); borders[n] < reader.heads.end; ++n) {
      result[n].readers.push_back(reader.rank);
      result[n].chunks.push_back(reader.chunk);
    }
  }
  return result;
}

}  // namespace deepsp
