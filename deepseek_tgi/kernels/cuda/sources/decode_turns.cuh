// What a centre that was taken off keys adds to scores: more columns of the product; see paged_decode.cu.
#pragma once
#include "device.cuh"

constexpr int TURN_BATCH = MODE == 4 ? 2 : 4;  // steps of four pairs that are loaded together, as registers allow
constexpr int MAX_TURNS = (DK / 8 + TURN_BATCH) / TURN_BATCH * TURN_BATCH;  // one pair stands for all that does not turn

DEVICE float power_below(float magnitude) {  // 2^-e for a magnitude of 2^e or a little more
  u32 exponent = float_bits(magnitude) >> 23;
  exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
  return bits_float((254 - exponent) << 23);
}

// For eight queries: of each pair of elements what goes with cos and sin, in halves.
struct Turns {
  u32 high[MAX_TURNS][32], low[MAX_TURNS][32];  // as the matrix instruction wants them
  float grow[8];
  int pairs[4 * MAX_TURNS];  // of the head, or -1
};
DEVICE void turned_query(float (&c)[2], const float* q, const float* centre, int pair, int rotary) {
  const int half = rotary / 2;
  c[0] = c[1] = 0.0f;
  if (pair < 0) return;
  if (pair == half) {
    for (int d = rotary; d < DK; d++) c[0] += q[d] * centre[d];
    return;
  }
  const float a = q[pair], b = q[half + pair];
  c[0] = a * centre[pair] + b * centre[half + pair];
  c[1] = b * centre[pair] - a * centre[half + pair];
}
// `q` is query `query` of the eight, rotated to its position.
DEVICE void turn_query(Turns& turns, int query, const float* q, const float* centre, const int* pairs, int steps,
                       int rotary) {
  float magnitude = 0.0f, c[2];
  for (int i = lane_id(); i < 4 * steps; i += 32) {
    turned_query(c, q, centre, pairs[i], rotary);
    magnitude = fmaxf(magnitude, fmaxf(fabsf(c[0]), fabsf(c[1])));
  }
  const float shrink = power_below(warp_max(magnitude));
  for (int i = lane_id(); i < 4 * steps; i += 32) {
    turned_query(c, q, centre, pairs[i], rotary);
    const float x = c[0] * shrink, y = c[1] * shrink;
    const u32 high = half_pair(x, y);
    turns.high[i / 4][4 * query + i % 4] = high;
    turns.low[i / 4][4 * query + i % 4] = half_pair(x - half_low(high), y - half_high(high));
  }
  if (lane_id() == 0) turns.grow[query] = 1.0f / shrink;
}
// Queries that are not.
DEVICE void no_turns(Turns& turns, int query, int steps) {
  for (int i = lane_id(); i < 4 * steps; i += 32)
    turns.high[i / 4][4 * query + i % 4] = turns.low[i / 4][4 * query + i % 4] = 0;
  if (lane_id() == 0) turns.grow[query] = 1.0f;
}
