// What happens to one head's vector between the projections and the cache: rotation and conversion to the page format.
#pragma once

#include "api.h"
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

// One vector to uint8 with `pair` = scale, zero; the format of kernels/int8_format.py, bit for bit.
DSTGI_INLINE void store_int8(const float* x, int64_t width, uint8_t* q, uint16_t* pair) {
  float low = HALF_MAX, high = -HALF_MAX;
  bool finite = true;
  for (int64_t i = 0; i < width; i += LANES) {
    float lanes[LANES];
    const int n = static_cast<int>(width - i);
    store(lanes, clamp_half(load_n(x + i, n)));
    for (int j = 0; j < n && j < LANES; ++j) {
      low = lanes[j] < low ? lanes[j] : low;
      high = lanes[j] > high ? lanes[j] : high;
      finite = finite && lanes[j] == lanes[j];
    }
  }
  if (!finite) {
    std::memset(q, 0, width);
    pair[0] = 0;
    pair[1] = 0x7e00;
    return;
  }
  pair[1] = to_half_towards(low, false);
  const float zero_point = from_half(pair[1]);
  pair[0] = to_half_towards((high - zero_point) / 255.0f, true);
  const float scale = from_half(pair[0]);
  const F32 step = set1(scale > 0.0f ? scale : 1.0f);
  for (int64_t i = 0; i < width; i += LANES) {
    const int n = static_cast<int>(width - i);
    const F32 steps = round_even(div(sub(clamp_half(load_n(x + i, n)), set1(zero_point)), step));
    const I32 whole = to_int(min(set1(255.0f), max(zero(), steps)));
    if (n >= LANES) {
      store_u8(q + i, whole);
    } else {
      uint8_t tail[LANES];
      store_u8(tail, whole);
      std::memcpy(q + i, tail, n);
    }
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

// Stores one head's key (or value) at `slot`; `which` 0 is k, 1 is v.
DSTGI_INLINE void write_head(const Pages& p, int which, const float* x, int64_t slot, int64_t head) {
  const int64_t width = which == 0 ? p.k_dim : p.v_dim;
  const int64_t page = slot / p.block_size, row = head * p.block_size + slot % p.block_size;
  const int64_t item = p.mode == 0 ? 4 : p.mode == 3 ? 1 : 2;
  char* to = (which == 0 ? p.k : p.v) + page * p.page_stride + row * width * item;
  switch (p.mode) {
    case 0:
      std::memcpy(to, x, width * sizeof(float));
      break;
    case 1:
      store_bf16(x, width, reinterpret_cast<uint16_t*>(to));
      break;
    case 2:
      store_halves(x, width, reinterpret_cast<uint16_t*>(to));
      break;
    default:
      store_int8(x, width, reinterpret_cast<uint8_t*>(to),
                 reinterpret_cast<uint16_t*>((which == 0 ? p.k_scale : p.v_scale) + page * p.page_stride) + row * 2);
  }
}

}  // namespace dstgi
