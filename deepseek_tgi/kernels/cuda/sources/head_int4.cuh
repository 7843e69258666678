// One key or value of a head to INT4, by one warp, as `int4_format` defines it: one operation after the other, so that
// bytes are those of every other implementation. Included by kv_write.cu.
#pragma once

constexpr int GROUPS_AT_MOST = 32;

// What a warp works in.
struct Int4Room {
  float y[LARGEST], along[LARGEST];
  float limit[GROUPS_AT_MOST], below[GROUPS_AT_MOST], later[GROUPS_AT_MOST];  // of groups
  u8 codes[LARGEST];
};

constexpr int TRIALS = 4;
constexpr int LARGEST_BYTE = 0xF7, LOST_BYTE = 0xFC;

DEVICE float level_size(int i) {
  const float low = i < 2 ? (i < 1 ? 6.0f : 18.0f) : i < 3 ? 31.0f : 45.0f;
  const float high = i < 6 ? (i < 5 ? 60.0f : 77.0f) : i < 7 ? 98.0f : 127.0f;
  return i < 4 ? low : high;
}
DEVICE float int4_scale(int byte) { return half_float((u16)(byte << 7)) / 64.0f; }

// `v [width]`, element lane + 32 j in `v[j]`, times the Hadamard matrix of `size` rows, along it as often as it fits, times
// `factor` (a power of two).
template <int width>
DEVICE void rotate_heads(float (&v)[width / 32], float factor) {
  constexpr int size = width & -width;
#pragma unroll
  for (int apart = size / 64; apart; apart /= 2)
#pragma unroll
    for (int j = 0; j < width / 32; j++)
      if (!(j & apart)) {
        const float a = v[j], b = v[j + apart];
        v[j] = plus(a, b), v[j + apart] = minus(a, b);
      }
#pragma unroll
  for (int half = 16; half; half /= 2)
#pragma unroll
    for (int j = 0; j < width / 32; j++) {
      const float other = shuffle_xor(v[j], half);
      v[j] = lane_id() & half ? minus(other, v[j]) : plus(v[j], other);
    }
#pragma unroll
  for (int j = 0; j < width / 32; j++) v[j] *= factor;
}
// The sum of such a vector: half onto half while the length is even, then in order. `room` holds it where lanes do not.
template <int width>
DEVICE float fold_all(float (&v)[width / 32], float* room) {
  constexpr int odd = width / (width & -width);
  if constexpr (odd == 1) {
#pragma unroll
    for (int apart = width / 64; apart; apart /= 2)
#pragma unroll
      for (int j = 0; j < apart; j++) v[j] = plus(v[j], v[j + apart]);
#pragma unroll
    for (int half = 16; half; half /= 2) v[0] = plus(v[0], shuffle_xor(v[0], half));
    return v[0];
  }
  warp_sync();
#pragma unroll
  for (int j = 0; j < width / 32; j++) room[lane_id() + 32 * j] = v[j];
  warp_sync();
#pragma unroll 1
  for (int half = width / 2; half >= odd; half /= 2) {
    for (int i = lane_id(); i < half; i += 32) room[i] = plus(room[i], room[i + half]);
    warp_sync();
  }
  float total = room[0];
  for (int i = 1; i < odd; i++) total = plus(total, room[i]);
  warp_sync();
  return total;
}
// The same over the `size` lanes that agree in lane / size.
template <int size>
DEVICE float fold_lanes(float x) {
#pragma unroll
  for (int mask = size / 2; mask; mask /= 2) x = plus(x, shuffle_xor(x, mask));
  return x;
}

