#pragma once
// Which ranks of a group run on one machine: they share memory, and send messages to all others.

#include <algorithm>
#include <cstdint>
#include <vector>

namespace deepsp {

struct Machines {
  std::vector<std::vector<int64_t>> ranks;  // of each machine; the one with rank 0 comes first
  std::vector<int64_t> of;                  // by rank: its machine

  // `first`: for each rank, the lowest one on its machine.
  explicit Machines(const std::vector<int64_t>& first) {
    for (size_t p = 0; p < first.size(); ++p) {
      const bool is_first = first[p] == static_cast<int64_t>(p);
      of.push_back(is_first ? count() : of[first[p]]);
      ranks.resize(std::max(count(), of[p] + 1));
      ranks[of[p]].push_back(static_cast<int64_t>(p));
    }
  }

  int64_t count() const { return static_cast<int64_t>(ranks.size()); }
  // How many ranks of the machine are below this one.
  int64_t below(int64_t machine, int64_t rank) const {
    const std::vector<int64_t>& all = ranks[machine];
    return std::lower_bound(all.begin(), all.end(), rank) - all.begin();
  }
  // Those of the rank's machine.
  const std::vector<int64_t>& with(int64_t rank) const { return ranks[of[rank]]; }
  // The rank of `machine` that sums what the machine's ranks have for `rank`: the rank itself, or
  // they take turns.
  int64_t sums_for(int64_t machine, int64_t rank) const {
    const std::vector<int64_t>& all = ranks[machine];
    return of[rank] == machine ? rank : all[(rank - below(machine, rank)) % all.size()];
  }
};

}  // namespace deepsp
