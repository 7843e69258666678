// INT4 vectors of one head: the format of kernels/int4_format.py, bit for bit.
#pragma once

#include <cmath>

#include "api.h"
#include "levels.h"

namespace dstgi {

constexpr int MAX_INT4_HEAD = 256;
constexpr int MAX_GROUPS = 16;
constexpr int INT4_TRIALS = 4;

DSTGI_INLINE int64_t head_bytes(int64_t mode, int64_t width) {
  return mode == H_FLOAT32 ? width * 4 : mode <= H_FLOAT16 ? width * 2 : mode == H_INT4 ? width / 2 : width;
}

DSTGI_INLINE int64_t int4_group(int64_t width) { return width <= 64 ? 4 : width <= 128 ? 8 : 16; }

DSTGI_INLINE int64_t rotation_size(int64_t width) { return width & -width; }

// Butterflies within sixteen lanes: lane i becomes x[i] + x[i ^ distance], or x[i ^ distance] - x[i] where i has the bit.
DSTGI_INLINE F32 butterfly(F32 x, int distance) {
  alignas(64) static const int32_t lanes[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const I32 at = iload(lanes), bit = iand(at, iset1(distance));
  const I32 with_bit = imin(bit, iset1(1));
  const I32 partner = iadd(at, imul(iadd(iset1(1), imul(with_bit, iset1(-2))), iset1(distance)));
  const F32 sign = to_float(iadd(iset1(1), imul(with_bit, iset1(-2))));
  return fma(x, sign, lookup(x, partner));
}

// H x of every run of `size` elements, times `factor`; x [width], size a multiple of 16.
DSTGI_INLINE void hadamard_runs(float* x, int64_t width, int64_t size, float factor) {
  for (int64_t run = 0; run < width; run += size) {
    float* y = x + run;
    for (int64_t half = size / 2; half >= LANES; half /= 2)
      for (int64_t i = 0; i < size; i += 2 * half)
        for (int64_t j = i; j < i + half; j += LANES) {
          const F32 a = load(y + j), b = load(y + j + half);
          store(y + j, add(a, b));
          store(y + j + half, sub(a, b));
        }
    for (int64_t i = 0; i < size; i += LANES) {
      const F32 v = butterfly(butterfly(butterfly(butterfly(load(y + i), 8), 4), 2), 1);
      store(y + i, mul(v, set1(factor)));
    }
  }
}

// 2^-floor(m / 2) and 2^-ceil(m / 2) for runs of 2^m elements.
DSTGI_INLINE float rotation_factor(int64_t size, bool back) {
  const int m = __builtin_ctzll(static_cast<unsigned long long>(size));
  return 1.0f / static_cast<float>(1 << (back ? (m + 1) / 2 : m / 2));
}

DSTGI_INLINE void rotate_vector(float* x, int64_t width) {
  hadamard_runs(x, width, rotation_size(width), rotation_factor(rotation_size(width), false));
}
DSTGI_INLINE void unrotate_vector(float* x, int64_t width) {
  hadamard_runs(x, width, rotation_size(width), rotation_factor(rotation_size(width), true));
}

// What `rotate_vector` does to squared lengths: 1 or 2.
DSTGI_INLINE float rotation_growth(int64_t width) {
  const float factor = rotation_factor(rotation_size(width), false);
  return static_cast<float>(rotation_size(width)) * factor * factor;
}

// The sum of n elements: half onto half while n is even, then in order. Overwrites x.
DSTGI_INLINE float fold(float* x, int64_t n) {
  for (; n % 2 == 0; n /= 2)
    for (int64_t i = 0; i < n / 2; ++i) x[i] += x[i + n / 2];
  float total = x[0];
  for (int64_t i = 1; i < n; ++i) total += x[i];
  return total;
}

DSTGI_INLINE float squares(const float* x, int64_t n) {
  alignas(64) float square[MAX_INT4_HEAD];
  for (int64_t i = 0; i < n; ++i) square[i] = x[i] * x[i];
  return fold(square, n);
}

// One group at one scale: codes nearest to target, their squared error against y, and its part along u (if given).
struct Trial {
  float error, along;
};
DSTGI_INLINE Trial try_scale(const float* y, const float* target, const float* u, int64_t g, float scale,
                             uint8_t* codes) {
  alignas(64) float error[LANES], along[LANES];
  const F32 step = set1(scale > 0.0f ? scale : 1.0f);
  const I32 code = nearest_level(div(load(target), step));
  store_u8(codes, code);
  const F32 off = sub(mul(lookup(load(LEVELS), code), set1(scale)), load(y));
  store(error, mul(off, off));
  if (u != nullptr) store(along, mul(load(u), off));
  return {fold(error, g), u == nullptr ? 0.0f : fold(along, g)};
}

struct ScaleChoice {
  uint8_t byte;
  float along;
};

// Codes of one group of g <= 16 elements at the scale that serves best. `mark` -1: none. Arrays have 16 places.
DSTGI_INLINE ScaleChoice best_scale(const float* y, const float* target, const float* u, int64_t g, int mark,
                                    float later_weight, float along, uint8_t* codes) {
  const float top = float_of(largest_bits(target, LANES)) / 127.0f * SCALE_UNIT;
  int first = (to_half_towards(top > HALF_MAX ? HALF_MAX : top, true) + 127) >> 7, step = 1;
  if (first > 0xf7) first = 0xf7;
  if (mark >= 0) {
    first += (first ^ mark) & 1;
    step = 2;
    if (first > 0xf7) first -= 2;
  }
  uint8_t tried[2][LANES];
  ScaleChoice kept = {0, 0.0f};
  float smallest = 0.0f;
  int best = 0;
  for (int trial = 0; trial < INT4_TRIALS / step; ++trial) {
    const int byte = first >= trial * step ? first - trial * step : first;
    const Trial result = try_scale(y, target, u, g, int4_scale(static_cast<uint8_t>(byte)), tried[1 - best]);
    const float moved = u == nullptr ? 0.0f : along + result.along;
    const float cost = u == nullptr ? result.error : result.error + later_weight * (moved * moved);
    if (trial > 0 && !(cost < smallest)) continue;
    best = 1 - best;
    smallest = cost;
    kept = {static_cast<uint8_t>(byte), moved};
  }
  std::memcpy(codes, tried[best], g);
  return kept;
}

// A rotated vector y [width]; `mark` -1 for values; u [width] or null shapes the errors with `weight`.
inline void store_int4(const float* y, int64_t width, int mark, const float* u, float weight, uint8_t* packed,
                       uint8_t* scales) {
  if (largest_bits(y, width) > INFINITE) {
    std::memset(packed, 0x77, width / 2);
    std::memset(scales, NAN_BYTE, width / int4_group(width));
    return;
  }
  const int64_t g = int4_group(width), groups = width / g;
  alignas(64) float part[LANES] = {}, aimed[LANES] = {}, side[LANES] = {}, square[LANES];
  float ahead[MAX_GROUPS + 1] = {};
  for (int64_t index = groups - 1; u != nullptr && index >= 0; --index) {
    for (int64_t i = 0; i < g; ++i) square[i] = u[index * g + i] * u[index * g + i];
    ahead[index] = ahead[index + 1] + fold(square, g);
  }
  uint8_t codes[MAX_INT4_HEAD];
  float along = 0.0f;
  for (int64_t index = 0; index < groups; ++index) {
    std::memcpy(part, y + index * g, sizeof(float) * g);
    const int forced = index == 0 ? mark : -1;
    if (u == nullptr) {
      scales[index] = best_scale(part, part, nullptr, g, forced, 0.0f, 0.0f, codes + index * g).byte;
      continue;
    }
    std::memcpy(side, u + index * g, sizeof(float) * g);
    const float limit = float_of(largest_bits(part, LANES)) * 0.125f;
    const float pull = weight * along / (1.0f + weight * ahead[index]);
    for (int64_t i = 0; i < g; ++i) {
      const float shift = side[i] * pull;
      aimed[i] = part[i] - (shift > limit ? limit : shift < -limit ? -limit : shift);
    }
    const float later = weight / (1.0f + weight * ahead[index + 1]);
    const ScaleChoice choice = best_scale(part, aimed, side, g, forced, later, along, codes + index * g);
    scales[index] = choice.byte;
    along = choice.along;
  }
  for (int64_t i = 0; i < width / 2; ++i) packed[i] = static_cast<uint8_t>(codes[i] | codes[width / 2 + i] << 4);
}

}  // namespace dstgi
