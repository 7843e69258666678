// Everything that happens to a step's heads before attention: norm, rotation, and keys and values into their pages.
//
// One warp a head: first the HEADS query heads of a token (none if keys are stored as they come), then its keys, then
// its values. Each stage rounds to the activations' type, as separate operations would. MODE is that of heads.cuh, 4 for
// INT4 or 5 for float32 pages. Arithmetic that decides a stored byte follows the formats' definition one operation at a time, so
// bytes are those of every other implementation.
#include "device.cuh"

constexpr int WARPS = 4;
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

#if MODE == 4
#include "head_int4.cuh"
#endif

// `centre` (of keys, or none) is taken off what is quantised; scales below zero are those of the vectors themselves.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 4)
    kv_write(void* q, i64 q_stride, int heads, void* k, i64 k_stride, const void* __restrict__ v, i64 v_stride,
             int kv_heads, const float* __restrict__ q_norm, const float* __restrict__ k_norm, float eps,
             const float* __restrict__ cos_sin, int rotary, int rotates, const int* __restrict__ positions,
             const i64* __restrict__ slots, u8* k_rows, u8* v_rows, u8* k_params, u8* v_params, i64 page_bytes,
             const float* __restrict__ centre, float k_scale, float v_scale, const float* __restrict__ aim,
             const float* __restrict__ weight_along) {
  __shared__ float shared[WARPS][LARGEST];
  const int lane = lane_id(), token = blockIdx.y;
  const int index = blockIdx.x * WARPS + threadIdx.x / 32;
  wait_for_earlier();
  let_next_start();
  if (index >= heads + 2 * kv_heads) return;
  const bool is_query = index < heads, is_value = index >= heads + kv_heads;
  const int head = is_query ? index : (index - heads) % kv_heads;
  const int width = is_value ? DV : DK;
  const void* source = is_query ? q : is_value ? v : k;
  const i64 at = token * (is_query ? q_stride : is_value ? v_stride : k_stride) + (i64)head * width;
  const float* turn = positions ? cos_sin + (i64)positions[token] * rotary : cos_sin;
  float* own = shared[threadIdx.x / 32];
  float x[HELD];
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < HELD; j++) {
    x[j] = lane + 32 * j < width ? read_at(source, at + lane + 32 * j) : 0.0f;
    squares += x[j] * x[j];
  }
  if (!is_value) {
    const float* weight = is_query ? q_norm : k_norm;
    if (weight) {
      const float root = sqrtf(warp_sum(squares) / width + eps);
#pragma unroll
      for (int j = 0; j < HELD; j++)
        if (lane + 32 * j < width) x[j] = rounded(times(x[j] / root, weight[lane + 32 * j]));
    }
    if (rotates) {
#pragma unroll
      for (int j = 0; j < HELD; j++)
        if (lane + 32 * j < width) own[lane + 32 * j] = x[j];
      warp_sync();
#pragma unroll
      for (int j = 0; j < HELD; j++)
        if (lane + 32 * j < width) x[j] = rounded(turned(own, lane + 32 * j, turn, rotary));
      warp_sync();
    }
    if (weight || rotates) {
      void* target = is_query ? q : k;
#pragma unroll
      for (int j = 0; j < HELD; j++)
        if (lane + 32 * j < width) write_at(target, at + lane + 32 * j, x[j]);
    }
    if (is_query) return;
    if (centre && MODE != 4) {
#pragma unroll
      for (int j = 0; j < HELD; j++)
        if (lane + 32 * j < DK) x[j] = minus(x[j], turned(centre + head * DK, lane + 32 * j, turn, rotary));
    }
  }
  const i64 slot = slots[token];
  if (slot < 0) return;
  const i64 page = slot / BLOCK * page_bytes;
  const int place = head * BLOCK + (int)(slot % BLOCK);
  u8* row = (is_value ? v_rows : k_rows) + page + (i64)place * (is_value ? row_bytes(DV) : row_bytes(DK));
  u8* params = (is_value ? v_params : k_params) + page + place * (is_value ? param_bytes(DV) : param_bytes(DK));
#if MODE == 4
  __shared__ Int4Room rooms[WARPS];
  Int4Room& room = rooms[threadIdx.x / 32];
  if (is_value) {
    store_int4<DV>(room, x, row, params, false, nullptr, nullptr, 0.0f, nullptr, 0);
  } else {
    const bool aims = aim && weight_along;
    store_int4<DK>(room, x, row, params, true, centre ? centre + head * DK : nullptr, aims ? aim + head * DK : nullptr,
                   aims ? weight_along[head] : 0.0f, turn, rotary);
  }
#else
  store_vector(x, width, row, params, is_value ? v_scale : k_scale);
#endif
}
EXPORT(kv_write)
