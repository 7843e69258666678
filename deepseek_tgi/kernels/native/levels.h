// Numbers that low-bit formats are made of: INT4's levels and scale bytes, E4M3 codes.
#pragma once

#include "halves.h"
#include "simd.h"

namespace dstgi {

using namespace simd;

alignas(64) constexpr float LEVELS[LANES] = {-127, -98, -77, -60, -45, -31, -18, -6, 6, 18, 31, 45, 60, 77, 98, 127};
constexpr float MIDDLES[7] = {12.0f, 24.5f, 38.0f, 52.5f, 68.5f, 87.5f, 112.5f};
constexpr float SCALE_UNIT = 64.0f;
constexpr int32_t INFINITE = 0x7f800000, MAGNITUDE = 0x7fffffff;
constexpr uint8_t NAN_BYTE = 0xfc;

DSTGI_INLINE float int4_scale(uint8_t byte) { return from_half(static_cast<uint16_t>(byte << 7)) / SCALE_UNIT; }

// Sixteen scale bytes, one a lane, as float32: their bits moved to a float32's places are 2^-112 of the half they stand
// for; NaN is the exponent that no scale has.
DSTGI_INLINE F32 int4_scales(I32 bytes) {
  const F32 half = mul(as_float(shl32(bytes, 20)), set1(5.192296858534828e33f));
  return if_above(half, set1(65504.0f), set1(__builtin_nanf("")), mul(half, set1(1.0f / SCALE_UNIT)));
}

// Bits of the largest magnitude of n elements, n a multiple of 16; above those of infinity if one is NaN.
DSTGI_INLINE int32_t largest_bits(const float* x, int64_t n) {
  I32 largest = izero();
  for (int64_t i = 0; i < n; i += LANES) largest = imax(largest, iand(as_int(load(x + i)), iset1(MAGNITUDE)));
  return max_lanes(largest);
}

DSTGI_INLINE float float_of(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Codes 0 .. 15 of the levels nearest to `steps`, the smaller where two are as near.
DSTGI_INLINE I32 nearest_level(F32 steps) {
  const F32 magnitude = as_float(iand(as_int(steps), iset1(MAGNITUDE)));
  I32 index = izero();
  for (const float middle : MIDDLES) index = count_above(index, magnitude, set1(middle));
  // 8 + index above 0, else 7 - index.
  const I32 positive = count_above(izero(), steps, zero());
  return iadd(imul(positive, iadd(iadd(index, index), iset1(1))), iadd(iset1(7), imul(index, iset1(-1))));
}

DSTGI_INLINE uint8_t to_e4m3(float x) {  // nearest even; |x| <= 448
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  bits &= MAGNITUDE;
  if (bits < 0x3c800000) {  // below 2**-6: a multiple of 2**-9, rounded by the adder
    const float moved = float_of(bits) + 16384.0f;
    std::memcpy(&bits, &moved, sizeof bits);
    return sign | static_cast<uint8_t>(bits - 0x46800000);
  }
  return sign | static_cast<uint8_t>((bits + 0x7ffff + (bits >> 20 & 1)) / (1 << 20) - (120 << 3));
}

}  // namespace dstgi
