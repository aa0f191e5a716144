#include "plan.h"

#include <algorithm>

namespace deepsp {

Plan::Plan(ShardLayout<int64_t> shards, bool p2p)
    : layout(std::move(shards)), point_to_point(p2p), packed_(layout.parts(), {0}) {
  const size_t count = layout.tensors();
  const int64_t parts = layout.parts();
  int64_t gathered = 0;
  int64_t scattered = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto [least, most] = std::minmax_element(layout.sizes[i].begin(), layout.sizes[i].end());
    in_place.push_back(
        point_to_point ? count == 1 || *most * layout.row_bytes[i] >= kInPlaceBytes
                       : count == 1 && *least == *most);
    gathered_.push_back(gathered);
    scattered_.push_back(scattered);
    for (int64_t p = 0; p < parts; ++p) {
      const int64_t piece = layout.piece(i, p);
      packed_[p].push_back(packed_[p].back() + (in_place[i] ? 0 : piece));
      gathered += in_place[i] ? piece : 0;
    }
    scattered += in_place[i] ? parts * layout.piece(i, layout.rank) : 0;
  }
  const int64_t slot = layout.slot();
  for (int64_t p = 0; p < parts; ++p) {
    gathered_blocks_.push_back(point_to_point ? gathered : p * slot);
    scattered_blocks_.push_back(point_to_point ? scattered : p * slot);
    gathered += packed_bytes(p);
    scattered += packed_bytes(layout.rank);
    largest_ = packed_bytes(p) > packed_bytes(largest_) ? p : largest_;
  }
}

int64_t Plan::gathered(size_t i, int64_t p) const {
  return in_place[i] ? gathered_[i] + layout.row(i, p) * layout.row_bytes[i]
                     : gathered_blocks_[p] + packed_[p][i];
}

int64_t Plan::scattered(size_t i, int64_t p) const {
  return in_place[i] ? scattered_[i] + p * layout.piece(i, layout.rank)
                     : scattered_blocks_[p] + packed_[layout.rank][i];
}

}  // namespace deepsp
