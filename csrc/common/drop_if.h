#pragma once
// Removes entries of a map by their values, as std::erase_if would, which C++17 lacks.

#include <iterator>

namespace deepsp {

template <class Map, class IsGone>
void drop_if(Map& map, const IsGone& is_gone) {
  for (auto it = map.begin(); it != map.end();) {
    it = is_gone(it->second) ? map.erase(it) : std::next(it);
  }
}

}  // namespace deepsp
