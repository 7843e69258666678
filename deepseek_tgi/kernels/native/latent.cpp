// How cached latents are read, and INT4's rotation undone.

#include "latent.h"

#include "transpose.h"

namespace dstgi {
namespace {

// H x of g vectors `stride` floats apart, lanes apart from each other.
DSTGI_INLINE void hadamard_lanes(float* x, int64_t g, int64_t stride) {
  for (int64_t half = g / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < g; i += 2 * half)
      for (int64_t j = i; j < i + half; ++j) {
        const F32 a = load(x + j * stride), b = load(x + (j + half) * stride);
        store(x + j * stride, add(a, b));
        store(x + (j + half) * stride, sub(a, b));
      }
}

DSTGI_INLINE void turn_signs(float* x, int64_t g, int64_t stride) {
  for (int64_t i = 0; i < g; ++i)
    if (is_turned(i)) store(x + i * stride, sub(zero(), load(x + i * stride)));
}

// One group of INT4, still rotated.
DSTGI_INLINE void load_int4(const uint8_t* codes, int64_t group, uint8_t scale_byte, F32 levels, float* out) {
  const F32 scale = set1(int4_scale(scale_byte));
  const I32 low = iset1(15);
  if (group == MAX_ROTATED) {
    const I32 both = load_u8(codes);
    store(out, mul(lookup(levels, iand(both, low)), scale));
    store(out + LANES, mul(lookup(levels, shr32(both, 4)), scale));
    return;
  }
  uint8_t apart[LANES];
  for (int i = 0; i < LANES / 2; ++i) {
    apart[i] = codes[i] & 15;
    apart[LANES / 2 + i] = codes[i] >> 4;
  }
  store(out, mul(lookup(levels, load_u8(apart)), scale));
}

// One latent as float32, [rank] (INT4: still rotated); `rank` and the groups are multiples of 16.
template <LatentMode MODE>
DSTGI_INLINE void load_latent(const LatentPages& p, const char* row, const char* scales, float* out) {
  if (MODE < L_INT8) {
    for (int64_t i = 0; i < p.rank; i += LANES)
      store(out + i, MODE == L_FLOAT32    ? load(reinterpret_cast<const float*>(row) + i)
                     : MODE == L_BFLOAT16 ? load_bf16(reinterpret_cast<const uint16_t*>(row) + i)
                                          : load_half(reinterpret_cast<const uint16_t*>(row) + i));
    return;
  }
  const F32 levels = load(LEVELS);
  const uint8_t* codes = reinterpret_cast<const uint8_t*>(row);
  for (int64_t at = 0, group = 0; at < p.rank; at += p.group, ++group) {
    if (MODE == L_INT4) {
      load_int4(codes + at / 2, p.group, reinterpret_cast<const uint8_t*>(scales)[group], levels, out + at);
      continue;
    }
    // FP8's bits are read as 2^-8 of what they mean.
    const F32 scale = set1(from_half(reinterpret_cast<const uint16_t*>(scales)[group]) * (MODE == L_FP8 ? 256.0f : 1.0f));
    for (int64_t i = at; i < at + p.group; i += LANES)
      store(out + i, mul(MODE == L_INT8 ? to_float(load_s8(reinterpret_cast<const int8_t*>(codes) + i))
                                        : load_e4m3(codes + i), scale));
  }
}

// A rotary key as float32, padded with zeros to a multiple of 16.
DSTGI_INLINE void load_rotary(const LatentPages& p, const char* row, float* out) {
  for (int64_t i = 0; i < p.rope_dim; i += LANES) {
    const int n = static_cast<int>(p.rope_dim - i);
    if (p.mode == L_FLOAT32) {
      store(out + i, load_n(reinterpret_cast<const float*>(row) + i, n));
      continue;
    }
    uint16_t room[LANES] = {};
    std::memcpy(room, reinterpret_cast<const uint16_t*>(row) + i, sizeof(uint16_t) * (n < LANES ? n : LANES));
    store(out + i, p.mode == L_FLOAT16 ? load_half(room) : load_bf16(room));
  }
}

template <LatentMode MODE>
void load_group(const LatentPages& p, const RowBytes& bytes, const Place& at, int64_t n, float* panel, int64_t pitch) {
  for (int64_t j = 0; j < n; ++j, panel += pitch) {
    load_latent<MODE>(p, at.latent + j * bytes.latent, at.scale + j * bytes.scale, panel);
    load_rotary(p, at.rope + j * bytes.rope, panel + p.rank);
  }
}

}  // namespace

void unrotate_columns(float* x, int64_t rank, int64_t group, int64_t columns, int64_t stride) {
  for (int64_t at = 0; at < rank; at += group)
    for (int64_t c = 0; c < columns; c += LANES) {
      hadamard_lanes(x + at * stride + c, group, stride);
      turn_signs(x + at * stride + c, group, stride);
    }
}

void rotate_queries(float* x, int64_t rank, int64_t group, int64_t columns, int64_t stride) {
  for (int64_t at = 0; at < rank; at += group)
    for (int64_t c = 0; c < columns; c += LANES) {
      turn_signs(x + at * stride + c, group, stride);
      hadamard_lanes(x + at * stride + c, group, stride);
    }
}

void unrotate_rows(float* x, int64_t rows, int64_t rank, int64_t group) {
  alignas(64) float turned[MAX_ROTATED * LANES];
  for (int64_t r = 0; r < rows; r += LANES)
    for (int64_t at = 0; at < rank; at += group) {
      F32 lines[LANES];
      float* part = x + r * rank + at;
      for (int64_t d = 0; d < group; d += LANES) {
        for (int i = 0; i < LANES; ++i) lines[i] = load(part + i * rank + d);
        transpose16(lines, turned + d * LANES, LANES);
      }
      unrotate_columns(turned, group, group, LANES, LANES);
      for (int64_t d = 0; d < group; d += LANES) {
        for (int i = 0; i < LANES; ++i) lines[i] = load(turned + (d + i) * LANES);
        transpose16(lines, part + d, rank);
      }
    }
}

void load_positions(const LatentPages& p, const int32_t* table, int64_t from, int64_t n, float* panel,
                    int64_t pitch) {
  const RowBytes bytes = row_bytes(p);
  const Place at = find_place(p, bytes, table, from);
  switch (p.mode) {
    case L_FLOAT32:
      return load_group<L_FLOAT32>(p, bytes, at, n, panel, pitch);
    case L_BFLOAT16:
      return load_group<L_BFLOAT16>(p, bytes, at, n, panel, pitch);
    case L_FLOAT16:
      return load_group<L_FLOAT16>(p, bytes, at, n, panel, pitch);
    case L_INT8:
      return load_group<L_INT8>(p, bytes, at, n, panel, pitch);
    case L_INT4:
      return load_group<L_INT4>(p, bytes, at, n, panel, pitch);
    default:
      return load_group<L_FP8>(p, bytes, at, n, panel, pitch);
  }
}

}  // namespace dstgi
