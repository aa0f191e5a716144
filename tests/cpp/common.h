#pragma once
// What the programs under sanitizers share.

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

inline void require(bool fine, const char* what) {
  if (!fine) {
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
  }
}

inline std::mt19937_64 generator(0);

// Now and then a thread lets others go ahead.
inline void nap(std::mt19937_64& random) {
  switch (random() % 64) {
    case 0:
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      break;
    case 1:
      std::this_thread::yield();
  }
}

inline int64_t draw(int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(generator);
}
