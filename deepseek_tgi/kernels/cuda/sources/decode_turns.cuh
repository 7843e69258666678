// What a centre that was taken off keys adds to scores: more columns of the product; see paged_decode.cu.
//
// A score gains, over pairs of elements, cosine and sine times what query and constant come to. A tile's tokens are its
// start, a multiple of 16, and those up to 15 behind it: R_(start + i) c = R_i (R_start c). So a warp rotates the constant
// once a tile, queries times that are weights, and the table of cosines and sines they multiply is one for i = 0 .. 15,
// the same for all tiles, in shared memory. Weights and table are halves twice: high, and what is left.
#pragma once
#include "decode_shares.cuh"
#include "head_rows.cuh"
#include "heads.cuh"

constexpr int TURN_BATCH = MODE == 4 ? 2 : 4;  // steps of four pairs that are loaded together, as registers allow
constexpr int MAX_TURNS = DK / 8;              // steps; pairs that turn and one for all that does not are DK / 2 at most
constexpr int SLOTS = 4 * MAX_TURNS;           // pairs
constexpr int TURN_ROW = SLOTS + 4;            // of a query's pairs: rows of neighbours lie in other banks
constexpr int WORK_FLOATS = LARGEST + 2 * TILES * SLOTS * 2;  // a head, then constants at the starts of tiles, twice

DEVICE float power_below(float magnitude) {  // 2^-e for a magnitude of 2^e or a little more
  u32 exponent = float_bits(magnitude) >> 23;
  exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
  return bits_float((254 - exponent) << 23);
}

// What a block keeps of it; pairs are of floats, as bits.
struct Turns {
  words2 queries[QUERIES][TURN_ROW];
  __align__(16) u8 own[MAX_TURNS * 48];  // a head's pairs of the constant, then their indices
#if MODE != 4
  words4 table[MAX_TURNS][32];  // as the matrix instruction wants it: tokens g and g + 8, then what is left of them
#endif
};
// Where INT4 has it: rows of levels are twice as far apart as they are long.
DEVICE words4* turn_row(Turns& turns, int step, int lane) {
#if MODE == 4
  return (words4*)(dynamic_shared() + (4 * step + lane / 8) * LEVEL_ROW + LEVEL_ROW / 2 + lane % 8 * 16);
#else
  return &turns.table[step][lane];
#endif
}

// What a head has in memory: its table, its pairs of the constant, their indices (-1: none), and what the constant was
// divided by; see `TurnTables`. Reads of global memory return in order, so one in the loop would wait for all keys and
// values that are under way: `near` ones are of shared memory, once a block has synchronised.
struct TurnHead {
  const u8* table;
  const u8* own;
  int steps;
  template <bool near>
  DEVICE_IN_CLASS words2 pair(int slot) const {
    if constexpr (near) return ((const words2*)own)[slot];
    return load_kept8(table + steps * 512 + slot * 8);
  }
  template <bool near>
  DEVICE_IN_CLASS int index(int slot) const {
    if constexpr (near) return ((const int*)(own + steps * 32))[slot];
    return (int)load_kept4(table + steps * 544 + slot * 4);
  }
  DEVICE_IN_CLASS float grow() const { return bits_float(load_kept4(table + steps * 560)); }
};
DEVICE TurnHead turn_head(const Turns& turns, const u8* heads, int head, int steps) {
  return {heads + head * (steps * 560 + 16), turns.own, steps};
}

