// Latents into their pages: each format of kernels/latent_format.py, bit for bit.

#include "latent.h"
#include "pool.h"

namespace dstgi {
namespace {

constexpr int SCALE_TRIALS = 4;

// INT8 or FP8: one group of clamped x.
DSTGI_INLINE uint16_t store_scaled(const float* x, int64_t group, bool fp8, uint8_t* codes) {
  const float limit = fp8 ? 448.0f : 127.0f;
  const int32_t bits = largest_bits(x, group);
  if (bits > INFINITE) {
    std::memset(codes, 0, group);
    return 0x7e00;
  }
  const uint16_t half = to_half_towards(float_of(bits) / limit, true);
  const float scale = from_half(half);
  const F32 step = set1(scale > 0.0f ? scale : 1.0f);
  for (int64_t i = 0; i < group; i += LANES) {
    const F32 steps = div(load(x + i), step);
    if (!fp8) {
      store_u8(codes + i, to_int(min(set1(limit), max(set1(-limit), round_even(steps)))));
      continue;
    }
    float lanes[LANES];
    store(lanes, min(set1(limit), max(set1(-limit), steps)));
    for (int j = 0; j < LANES; ++j) codes[i + j] = to_e4m3(lanes[j]);
  }
  return half;
}

// y = H D x / g.
DSTGI_INLINE void rotate(const float* x, int64_t group, float* y) {
  for (int64_t i = 0; i < group; ++i) y[i] = is_turned(i) ? -x[i] : x[i];
  for (int64_t half = group / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < group; i += 2 * half)
      for (int64_t j = i; j < i + half; ++j) {
        const float a = y[j], b = y[j + half];
        y[j] = a + b;
        y[j + half] = a - b;
      }
  const float part = 1.0f / static_cast<float>(group);  // a power of two: exact
  for (int64_t i = 0; i < group; ++i) y[i] *= part;
}

// Codes of one group at `scale` as one byte each; returns the squared error.
DSTGI_INLINE float nearest_levels(const float* y, int64_t group, float scale, uint8_t* codes) {
  const F32 step = set1(scale > 0.0f ? scale : 1.0f), levels = load(LEVELS);
  F32 error = zero();
  for (int64_t i = 0; i < group; i += LANES) {
    const F32 value = load(y + i), steps = div(value, step);
    const I32 code = nearest_level(steps);
    store_u8(codes + i, code);
    const F32 off = sub(value, mul(lookup(levels, code), set1(scale)));
    error = i == 0 ? mul(off, off) : add(error, mul(off, off));
  }
  return sum_lanes(error);
}

// INT4: one group of clamped x; returns the byte of its scale.
DSTGI_INLINE uint8_t store_rotated(const float* x, int64_t group, uint8_t* packed) {
  alignas(64) float y[MAX_ROTATED];
  rotate(x, group, y);
  const int32_t bits = largest_bits(y, group);
  if (bits > INFINITE) {
    std::memset(packed, 0x77, group / 2);
    return NAN_BYTE;
  }
  const int first = (to_half_towards(float_of(bits) / 127.0f * SCALE_UNIT, true) + 127) >> 7;
  uint8_t codes[2][MAX_ROTATED], kept = 0;
  float smallest = 0.0f;
  int best = 0;
  for (int trial = 0; trial < SCALE_TRIALS; ++trial) {
    const uint8_t byte = static_cast<uint8_t>(first > trial ? first - trial : 0);
    const float error = nearest_levels(y, group, int4_scale(byte), codes[1 - best]);
    if (trial > 0 && !(error < smallest)) continue;
    best = 1 - best;
    smallest = error;
    kept = byte;
  }
  for (int64_t i = 0; i < group / 2; ++i)
    packed[i] = static_cast<uint8_t>(codes[best][i] | codes[best][group / 2 + i] << 4);
  return kept;
}

void store_quantised(const LatentPages& p, const float* x, char* row, char* scales) {
  alignas(64) float part[128];
  for (int64_t at = 0; at < p.rank; at += p.group) {
    for (int64_t i = 0; i < p.group; i += LANES) store(part + i, clamp_half(load(x + at + i)));
    if (p.mode == L_INT4)
      reinterpret_cast<uint8_t*>(scales)[at / p.group] =
          store_rotated(part, p.group, reinterpret_cast<uint8_t*>(row) + at / 2);
    else
      reinterpret_cast<uint16_t*>(scales)[at / p.group] =
          store_scaled(part, p.group, p.mode == L_FP8, reinterpret_cast<uint8_t*>(row) + at);
  }
}

void store_plain(int64_t mode, const float* x, int64_t width, char* to) {
  if (mode == L_FLOAT32)
    std::memcpy(to, x, width * sizeof(float));
  else if (mode == L_FLOAT16)
    store_halves(x, width, reinterpret_cast<uint16_t*>(to));
  else
    store_bf16(x, width, reinterpret_cast<uint16_t*>(to));
}

struct Writer {
  const LatentPages& p;
  RowBytes bytes;

  explicit Writer(const LatentPages& pages) : p(pages), bytes(row_bytes(pages)) {}

  void operator()(const float* latent, const float* rope, int64_t slot) const {
    if (slot < 0) return;
    const int64_t page = slot / p.block_size * p.page_stride, place = slot % p.block_size;
    store_plain(p.mode, rope, p.rope_dim, p.rope + page + place * bytes.rope);
    char* row = p.latent + page + place * bytes.latent;
    if (p.mode < L_INT8)
      store_plain(p.mode, latent, p.rank, row);
    else
      store_quantised(p, latent, row, p.scale + page + place * bytes.scale);
  }
};

}  // namespace
}  // namespace dstgi

// latent [t] rows of `rank`, rope [t] rows of `rope_dim`; rows lie `_row` floats apart.
DSTGI_API void dstgi_latent_write(const LatentPages* pages, const float* latent, const float* rope,
                                  const int64_t* slots, int64_t t, int64_t latent_row, int64_t rope_row,
                                  int64_t num_threads) {
  using namespace dstgi;
  const Writer write(*pages);
  by_rows(t, pages->rank + pages->rope_dim, num_threads,
          [&](int64_t i) { write(latent + i * latent_row, rope + i * rope_row, slots[i]); });
}

// Norm of the latents, rotation of queries and rotary keys, all in place, and the write; `norm` [rank].
DSTGI_API void dstgi_latent_prepare(const LatentPages* pages, const LatentRows* rows, const float* norm, float eps) {
  using namespace dstgi;
  const LatentRows& c = *rows;
  const Writer write(*pages);
  by_rows(c.tokens, pages->rank + c.heads * c.q_dim, c.num_threads, [&](int64_t t) {
    const float* turn = c.cos_sin + static_cast<int64_t>(c.positions[t]) * c.rotary;
    float *latent = c.latent + t * c.latent_row, *rope = c.rope + t * c.rope_row;
    norm_row(latent, norm, pages->rank, eps, latent);
    rotate_head(rope, turn, c.rotary / 2);
    for (int64_t h = 0; h < c.heads; ++h) rotate_head(c.q + t * c.q_row + h * c.q_dim, turn, c.rotary / 2);
    write(latent, rope, c.slots[t]);
  });
}
