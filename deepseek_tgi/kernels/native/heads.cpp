// One head's vector into its page, in each of the page formats.

#include "heads.h"

namespace dstgi {
namespace {

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

// Sixteen-lane copy of `x` within float16's range, or one with the scale that `given` (0: none) or its largest element
// asks for; the format of kernels/fp8_format.py, bit for bit.
DSTGI_INLINE void store_fp8(const float* x, int64_t width, float given, uint8_t* codes, uint16_t* scale_out) {
  float largest = 0.0f;
  bool finite = true;
  for (int64_t i = 0; i < width; i += LANES) {
    float lanes[LANES];
    store(lanes, clamp_half(load_n(x + i, static_cast<int>(width - i))));
    for (int64_t j = 0; j < LANES; ++j) {
      const float magnitude = std::fabs(lanes[j]);
      largest = magnitude > largest ? magnitude : largest;
      finite = finite && magnitude == magnitude;
    }
  }
  if (!finite) {
    std::memset(codes, 0, width);
    *scale_out = 0x7e00;
    return;
  }
  *scale_out = given > 0.0f ? to_half(given) : to_half_towards(largest / 448.0f, true);
  const float scale = from_half(*scale_out);
  const F32 step = set1(scale > 0.0f ? scale : 1.0f);
  for (int64_t i = 0; i < width; i += LANES) {
    const int n = static_cast<int>(width - i);
    float lanes[LANES];
    store(lanes, min(set1(448.0f), max(set1(-448.0f), div(clamp_half(load_n(x + i, n)), step))));
    for (int j = 0; j < n && j < LANES; ++j) codes[i + j] = to_e4m3(lanes[j]);
  }
}

constexpr int64_t MAX_HEAD = 512;  // elements of the largest head that has a frame or INT4

// `constants` [heads][k_dim], turned to the position at hand.
DSTGI_INLINE void turned(const Turn& t, const float* constants, int64_t head, int64_t width, float* out) {
  std::memcpy(out, constants + head * width, sizeof(float) * width);
  rotate_head(out, t.row, t.rotary / 2);
}

DSTGI_INLINE void write_int4_key(const Turn& t, const float* x, int64_t width, int64_t head, uint8_t* codes,
                                 uint8_t* scales) {
  alignas(64) float y[MAX_HEAD], other[MAX_HEAD], u[MAX_HEAD];
  for (int64_t i = 0; i < width; i += LANES) store(y + i, clamp_half(load(x + i)));
  rotate_vector(y, width);
  int mark = 0;
  if (t.frame != nullptr && t.frame->centre != nullptr) {
    turned(t, t.frame->centre, head, width, other);
    rotate_vector(other, width);
    for (int64_t i = 0; i < width; i += LANES) store(other + i, sub(load(y + i), load(other + i)));
    mark = squares(other, width) <= squares(y, width);
    if (mark != 0) std::memcpy(y, other, sizeof(float) * width);
  }
  const bool shaped = t.frame != nullptr && t.frame->aim != nullptr;
  if (shaped) {
    turned(t, t.frame->aim, head, width, u);
    rotate_vector(u, width);
  }
  store_int4(y, width, mark, shaped ? u : nullptr, shaped ? t.frame->weight[head] / rotation_growth(width) : 0.0f,
             codes, scales);
}

}  // namespace

void write_head(const Pages& p, bool is_key, const Turn& t, const float* x, int64_t slot, int64_t head) {
  const int64_t width = is_key ? p.k_dim : p.v_dim;
  const int64_t page = slot / p.block_size * p.page_stride, row = head * p.block_size + slot % p.block_size;
  char* to = (is_key ? p.k : p.v) + page + row * head_bytes(p.mode, width);
  char* scales = (is_key ? p.k_scale : p.v_scale) + page;
  alignas(64) float off[MAX_HEAD];
  if (is_key && p.mode >= H_INT8 && p.mode != H_INT4 && t.frame != nullptr && t.frame->centre != nullptr) {
    turned(t, t.frame->centre, head, width, off);
    for (int64_t i = 0; i < width; ++i) off[i] = x[i] - off[i];
    x = off;
  }
  switch (p.mode) {
    case H_FLOAT32:
      std::memcpy(to, x, width * sizeof(float));
      break;
    case H_BFLOAT16:
      store_bf16(x, width, reinterpret_cast<uint16_t*>(to));
      break;
    case H_FLOAT16:
      store_halves(x, width, reinterpret_cast<uint16_t*>(to));
      break;
    case H_INT8:
      store_int8(x, width, reinterpret_cast<uint8_t*>(to), reinterpret_cast<uint16_t*>(scales) + row * 2);
      break;
    case H_FP8: {
      const float given = t.frame == nullptr ? 0.0f : is_key ? t.frame->k_scale : t.frame->v_scale;
      store_fp8(x, width, given, reinterpret_cast<uint8_t*>(to), reinterpret_cast<uint16_t*>(scales) + row);
      break;
    }
    default: {
      uint8_t* codes = reinterpret_cast<uint8_t*>(to);
      uint8_t* bytes = reinterpret_cast<uint8_t*>(scales) + row * (width / int4_group(width));
      if (is_key) {
        write_int4_key(t, x, width, head, codes, bytes);
        break;
      }
      for (int64_t i = 0; i < width; i += LANES) store(off + i, clamp_half(load(x + i)));
      rotate_vector(off, width);
      store_int4(off, width, -1, nullptr, 0.0f, codes, bytes);
    }
  }
}

}  // namespace dstgi