// In the background: the table and the head's own, by a block.
DEVICE void bring_table(Turns& turns, const TurnHead& head) {
  for (int i = threadIdx.x; i < head.steps * 35; i += blockDim.x) {
    const int at = i - head.steps * 32;
    copy_async(at < 0 ? (void*)turn_row(turns, i / 32, i % 32) : (void*)(turns.own + at * 16), head.table + i * 16);
  }
}
// And the cosines and sines of the starts of a warp's tiles, in the head's order: a lane waits for its own.
template <bool near>
DEVICE void bring_starts(words2* at, const TurnHead& head, const u8* starts, int token, int length, int half) {
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    const u8* const row = starts + (i64)(smaller(token + 16 * j, length - 1) / 16) * ((half + 1) * 8);
#pragma unroll 2
    for (int slot = lane_id(); slot < 4 * head.steps; slot += 32)
      copy_async8(at + j * SLOTS + slot, row + larger(0, head.index<near>(slot)) * 8);
  }
  copy_commit();
}
// They become the constant, rotated to those starts.
template <bool near>
DEVICE void turn_centre(words2* at, const TurnHead& head) {
#pragma unroll 2
  for (int slot = lane_id(); slot < 4 * head.steps; slot += 32) {
    const words2 pair = head.pair<near>(slot);
    const float a = bits_float(pair.x), b = bits_float(pair.y);
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      const float cosine = bits_float(at[j * SLOTS + slot].x), sine = bits_float(at[j * SLOTS + slot].y);
      at[j * SLOTS + slot] = {float_bits(a * cosine - b * sine), float_bits(b * cosine + a * sine)};
    }
  }
}

// `q` is query `query` of the group, rotated to its position; `shrink` brings it near 1.
template <bool near>
DEVICE void lay_pairs(Turns& turns, int query, const float* q, float shrink, const float* centre, const TurnHead& head,
                      int half) {
  for (int slot = lane_id(); slot < 4 * head.steps; slot += 32) {
    const int pair = head.index<near>(slot);
    float a = 0.0f, b = 0.0f;
    if (pair == half) {  // all that does not turn; the head's own pair is what its constant was multiplied by
      for (int d = 2 * half; d < DK; d++) a += q[d] * centre[d];
    } else if (pair >= 0) {
      a = q[pair], b = q[half + pair];
    }
    turns.queries[query][slot] = {float_bits(a * shrink), float_bits(b * shrink)};
  }
}
// A query that is not.
DEVICE void lay_no_pairs(Turns& turns, int query, int steps) {
  for (int slot = lane_id(); slot < 4 * steps; slot += 32) turns.queries[query][slot] = {0, 0};
}

// What the centre adds to the scores of one tile, whose constants are `at`, but for powers of two.
DEVICE void turned_scores(float (&sums)[NT][4], Turns& turns, const words2* at, int steps) {
  const int lane = lane_id(), g = lane / 4, t = lane % 4;
  constexpr int CHAINS = MODE == 4 ? 1 : 3;  // of their own: an instruction takes long, but INT4 is short of registers
  float chains[CHAINS][NT][4] = {};
  for (int first = 0; first < steps; first += TURN_BATCH) {
#pragma unroll
    for (int i = 0; i < TURN_BATCH; i += 2) {
      words4 row[2];
      words2 centre[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        row[e] = *turn_row(turns, first + i + e, lane);
        centre[e] = at[4 * (first + i + e) + t];
      }
      const u32 highs[4] = {row[0].x, row[0].y, row[1].x, row[1].y};
#pragma unroll
      for (int m = 0; m < NT; m++) {
        u32 low[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const words2 query = turns.queries[8 * m + g][4 * (first + i + e) + t];
          const float a = bits_float(query.x), b = bits_float(query.y);
          const float x = a * bits_float(centre[e].x) + b * bits_float(centre[e].y);
          const float y = b * bits_float(centre[e].x) - a * bits_float(centre[e].y);
          const u32 high = half_pair(x, y), both[2] = {high, high};
          low[e] = half_pair(x - half_low(high), y - half_high(high));
          const u32 all[4] = {row[e].x, row[e].y, row[e].z, row[e].w};
          mma_half(chains[e % CHAINS][m], all, both);
        }
        mma_half(chains[CHAINS - 1][m], highs, low);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < NT; m++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      sums[m][i] = chains[0][m][i];
#pragma unroll
      for (int c = 1; c < CHAINS; c++) sums[m][i] += chains[c][m][i];
    }
}
