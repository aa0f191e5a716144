#include "shares.h"

namespace deepsp {

ShareLayout::ShareLayout(std::vector<int64_t> num_heads, int64_t ranks, int64_t query_parts)
    : num_heads_(std::move(num_heads)),
      ranks_(ranks),
      query_parts_(query_parts),
      parts_(query_parts == kAuto ? ranks : query_parts) {
}

std::vector<Cell> ShareLayout::cells(int64_t rank) const {
  const int64_t heads = num_heads_[0];
  if (query_parts_ != kAuto) {
    const int64_t groups = ranks_ / query_parts_;
    const int64_t part = rank / groups;
    return {{split_range(heads, groups, rank % groups), {part, part + 1}}};
  }
  // In `ranks` parts of a head, of which each rank has as many as there are heads.
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

int64_t ShareLayout::most_cells() const {
  size_t most = 0;
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    most = std::max(most, cells(rank).size());
  }
  return static_cast<int64_t>(most);
}

Range ShareLayout::reads(size_t i, int64_t rank) const {
  const int64_t readers = num_heads_[0] / num_heads_[i];
  const std::vector<Cell> cells = this->cells(rank);
  return {cells.front().heads.begin / readers, (cells.back().heads.end + readers - 1) / readers};
}

}  // namespace deepsp
