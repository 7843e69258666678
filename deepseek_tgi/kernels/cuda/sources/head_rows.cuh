// What becomes of a token's heads before attention, one warp a head: norm, rotation, and the write into a page.
//
// X_BF16 says what heads come as, MODE how pages hold them: as in heads.cuh, and 5 is float32. Each stage rounds to the
// activations' type, as separate operations would. Arithmetic that decides a stored byte follows the formats' definition
// one operation at a time, so bytes are those of every other implementation.
#pragma once
#include "device.cuh"

constexpr int LARGEST = DK > DV ? DK : DV;
constexpr int HELD = (LARGEST + 31) / 32;
constexpr float HALF_MAX = 65504.0f;
DEVICE constexpr int row_bytes(int width) { return MODE == 5 ? 4 * width : MODE < 2 ? 2 * width : MODE == 4 ? width / 2 : width; }
DEVICE constexpr int group_of(int width) { return width <= 64 ? 4 : width <= 128 ? 8 : 16; }
DEVICE constexpr int param_bytes(int width) { return MODE == 4 ? width / group_of(width) : MODE == 2 ? 4 : 2; }

DEVICE float rounded(float x) { return X_BF16 ? bf16_float(float_bf16(x)) : x; }
DEVICE float read_at(const void* x, i64 i) { return X_BF16 ? bf16_float(((const u16*)x)[i]) : ((const float*)x)[i]; }
DEVICE void write_at(void* x, i64 i, float value) {
  if (X_BF16) {
    ((u16*)x)[i] = float_bf16(value);
  } else {
    ((float*)x)[i] = value;
  }
}
// NaN stays NaN.
DEVICE float within(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }
DEVICE u16 half_or_nan(float x, bool up) { return x != x ? 0x7E00 : up ? half_above(x) : half_below(x); }

// `x` rotated to a position whose cosines and sines are `turn`; element i goes with i + rotary / 2.
DEVICE float turned(const float* x, int i, const float* turn, int rotary) {
  const int half = rotary / 2;
  if (i >= rotary) return x[i];
  if (i < half) return minus(times(x[i], turn[i]), times(x[i + half], turn[half + i]));
  return plus(times(x[i], turn[i - half]), times(x[i - half], turn[i]));
}

// One head, `width` elements from `at` on, `HELD` a lane at lane + 32 j.
DEVICE void read_head(float (&x)[HELD], const void* source, i64 at, int width) {
#pragma unroll
  for (int j = 0; j < HELD; j++) x[j] = lane_id() + 32 * j < width ? read_at(source, at + lane_id() + 32 * j) : 0.0f;
}
// Its norm, if there are weights, and its rotation, if wished. `own` holds a head.
DEVICE void norm_and_turn(float (&x)[HELD], int width, const float* weight, float eps, bool rotates, const float* turn,
                          int rotary, float* own) {
  const int lane = lane_id();
  if (weight) {
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < HELD; j++) squares += x[j] * x[j];
    const float root = sqrtf(warp_sum(squares) / width + eps);
#pragma unroll
    for (int j = 0; j < HELD; j++)
      if (lane + 32 * j < width) x[j] = rounded(times(x[j] / root, weight[lane + 32 * j]));
  }
  if (!rotates) return;
#pragma unroll
  for (int j = 0; j < HELD; j++)
    if (lane + 32 * j < width) own[lane + 32 * j] = x[j];
  warp_sync();
#pragma unroll
  for (int j = 0; j < HELD; j++)
    if (lane + 32 * j < width) x[j] = rounded(turned(own, lane + 32 * j, turn, rotary));
  warp_sync();
}
// A key without its centre, rotated as it is.
DEVICE void take_off(float (&x)[HELD], const float* centre, const float* turn, int rotary) {
#pragma unroll
  for (int j = 0; j < HELD; j++)
    if (lane_id() + 32 * j < DK) x[j] = minus(x[j], turned(centre, lane_id() + 32 * j, turn, rotary));
}

// One vector `x` of `width` elements, `HELD` a lane at lane + 32 j, to its place in a page.
DEVICE void store_vector(float (&x)[HELD], int width, u8* row, u8* params, float given_scale) {
  const int lane = lane_id();
  bool lost = false;
  float least = infinity(), most = -infinity();
#pragma unroll
  for (int j = 0; j < HELD; j++) {
    if (lane + 32 * j >= width) continue;
    if (MODE == 0) ((u16*)row)[lane + 32 * j] = float_bf16(x[j]);
    if (MODE == 5) ((float*)row)[lane + 32 * j] = x[j];
    if (MODE == 0 || MODE == 5) continue;
    x[j] = within(x[j], HALF_MAX);
    if (MODE == 1) ((u16*)row)[lane + 32 * j] = float_half(x[j]);
    lost |= x[j] != x[j];
    least = fminf(least, x[j]);
    most = fmaxf(most, x[j]);
  }
  if (MODE != 2 && MODE != 3) return;
  lost = warp_ballot(lost) != 0;
  most = warp_max(most), least = -warp_max(-least);
  const float nan = bits_float(0x7FC00000u);
  if (MODE == 2) {
    const u16 zero = half_or_nan(lost ? nan : least, false);
    const float base = half_float(zero);
    const u16 scale = lost ? 0 : half_or_nan((most - base) / 255.0f, true);
    const float step = half_float(scale) > 0.0f ? half_float(scale) : 1.0f;
#pragma unroll
    for (int j = 0; j < HELD; j++)
      if (lane + 32 * j < width) {
        float code = lost ? 0.0f : rintf((x[j] - base) / step);
        row[lane + 32 * j] = (u8)(int)fminf(fmaxf(code, 0.0f), 255.0f);
      }
    if (lane == 0) *(u32*)params = (u32)zero << 16 | scale;
  } else {
    const u16 own = half_or_nan(lost ? nan : fmaxf(most, -least) / 448.0f, true);
    const u16 scale = lost || given_scale < 0.0f ? own : float_half(given_scale);
    const float step = half_float(scale) > 0.0f ? half_float(scale) : 1.0f;
#pragma unroll
    for (int j = 0; j < HELD; j++)
      if (lane + 32 * j < width)
        row[lane + 32 * j] = (u8)fp8_pair(lost ? 0.0f : within(x[j] / step, 448.0f), 0.0f);
    if (lane == 0) *(u16*)params = scale;
  }
}