template <int width>
DEVICE void store_int4(Int4Room& room, const float (&x)[HELD], u8* row, u8* params, bool is_key, const float* centre,
                       const float* aim, float weight, const float* turn, int rotary) {
  constexpr int size = width & -width, group = group_of(width), groups = width / group;
  constexpr int bits = size == 32 ? 5 : size == 64 ? 6 : size == 128 ? 7 : 8;
  constexpr float shrink = 1.0f / (1 << bits / 2);
  constexpr float longer = (float)size / (1 << 2 * (bits / 2));
  const int lane = lane_id();
  constexpr int held = width / 32;
  float y[held], along[held], work[held];
#pragma unroll
  for (int j = 0; j < held; j++) y[j] = within(x[j], HALF_MAX);
  rotate_heads<width>(y, shrink);
  int mark = 0;
  if (centre) {
#pragma unroll
    for (int j = 0; j < held; j++) along[j] = turned(centre, lane + 32 * j, turn, rotary);
    rotate_heads<width>(along, shrink);
#pragma unroll
    for (int j = 0; j < held; j++) {
      along[j] = minus(y[j], along[j]);
      work[j] = times(along[j], along[j]);
    }
    const float off = fold_all<width>(work, room.along);
#pragma unroll
    for (int j = 0; j < held; j++) work[j] = times(y[j], y[j]);
    mark = off <= fold_all<width>(work, room.along);
#pragma unroll
    for (int j = 0; j < held; j++) y[j] = mark ? along[j] : y[j];
  }
  bool lost = false;
#pragma unroll
  for (int j = 0; j < held; j++) lost |= y[j] != y[j], room.y[lane + 32 * j] = y[j];
  if (warp_ballot(lost)) {
    for (int i = lane; i < width / 2; i += 32) row[i] = 0x77;
    for (int i = lane; i < groups; i += 32) params[i] = LOST_BYTE;
    return;
  }
  const float part = aim ? weight / longer : 0.0f;
  if (aim) {
#pragma unroll
    for (int j = 0; j < held; j++) along[j] = turned(aim, lane + 32 * j, turn, rotary);
    rotate_heads<width>(along, shrink);
    // What groups need of others that does not depend on their codes, of as many groups at a time as lanes hold.
#pragma unroll
    for (int j = 0; j < held; j++) {
      room.along[lane + 32 * j] = along[j];
      work[j] = fold_lanes<group>(times(along[j], along[j]));
      float limit = fabsf(y[j]);
#pragma unroll
      for (int mask = group / 2; mask; mask /= 2) limit = fmaxf(limit, shuffle_xor(limit, mask));
      if (lane % group == 0) room.limit[(lane + 32 * j) / group] = times(limit, 0.125f);
    }
    float ahead = 0.0f, own = 0.0f, behind = 0.0f;  // of the group that the lane has the number of
#pragma unroll
    for (int index = groups - 1; index >= 0; index--) {
      behind = lane == index ? ahead : behind;
      ahead = plus(ahead, shuffle(work[index * group / 32], index * group % 32));
      own = lane == index ? ahead : own;
    }
    if (lane < groups) {
      room.later[lane] = part / plus(1.0f, times(part, behind));
      room.below[lane] = plus(1.0f, times(part, own));
    }
  }
  warp_sync();

  // A lane has one element of a group under one scale; scales beyond what the lanes hold take another turn. Each group
  // waits for the one before it: what is here is a chain of instructions, and as short as it can be.
  constexpr int at_once = 32 / group < TRIALS ? 32 / group : TRIALS;
  const int element = lane % group;
  float error_along = 0.0f;
  for (int index = 0; index < groups; index++) {
    const float y = room.y[index * group + element];
    float target = y, u = 0.0f, later = 0.0f;
    if (aim) {
      u = room.along[index * group + element];
      const float limit = room.limit[index], shift = times(u, times(part, error_along) / room.below[index]);
      target = minus(y, fminf(fmaxf(shift, -limit), limit));
      later = room.later[index];
    }
    const float top = times(bits_float(warp_most(float_bits(fabsf(target)))) / 127.0f, 64.0f);  // lanes have all of it
    int first = (half_above(fminf(top, HALF_MAX)) + 127) >> 7, step = 1;
    first = first < LARGEST_BYTE ? first : LARGEST_BYTE;
    if (is_key && index == 0) {
      first += (first ^ mark) & 1;
      step = 2;
      if (first > LARGEST_BYTE) first -= 2;
    }
    float best_cost = 0.0f, best_along = 0.0f;
    int best_byte = 0, best_code = 0;
#pragma unroll
    for (int from = 0; from < TRIALS; from += at_once) {
      const int trial = from + lane / group % at_once;
      const int byte = first >= trial * step ? first - trial * step : first;
      const float scale = int4_scale(byte);
      const float steps = target / (scale > 0.0f ? scale : 1.0f);
      int i = 0;
#pragma unroll
      for (int j = 0; j < 7; j++) i += fabsf(steps) > (level_size(j) + level_size(j + 1)) / 2.0f;
      const int code = steps > 0.0f ? 8 + i : 7 - i;
      const float level = steps > 0.0f ? level_size(i) : -level_size(i);
      const float error = minus(times(level, scale), y);
      float cost = fold_lanes<group>(times(error, error)), moved = 0.0f;
      if (aim) {
        moved = plus(error_along, fold_lanes<group>(times(u, error)));
        cost = plus(cost, times(later, times(moved, moved)));
      }
      // The least cost, the first of equals: bits of floats that are not negative are in their order.
      const u32 bits = trial * step < TRIALS ? float_bits(cost) : 0xFFFFFFFFu;
      const u32 least = warp_least(bits);
      const int holder = first_bit(warp_ballot(bits == least)) / group * group + element;
      const float other = bits_float(least), other_along = shuffle(moved, holder);
      const int other_byte = shuffle(byte, holder), other_code = shuffle(code, holder);
      if (from == 0 || (least != 0xFFFFFFFFu && other < best_cost))
        best_cost = other, best_along = other_along, best_byte = other_byte, best_code = other_code;
    }
    error_along = best_along;
    if (lane < group) room.codes[index * group + lane] = (u8)best_code;
    if (lane == 0) params[index] = (u8)best_byte;
  }
  warp_sync();
  for (int i = lane; i < width / 2; i += 32) row[i] = (u8)(room.codes[i] | room.codes[i + width / 2] << 4);
}
