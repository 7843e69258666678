// Keys and values of one head as they lie in pages, made into operands of the 16-bit matrix instructions.
//
// MODE says how they are stored: 0 bf16, 1 half, 2 INT8 (codes, then scale and zero), 3 FP8 (codes, then a scale), 4
// INT4 (codes, then scale bytes; see `int4_format`), for which heads are of 64, 128 or 256 elements.
// Tokens are the rows of the matrix (16 at a time) and queries its columns (8), so four to eight heads that share a key
// fill an instruction. Elements of a row are taken in an order that lets a lane read what it needs in one piece: a lane
// (g = lane / 4, t = lane % 4) reads key elements 4 E c + E t .. + E of tokens g and g + 8, E what its load holds, and
// value elements 8 E c + E g .. + E of tokens 2t, 2t + 1, 2t + 8, 2t + 9. Queries are read in the same order as keys.
// INT4 keeps two elements in a byte, half a head apart, and both are taken where the byte is.
#pragma once
#include "device.cuh"

#define PARAM_BYTES (MODE == 4 ? 16 : MODE == 2 ? 4 : 2)
#define PARAMS (MODE == 2 ? 4 : MODE == 3 ? 2 : 0)  // bytes of a vector's scale and zero
#define SCALED (MODE == 2 || MODE == 3)  // a vector has one scale
#define AS_HALVES (MODE != 0)

constexpr int widest(int row_bytes, int lanes) {
  return row_bytes % (16 * lanes) == 0 ? 16 : row_bytes % (8 * lanes) == 0 ? 8 : 4;
}
constexpr int row_of(int width) { return MODE < 2 ? 2 * width : MODE == 4 ? width / 2 : width; }
constexpr int K_ROW = row_of(DK), V_ROW = row_of(DV);
constexpr int K_LOAD = widest(K_ROW, 4), V_LOAD = widest(V_ROW, 8);
constexpr int K_WORDS = K_ROW / 16, V_WORDS = V_ROW / 32;  // words of a row that a lane holds
constexpr int K_STEPS = DK / 16, V_TILES = MODE == 4 ? DV / 32 : DV / 16;
static_assert(DK % 32 == 0 && DV % 32 == 0, "heads are whole multiples of 32 elements");
static_assert(MODE != 4 || ((DK & -DK) == DK && (DV & -DV) == DV && DK >= 64 && DV >= 64), "INT4 heads: 64, 128, 256");

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
  u32 params[MODE == 4 ? 4 : 2];
};

DEVICE u32 load_params(const u8* p) {
  if constexpr (MODE == 2) return load_once4(p);
  return MODE == 3 ? load_once2(p) : 0;
}
// The lane's four scale bytes of an INT4 key: of its groups in the lower half of the head, then in the upper; `p` is where
// its first is.
constexpr int KEY_SCALES_OF_LANE = DK == 256 ? 1 : 2;
DEVICE u32 load_key_scales(const u8* p) {
  if constexpr (DK == 256) return load_kept1(p) | load_kept1(p + 4) << 8 | load_kept1(p + 8) << 16 | load_kept1(p + 12) << 24;
  return load_kept2(p) | (u32)load_kept2(p + 8) << 16;
}
// And the two of an INT4 value, a half word each.
DEVICE u32 load_value_scales(const u8* p) { return load_kept1(p) | load_kept1(p + 8) << 16; }

// 16 tokens from `place` (counted over the heads of a page) on, in the page that begins `page` bytes behind `rows`, and
// their scales behind `params`.
DEVICE void load_keys(KeyTile& tile, const u8* rows, const u8* params, i64 page, int place) {
  const int g = lane_id() / 4, t = lane_id() % 4;
  if constexpr (MODE == 4) {  // registers suffice for an address that the others are constants away from
    const u8* const row = rows + (page + (u32)((place + g) * K_ROW + t * K_LOAD));
    const u8* const scales = params + (page + (u32)((place + g) * PARAM_BYTES + KEY_SCALES_OF_LANE * t));
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int c = 0; c < K_ROW / (4 * K_LOAD); c++)
        load_piece<K_LOAD>(tile.rows[half] + c * K_LOAD / 4, row + 8 * half * K_ROW + c * 4 * K_LOAD);
      tile.params[half] = load_key_scales(scales + 8 * half * PARAM_BYTES);
    }
    return;
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u8* row = rows + (page + ((place + g + 8 * half) * K_ROW + t * K_LOAD));
#pragma unroll
    for (int c = 0; c < K_ROW / (4 * K_LOAD); c++)
      load_piece<K_LOAD>(tile.rows[half] + c * K_LOAD / 4, row + c * 4 * K_LOAD);
    if (SCALED) tile.params[half] = load_params(params + (page + (place + g + 8 * half) * PARAM_BYTES));
  }
}
DEVICE void load_values(ValueTile& tile, const u8* rows, const u8* params, i64 page, int place) {
  const int g = lane_id() / 4, t = lane_id() % 4;
  const u8* const row = rows + (page + (u32)((place + 2 * t) * V_ROW + g * V_LOAD));
#pragma unroll
  for (int i = 0; i < 4; i++) {
#pragma unroll
    for (int c = 0; c < V_ROW / (8 * V_LOAD); c++)
      load_piece<V_LOAD>(tile.rows[i] + c * V_LOAD / 4, row + (i % 2 + 8 * (i / 2)) * V_ROW + c * 8 * V_LOAD);
  }
  if (SCALED) {
    const u8* const scales = params + (page + (u32)((place + g) * PARAM_BYTES));
    tile.params[0] = load_params(scales);
    tile.params[1] = load_params(scales + 8 * PARAM_BYTES);
  }
  if constexpr (MODE == 4) {
    const u8* const scales = params + (page + (u32)((place + 2 * t) * PARAM_BYTES + g));
#pragma unroll
    for (int i = 0; i < 4; i++) tile.params[i] = load_value_scales(scales + (i % 2 + 8 * (i / 2)) * PARAM_BYTES);
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
      if (MODE == 4) tile.params[i] = 0;
    }
}

