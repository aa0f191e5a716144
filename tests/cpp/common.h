#pragma once
// What the programs under sanitizers share.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

inline void require(bool fine, const char* what) {
  if (!fine) {
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
  }
}

inline std::mt19937_64 generator(0);

inline int64_t draw(int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(generator);
}
