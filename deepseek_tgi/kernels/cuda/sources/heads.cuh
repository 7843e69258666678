// Keys and values of one head as they lie in pages, made into operands of the 16-bit matrix instructions.
//
// MODE says how they are stored: 0 bf16, 1 half, 2 INT8 (codes, then scale and zero), 3 FP8 (codes, then a scale).
// Tokens are the rows of the matrix (16 at a time) and queries its columns (8), so four to eight heads that share a key
// fill an instruction. Elements of a row are taken in an order that lets a lane read what it needs in one piece: a lane
// (g = lane / 4, t = lane % 4) reads key elements 4 E c + E t .. + E of tokens g and g + 8, E what its load holds, and
// value elements 8 E c + E g .. + E of tokens 2t, 2t + 1, 2t + 8, 2t + 9. Queries are read in the same order as keys.
#pragma once
#include "device.cuh"

#define ELEMENT_BYTES (MODE < 2 ? 2 : 1)
#define PARAM_BYTES (MODE == 2 ? 4 : 2)
#define QUANTISED (MODE >= 2)
#define AS_HALVES (MODE != 0)

constexpr int widest(int row_bytes, int lanes) {
  return row_bytes % (16 * lanes) == 0 ? 16 : row_bytes % (8 * lanes) == 0 ? 8 : 4;
}
constexpr int K_ROW = DK * ELEMENT_BYTES, V_ROW = DV * ELEMENT_BYTES;
constexpr int K_LOAD = widest(K_ROW, 4), V_LOAD = widest(V_ROW, 8);
constexpr int K_WORDS = K_ROW / 16, V_WORDS = V_ROW / 32;  // words of a row that a lane holds
constexpr int K_STEPS = DK / 16, V_TILES = DV / 16;
static_assert(DK % 32 == 0 && DV % 32 == 0, "heads are whole multiples of 32 elements");

template <int bytes>
DEVICE void load_piece(u32* words, const u8* p) {
  if constexpr (bytes == 16) {
    words4 r = load_once(p);
    words[0] = r.x, words[1] = r.y, words[2] = r.z, words[3] = r.w;
  } else if constexpr (bytes == 8) {
    words2 r = load_once8(p);
    words[0] = r.x, words[1] = r.y;
  } else {
    words[0] = load_once4(p);
  }
}

// What a lane holds of 16 tokens, as stored.
struct KeyTile {
  u32 rows[2][K_WORDS];
  u32 params[2];
};
struct ValueTile {
  u32 rows[4][V_WORDS];
  u32 params[2];
};

DEVICE u32 load_params(const u8* p) {
  if constexpr (MODE == 2) return load_once4(p);
  return MODE == 3 ? load_once2(p) : 0;
}

// 16 tokens from `place` (counted over the heads of a page) on, in the page that begins `page` bytes behind `rows`, and
// their scales behind `params`.
DEVICE void load_keys(KeyTile& tile, const u8* rows, const u8* params, i64 page, int place) {
  const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u8* row = rows + (page + ((place + g + 8 * half) * K_ROW + t * K_LOAD));
#pragma unroll
    for (int c = 0; c < K_ROW / (4 * K_LOAD); c++)
      load_piece<K_LOAD>(tile.rows[half] + c * K_LOAD / 4, row + c * 4 * K_LOAD);
    if (QUANTISED) tile.params[half] = load_params(params + (page + (place + g + 8 * half) * PARAM_BYTES));
  }
}
DEVICE void load_values(ValueTile& tile, const u8* rows, const u8* params, i64 page, int place) {
  const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u8* row = rows + (page + ((place + 2 * t + i % 2 + 8 * (i / 2)) * V_ROW + g * V_LOAD));
#pragma unroll
    for (int c = 0; c < V_ROW / (8 * V_LOAD); c++)
      load_piece<V_LOAD>(tile.rows[i] + c * V_LOAD / 4, row + c * 8 * V_LOAD);
  }
  if (QUANTISED) {
    tile.params[0] = load_params(params + (page + (place + g) * PARAM_BYTES));
    tile.params[1] = load_params(params + (page + (place + g + 8) * PARAM_BYTES));
  }
}
// Tokens at or beyond `count` become zeros: what lies in a page behind the context may be NaN.
DEVICE void cut_values(ValueTile& tile, int count) {
  const int t = lane_id() % 4;
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (2 * t + i % 2 + 8 * (i / 2) >= count) {
#pragma unroll
      for (int w = 0; w < V_WORDS; w++) tile.rows[i][w] = 0;
    }
}

// Two codes (in the bytes of `pair` that `selector` names) as halves: INT8 less 128, FP8 as it is.
DEVICE u32 widen_int8(u32 codes, u32 selector) {
  return half_sub(permute_bytes(codes, 0x64646464u, selector), 0x64806480u);  // 1024 + code, less 1152
}

// Operand of step `step` (16 elements) of the keys.
DEVICE void key_operand(u32 (&a)[4], const KeyTile& tile, int step) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (MODE < 2) {
      a[half] = tile.rows[half][2 * step];
      a[half + 2] = tile.rows[half][2 * step + 1];
    } else if (MODE == 2) {
      a[half] = widen_int8(tile.rows[half][step], 0x4140);
      a[half + 2] = widen_int8(tile.rows[half][step], 0x4342);
    } else {
      a[half] = fp8_halves((u16)tile.rows[half][step]);
      a[half + 2] = fp8_halves((u16)(tile.rows[half][step] >> 16));
    }
  }
}
// Operand of tile `tile` of the values turned over: rows are elements `value_element(tile, 0)` and, eight rows on,
// `value_element(tile, 1)`; columns are tokens.
DEVICE void value_operand(u32 (&a)[4], const ValueTile& tile, int index) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (MODE < 2) {
      u32 even = tile.rows[2 * half][index], odd = tile.rows[2 * half + 1][index];
      a[2 * half] = permute_bytes(even, odd, 0x5410);
      a[2 * half + 1] = permute_bytes(even, odd, 0x7632);
    } else {
      u32 even = tile.rows[2 * half][index / 2], odd = tile.rows[2 * half + 1][index / 2];
      u32 both = permute_bytes(even, odd, index % 2 ? 0x7362 : 0x5140);
      if (MODE == 2) {
        a[2 * half] = widen_int8(both, 0x4140);
        a[2 * half + 1] = widen_int8(both, 0x4342);
      } else {
        a[2 * half] = fp8_halves((u16)both);
        a[2 * half + 1] = fp8_halves((u16)(both >> 16));
      }
    }
  }
}
// Which element of the value the lane's rows of a tile are.
DEVICE int value_element(int tile, int half) {
  constexpr int per_load = V_LOAD / ELEMENT_BYTES;
  int held = 2 * tile + half;
  return held / per_load * 8 * per_load + lane_id() / 4 * per_load + held % per_load;
}
// Where in a head the lane's query elements of a step begin: four of them.
DEVICE int query_element(int step) {
  constexpr int per_load = K_LOAD / ELEMENT_BYTES;
  return step * 4 / per_load * 4 * per_load + lane_id() % 4 * per_load + step * 4 % per_load;
}

DEVICE void mma_pages(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  if (AS_HALVES) {
    mma_half(c, a, b);
  } else {
    mma_bf16(c, a, b);
  }
}
DEVICE u32 pack_weights(float low, float high) { return AS_HALVES ? half_pair(low, high) : bf16_pair(low, high); }