// --- INT4 -----------------------------------------------------------------------------------------------------------
// What a byte of two codes stands for, as halves, for every byte and lane: a lane reads its own bank of shared memory.
// Arithmetic on codes costs more: integer instructions are what a multiprocessor has fewest of. Rows of the table are 256
// bytes apart, twice what they hold: so one permutation makes an address of a code byte and the lane's bank.
constexpr int LEVEL_ROW = 256, LEVEL_TABLE_BYTES = 256 * LEVEL_ROW;
DEVICE float level_of(int code) {
  const int i = code < 8 ? 7 - code : code - 8;
  const float low = i < 2 ? (i < 1 ? 6.0f : 18.0f) : i < 3 ? 31.0f : 45.0f;
  const float high = i < 6 ? (i < 5 ? 60.0f : 77.0f) : i < 7 ? 98.0f : 127.0f;
  const float size = i < 4 ? low : high;
  return code < 8 ? -size : size;
}
DEVICE void fill_levels(u8* table) {
  for (int byte = threadIdx.x; byte < 256; byte += blockDim.x) {
    const u32 pair = half_pair(level_of(byte & 15), level_of(byte >> 4));
#pragma unroll
    for (int i = 0; i < 8; i++)  // neighbours begin at other banks
      *(words4*)(table + byte * LEVEL_ROW + (i + byte) % 8 * 16) = {pair, pair, pair, pair};
  }
}
// Byte `byte` of `codes` times `scales`, those of the lower and the upper half of the head.
DEVICE u32 widen_int4(u32 codes, int byte, u32 scales) {
  const u32 at = permute_bytes(codes, 4 * lane_id(), 0x7604 + (byte << 4));
  return half_mul(load_shared<SHARED_START>(at), scales);
}
// Two scale bytes, a half word each, as halves: 64 times the scale.
DEVICE u32 int4_scales(u32 bytes) { return bytes << 7; }

// Products of half precision hold 64 times what vectors up to 1,016 hold. The scales of larger ones lose powers of two,
// which `lift` gives back; rare, and what falls below half precision then is below 2^-23 of the vector.
constexpr int LARGEST_EXPONENT = 23, NAN_SCALE = 0xF8;
DEVICE bool is_high(u32 bytes) { return (bytes & bytes << 1 & 0x80808080u) != 0; }
DEVICE int largest_scale(u32 bytes) {
  int most = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int byte = bytes >> 8 * i & 0xFF;
    if (byte < NAN_SCALE && byte > most) most = byte;
  }
  return most;
}
DEVICE u32 lowered(u32 bytes, int powers) {
  u32 r = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int byte = bytes >> 8 * i & 0xFF;
    if (byte < NAN_SCALE) byte = byte > 8 * powers ? byte - 8 * powers : 0;
    r |= (u32)byte << 8 * i;
  }
  return r;
}
DEVICE int powers_above(int most) { return most / 8 > LARGEST_EXPONENT ? most / 8 - LARGEST_EXPONENT : 0; }
DEVICE int larger(int a, int b) { return a > b ? a : b; }
DEVICE void settle(KeyTile& tile, float (&lift)[2]) {
  lift[0] = lift[1] = 1.0f;
  if (!warp_ballot(is_high(tile.params[0]) || is_high(tile.params[1]))) return;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int most = largest_scale(tile.params[half]);
    most = larger(most, shuffle_xor(most, 1));
    most = larger(most, shuffle_xor(most, 2));
    const int powers = powers_above(most);
    tile.params[half] = lowered(tile.params[half], powers);
    lift[half] = bits_float((127 + powers) << 23);
  }
}
DEVICE void settle(ValueTile& tile, float (&lift)[2]) {
  lift[0] = lift[1] = 1.0f;
  bool high = false;
#pragma unroll
  for (int i = 0; i < 4; i++) high |= is_high(tile.params[i]);
  if (!warp_ballot(high)) return;
  int powers[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int most = largest_scale(tile.params[i]);
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) most = larger(most, shuffle_xor(most, mask));
    powers[i] = powers_above(most);
    tile.params[i] = lowered(tile.params[i], powers[i]);
  }
  const int g = lane_id() / 4;  // tokens g and g + 8, which other lanes hold
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int even = shuffle(powers[2 * half], g / 2), odd = shuffle(powers[2 * half + 1], g / 2);
    lift[half] = bits_float((127 + (g % 2 ? odd : even)) << 23);
  }
}

