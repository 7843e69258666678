// float16 by its bits, one number at a time.
#pragma once

#include "simd.h"

namespace dstgi {

using namespace simd;

DSTGI_INLINE uint16_t to_half(float x) {  // nearest even; |x| <= 65504 or NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits < 0x38800000) {  // below 2**-14: a multiple of 2**-24, rounded by the adder
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return sign | static_cast<uint16_t>(bits - 0x3f000000);
  }
  return sign | static_cast<uint16_t>((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

DSTGI_INLINE float from_half(uint16_t h) {
  const uint32_t rest = h & 0x7fff;
  float value;
  if (rest < 0x0400) {
    value = static_cast<float>(rest) * 5.9604644775390625e-8f;
  } else {
    const uint32_t bits = rest >= 0x7c00 ? rest << 13 | 0x7f800000 : (rest << 13) + (112u << 23);
    std::memcpy(&value, &bits, 4);
  }
  return (h & 0x8000) != 0 ? -value : value;
}

// Rounded towards +inf (`up`) or -inf, for |x| <= 65504.
DSTGI_INLINE uint16_t to_half_towards(float x, bool up) {
  const uint16_t nearest = to_half(x);
  const float back = from_half(nearest);
  if (up ? back >= x : back <= x) return nearest;
  if ((nearest & 0x7fff) == 0) return up ? 0x0001 : 0x8001;
  const bool away = ((nearest & 0x8000) != 0) != up;
  return static_cast<uint16_t>(away ? nearest + 1 : nearest - 1);
}

constexpr float HALF_MAX = 65504.0f;

DSTGI_INLINE F32 clamp_half(F32 x) { return min(set1(HALF_MAX), max(set1(-HALF_MAX), x)); }

}  // namespace dstgi
