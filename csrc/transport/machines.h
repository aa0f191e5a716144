#pragma once
// Which ranks of a group run on one machine: they share memory, and send messages to all others.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

namespace deepsp {

struct Machines {
  std::vector<std::vector<int64_t>> ranks;  // of each machine; the one with rank 0 comes first
  std::vector<int64_t> of;                  // by rank: its machine

  // `first`: for each rank, the lowest one on its machine. Null if there is one machine, or if each
  // has one rank.
  static std::shared_ptr<const Machines> from(const std::vector<int64_t>& first) {
    auto machines = std::make_shared<Machines>();
    for (size_t p = 0; p < first.size(); ++p) {
      if (first[p] == static_cast<int64_t>(p)) {
        machines->of.push_back(static_cast<int64_t>(machines->ranks.size()));
        machines->ranks.emplace_back();
      } else {
        machines->of.push_back(machines->of[first[p]]);
      }
      machines->ranks[machines->of[p]].push_back(static_cast<int64_t>(p));
    }
    const size_t number = machines->ranks.size();
    return number == 1 || number == first.size() ? nullptr : machines;
  }

  int64_t count() const { return static_cast<int64_t>(ranks.size()); }
  // How many ranks of the machine are below this one.
  int64_t below(int64_t machine, int64_t rank) const {
    const std::vector<int64_t>& all = ranks[machine];
    return std::lower_bound(all.begin(), all.end(), rank) - all.begin();
  }

  // The rank of `machine` that sums what the machine's ranks have for `rank`: the rank itself, or
  // the machine's ranks take turns.
  int64_t sums_for(int64_t machine, int64_t rank) const {
    const std::vector<int64_t>& all = ranks[machine];
    return of[rank] == machine
               ? rank
               : all[(rank - below(machine, rank)) % static_cast<int64_t>(all.size())];
  }
};

}  // namespace deepsp
