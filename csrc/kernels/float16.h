#pragma once
// bfloat16 and float16 as bits on the CPU; rounding is to nearest even.

#include <cstdint>
#include <cstring>

namespace deepsp {

struct BFloat16 {
  uint16_t bits;
  static float load(BFloat16 x) {
    const uint32_t wide = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &wide, 4);
    return f;
  }
  static BFloat16 store(float f) {
    uint32_t wide;
    std::memcpy(&wide, &f, 4);
    if (f != f) {
      return {0x7FC0};
    }
    wide += 0x7FFF + ((wide >> 16) & 1);
    return {uint16_t(wide >> 16)};
  }
};

struct Float16 {
  uint16_t bits;
  static float load(Float16 x) {
    _Float16 h;
    std::memcpy(&h, &x.bits, 2);
    return float(h);
  }
  static Float16 store(float f) {
    const _Float16 h = _Float16(f);
    Float16 x;
    std::memcpy(&x.bits, &h, 2);
    return x;
  }
};

}  // namespace deepsp
