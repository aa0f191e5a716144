#pragma once
// bfloat16 and float16 as bits on the CPU; rounding is to nearest even.

#include <cstdint>
#include <cstring>

namespace deepsp {

inline float float_of(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline uint32_t bits_of(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

struct BFloat16 {
  uint16_t bits;
  static float load(BFloat16 x) { return float_of(uint32_t(x.bits) << 16); }
  static BFloat16 store(float f) {
    const uint32_t wide = bits_of(f);
    const uint32_t rounded = wide + 0x7FFF + ((wide >> 16) & 1);
    // Without a branch, so that it's vectorised.
    return {uint16_t(f != f ? 0x7FC0 : rounded >> 16)};
  }
};

// In integers and float32, since without F16C a conversion of _Float16 is a function call.
struct Float16 {
  uint16_t bits;
  static float load(Float16 x) {
    // A float16's exponent is 112 less than a float32's; the product is right for subnormals, too.
    const uint32_t magnitude = uint32_t(x.bits & 0x7FFF) << 13;
    uint32_t wide = bits_of(float_of(magnitude) * 0x1p112f);
    wide = magnitude >= 0x0F800000 ? magnitude | 0x7F800000 : wide;  // infinite, or not a number
    return float_of(wide | uint32_t(x.bits & 0x8000) << 16);
  }
  static Float16 store(float f) {
    const uint32_t wide = bits_of(f);
    const uint32_t magnitude = wide & 0x7FFFFFFF;
    uint32_t bits = (magnitude + 0xFFF + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
    // Below 2^-14 float32's own addition rounds: the last bit of 0.5's sum is 2^-24.
    const uint32_t small = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    bits = magnitude < 0x38800000 ? small : bits;
    bits = magnitude >= 0x47800000 ? 0x7C00 : bits;
    bits = magnitude > 0x7F800000 ? 0x7E00 : bits;
    return {uint16_t(bits | (wide >> 16 & 0x8000))};
  }
};

}  // namespace deepsp
