#include "buffer.h"

namespace deepsp {
namespace {

bool is_sent_in_place(const Shard<int64_t>& shard, bool point_to_point, bool alone) {
  const auto [least, most] = std::minmax_element(shard.sizes.begin(), shard.sizes.end());
  if (shard.outer == 1) {
    return alone || (point_to_point && *most * shard.inner >= kInPlaceBytes);
  }
  return point_to_point && shard.outer <= kRows && *least * shard.inner >= kRowBytes;
}

}  // namespace

BufferLayout::BufferLayout(Shards all, bool p2p)
    : shards(std::move(all)), point_to_point(p2p), packed_(shards.parts(), {0}) {
  const int64_t parts = shards.parts();
  int64_t gathered = 0;
  int64_t scattered = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    in_place_.push_back(is_sent_in_place(shards[i], point_to_point, shards.size() == 1));
    begins_.push_back({0});
    gathered_.push_back(gathered);
    scattered_.push_back(scattered);
    for (int64_t p = 0; p < parts; ++p) {
      const int64_t piece = shards.piece(i, p);
      begins_[i].push_back(begins_[i].back() + shards[i].sizes[p]);
      packed_[p].push_back(packed_[p].back() + (in_place_[i] ? 0 : piece));
      gathered += in_place_[i] ? piece : 0;
      even_ = even_ && shards[i].sizes[p] == shards[i].sizes[0];
    }
    scattered += in_place_[i] ? parts * shards.piece(i, shards.rank) : 0;
  }
  const int64_t slot = shards.slot();
  for (int64_t p = 0; p < parts; ++p) {
    gathered_blocks_.push_back(point_to_point ? gathered : p * slot);
    scattered_blocks_.push_back(scattered);
    gathered += packed_bytes(p);
    scattered += packed_bytes(shards.rank);
  }
}

int64_t BufferLayout::gathered(size_t i, int64_t p) const {
  return is_received_whole(i) ? gathered_[i] + begins_[i][p] * shards[i].inner
                              : gathered_blocks_[p] + packed_[p][i];
}

int64_t BufferLayout::scattered(size_t i, int64_t p) const {
  return in_place_[i] ? scattered_[i] + p * shards.piece(i, shards.rank)
                      : scattered_blocks_[p] + packed_[shards.rank][i];
}

}  // namespace deepsp
