// What happens to one head's vector between the projections and the cache: rotation and conversion to the page format.
#pragma once

#include "api.h"
#include "head_int4.h"
#include "rows.h"

namespace dstgi {

// Rotates the first `2 * half` elements of x: element i with element i + half. `row` holds half cosines, half sines.
DSTGI_INLINE void rotate_head(float* x, const float* row, int64_t half) {
  for (int64_t i = 0; i < half; i += LANES) {
    const int n = static_cast<int>(half - i);
    const F32 c = load_n(row + i, n), s = load_n(row + half + i, n);
    const F32 a = load_n(x + i, n), b = load_n(x + half + i, n);
    store_n(x + i, sub(mul(a, c), mul(b, s)), n);
    store_n(x + half + i, add(mul(b, c), mul(a, s)), n);
  }
}

DSTGI_INLINE void store_bf16(const float* x, int64_t width, uint16_t* out) {
  for (int64_t i = 0; i < width; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    out[i] = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
  }
}

DSTGI_INLINE void store_halves(const float* x, int64_t width, uint16_t* out) {
  for (int64_t i = 0; i < width; ++i) {
    const float v = x[i] > HALF_MAX ? HALF_MAX : x[i] < -HALF_MAX ? -HALF_MAX : x[i];
    out[i] = to_half(v);
  }
}

// What a frame is turned by at the position at hand: the row of cosines and sines, and how many elements rotate.
struct Turn {
  const Frame* frame;  // null: none
  const float* row;
  int64_t rotary;
};

// Stores one head's key at `slot`, or its value (`is_key` false).
void write_head(const Pages& p, bool is_key, const Turn& t, const float* x, int64_t slot, int64_t head);

}  // namespace dstgi