// Two codes (in the bytes of `pair` that `selector` names) as halves: INT8 less 128, FP8 as it is.
DEVICE u32 widen_int8(u32 codes, u32 selector) {
  return half_sub(permute_bytes(codes, 0x64646464u, selector), 0x64806480u);  // 1024 + code, less 1152
}

// The new token's row, where it is one of the tile's: `row` of 16, or outside them.
DEVICE void take_key(KeyTile& tile, const u32* from, int row) {
  const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
  for (int half = 0; half < 2; half++)
    if (g + 8 * half == row) {
#pragma unroll
      for (int w = 0; w < K_WORDS; w++)
        tile.rows[half][w] = from[w / (K_LOAD / 4) * K_LOAD + t * (K_LOAD / 4) + w % (K_LOAD / 4)];
      if (SCALED) tile.params[half] = from[K_ROW / 4];
    }
}
DEVICE void take_value(ValueTile& tile, const u32* from, int row) {
  const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (2 * t + i % 2 + 8 * (i / 2) == row)
#pragma unroll
      for (int w = 0; w < V_WORDS; w++)
        tile.rows[i][w] = from[w / (V_LOAD / 4) * (2 * V_LOAD) + g * (V_LOAD / 4) + w % (V_LOAD / 4)];
#pragma unroll
  for (int half = 0; half < 2; half++)
    if (SCALED && g + 8 * half == row) tile.params[half] = from[V_ROW / 4];
}

// Operand of step `step` (16 elements) of the keys.
DEVICE void key_operand(u32 (&a)[4], const KeyTile& tile, int step) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (MODE < 2) {
      a[half] = tile.rows[half][2 * step];
      a[half + 2] = tile.rows[half][2 * step + 1];
    } else if constexpr (MODE == 4) {
      const int word = step / 2, pair = word / (K_WORDS / 2);
      const u32 scales = int4_scales(permute_bytes(tile.params[half], 0, pair ? 0x4341 : 0x4240));
      a[half] = widen_int4(tile.rows[half][word], step % 2 * 2, scales);
      a[half + 2] = widen_int4(tile.rows[half][word], step % 2 * 2 + 1, scales);
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
// INT4 values: rows are bytes `value_byte(tile, 0)` and, eight rows on, `value_byte(tile, 1)`; columns are the two elements
// of a byte, first of tokens 2t, then of 2t + 1, eight tokens further on if `behind`. What multiplies them has a weight
// in one of two places and nothing in the other, so the product's columns are a query's lower and upper half.
DEVICE void value_operand(u32 (&a)[4], const ValueTile& tile, int index, int behind) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int token = 2 * behind + i / 2, byte = 2 * index + i % 2;
    a[i] = widen_int4(tile.rows[token][byte / 4], byte % 4, int4_scales(tile.params[token]));
  }
}
DEVICE int value_byte(int tile, int half) { return lane_id() / 4 * (V_ROW / 8) + 2 * tile + half; }
// Which element of the value the lane's rows of a tile are.
DEVICE int value_element(int tile, int half) {
  constexpr int per_load = MODE < 2 ? V_LOAD / 2 : V_LOAD;
  int held = 2 * tile + half;
  return held / per_load * 8 * per_load + lane_id() / 4 * per_load + held % per_load;
}
// Elements of a head in the order that keys are read in (INT4: both of a byte together); a lane's four of step `step` are
// those from step * 4 / QUERY_RUN * 4 * QUERY_RUN + t * QUERY_RUN + step * 4 % QUERY_RUN on.
constexpr int QUERY_RUN = MODE < 2 ? K_LOAD / 2 : MODE == 4 ? 2 * K_LOAD : K_LOAD;
static_assert(QUERY_RUN % 4 == 0, "four elements of a step lie together");

DEVICE void mma_pages(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  if (AS_HALVES) {
    mma_half(c, a, b);
  } else {
    mma_bf16(c, a, b);
  }
}
DEVICE u32 pack_weights(float low, float high) { return AS_HALVES ? half_pair(low, high) : bf16_pair(low, high); }
