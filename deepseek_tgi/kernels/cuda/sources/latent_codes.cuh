// How a token's latent and rotary key become what pages hold, in the format MODE (numbered as in latent_decode.cu): a warp
// has a latent, 16 elements a lane. Bytes follow kernels/latent_format.py to the bit: each operation of the formats is one
// rounding of its own, in the order given there.
#pragma once
#include "device.cuh"

#define INT8 (MODE == 2)
#define FP8 (MODE == 3)
#define INT4 (MODE == 4)
constexpr int HELD = 16, GROUP_LANES = GROUP / HELD, HALF_ROPE = ROPE / 2, TURNS = (HALF_ROPE + 31) / 32;
constexpr float HALF_MAX = 65504.0f;

static_assert(RANK == 512, "a warp holds a latent");
static_assert(MODE < 2 || GROUP_LANES == (INT4 ? 2 : 8), "the formats' groups");

DEVICE float read(const void* x, i64 at) { return X_BF16 ? bf16_float(((const u16*)x)[at]) : ((const float*)x)[at]; }
// Stores `value` and returns what is read back.
DEVICE float write(void* x, i64 at, float value) {
  if (X_BF16) {
    const u16 bits = float_bf16(value);
    ((u16*)x)[at] = bits;
    return bf16_float(bits);
  }
  ((float*)x)[at] = value;
  return value;
}
DEVICE float rounded(float x) { return X_BF16 ? bf16_float(float_bf16(x)) : x; }

DEVICE float within_half(float x) { return x != x ? x : fminf(fmaxf(x, -HALF_MAX), HALF_MAX); }
DEVICE u16 narrow(float x) { return MODE == 1 ? float_half(within_half(x)) : float_bf16(x); }

// Largest magnitude over the lanes that share a group; NaN if one is.
DEVICE float group_top(const float (&x)[HELD]) {
  float top = 0.0f;
  bool odd = false;
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    odd |= x[i] != x[i];
    top = fmaxf(top, fabsf(x[i]));
  }
  if (odd) top = bits_float(0x7FC00000u);
#pragma unroll
  for (int by = 1; by < GROUP_LANES; by *= 2) {
    const float other = shuffle_xor(top, by);
    top = other != other || top != top ? bits_float(0x7FC00000u) : fmaxf(top, other);
  }
  return top;
}

// INT8 and FP8: `x` in codes of one byte, and the lane's scale.
DEVICE u16 plain_codes(float (&x)[HELD], u32 (&words)[4]) {
  const float top = group_top(x);
  const bool odd = top != top;
  const u16 scale = odd ? 0x7E00 : half_above(top / (INT8 ? 127.0f : 448.0f));
  const float wide = half_float(scale), step = wide > 0.0f ? wide : 1.0f;
#pragma unroll
  for (int i = 0; i < HELD; i++) x[i] = odd ? 0.0f : x[i] / step;
#pragma unroll
  for (int w = 0; w < 4; w++) {
    if (FP8) {
      words[w] = fp8_pair(x[4 * w], x[4 * w + 1]) | (u32)fp8_pair(x[4 * w + 2], x[4 * w + 3]) << 16;
    } else {
      words[w] = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int code = (int)fminf(fmaxf(rintf(x[4 * w + i]), -127.0f), 127.0f);
        words[w] |= (u32)(code & 0xFF) << 8 * i;
      }
    }
  }
  return scale;
}

DEVICE bool turns(int i) { return 0x7888 >> i & 1; }  // elements 3, 7, 11 to 14 of every sixteen
DEVICE float int4_scale(int byte) { return half_float((u16)(byte << 7)) / 64.0f; }

// INT4: `x` rotated, then in codes of four bits, two words of a lane's own 16; returns the group's scale byte.
DEVICE int rotated_codes(float (&x)[HELD], u32 (&words)[2]) {
  const bool upper = lane_id() & 1;
#pragma unroll
  for (int i = 0; i < HELD; i++)
    if (turns(i)) x[i] = -x[i];
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    const float other = shuffle_xor(x[i], 1);
    x[i] = upper ? minus(other, x[i]) : plus(x[i], other);
  }
#pragma unroll
  for (int half = HELD / 2; half; half /= 2)
#pragma unroll
    for (int i = 0; i < HELD; i++)
      if (!(i & half)) {
        const float a = x[i], b = x[i + half];
        x[i] = plus(a, b);
        x[i + half] = minus(a, b);
      }
#pragma unroll
  for (int i = 0; i < HELD; i++) x[i] = x[i] / GROUP;
  const float top = group_top(x);
  const bool odd = top != top;
  const int first = (half_above(odd ? 0.0f : times(top / 127.0f, 64.0f)) + 127) >> 7;
  const float levels[8] = {6, 18, 31, 45, 60, 77, 98, 127};
  int kept = first;
  float smallest = infinity();
  for (int trial = 0; trial < 4; trial++) {
    const int byte = first > trial ? first - trial : 0;
    const float scale = int4_scale(byte), step = scale > 0.0f ? scale : 1.0f;
    u32 codes[2] = {0, 0};
    float error[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      const float steps = x[i] / step, size = fabsf(steps);
      int index = 0;
      float level = levels[0];
#pragma unroll
      for (int k = 1; k < 8; k++)
        if (size > (levels[k - 1] + levels[k]) * 0.5f) {
          index = k;
          level = levels[k];
        }
      const bool above = steps > 0.0f;
      codes[i / 8] |= (u32)(above ? 8 + index : 7 - index) << 4 * (i % 8);
      const float off = minus(x[i], times(above ? level : -level, scale));
      error[i] = times(off, off);
    }
#pragma unroll
    for (int i = 0; i < HELD; i++) error[i] = plus(error[i], shuffle_xor(error[i], 1));
#pragma unroll
    for (int half = HELD / 2; half; half /= 2)
#pragma unroll
      for (int i = 0; i < half; i++) error[i] = plus(error[i], error[i + half]);
    if (trial == 0 || error[0] < smallest) {
      kept = byte;
      smallest = error[0];
      words[0] = codes[0];
      words[1] = codes[1];
    }
  }
  return odd ? 0xFC : kept;
}

// Eight codes each of a group's lower and upper half side by side: a byte has one of both.
DEVICE words2 zipped(u32 low, u32 high) {
  words2 bytes = {0, 0};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const u32 pair = (low >> 4 * i & 15) | (high >> 4 * i & 15) << 4;
    if (i < 4) {
      bytes.x |= pair << 8 * i;
    } else {
      bytes.y |= pair << 8 * (i - 4);
    }
  }
  return bytes;
}

// What a warp holds of a token before its latent is there: norm weights of the lane's elements, its turns of the key.
struct Norm {
  float weight[HELD], cosine[TURNS], sine[TURNS];
};
DEVICE Norm load_norm(const float* weight, const float* turns_of) {
  Norm norm;
#pragma unroll
  for (int i = 0; i < HELD; i++) norm.weight[i] = weight[HELD * lane_id() + i];
#pragma unroll
  for (int i = 0; i < TURNS; i++) {
    const int at = lane_id() + 32 * i < HALF_ROPE ? lane_id() + 32 * i : HALF_ROPE - 1;
    norm.cosine[i] = turns_of[at];
    norm.sine[i] = turns_of[HALF_ROPE + at];
  }
  return norm;
}

// A token as pages hold it: the lane's latent (MODE < 2: 32 bytes; INT8 and FP8: 16; INT4: 8), its elements of the key, as
// many of either half, and the scale of its group.
struct Encoded {
  u32 latent[8];
  u16 rope[TURNS][2], scale;
};
// With `normed` the latent is normed and the key turned before, and `kept` says that both are left in place of what was
// given.
template <bool normed, bool kept>
DEVICE Encoded encode_token(void* latent, i64 latent_at, void* rope, i64 rope_at, const Norm& norm, float eps) {
  const int lane = lane_id();
  Encoded made;
  float x[HELD], squares = 0.0f, first[TURNS], second[TURNS];
#pragma unroll
  for (int i = 0; i < HELD; i++) x[i] = read(latent, latent_at + HELD * lane + i);
#pragma unroll
  for (int i = 0; i < TURNS; i++) {
    const i64 at = rope_at + (lane + 32 * i < HALF_ROPE ? lane + 32 * i : HALF_ROPE - 1);
    first[i] = read(rope, at);
    second[i] = read(rope, at + HALF_ROPE);
  }
#pragma unroll
  for (int i = 0; i < TURNS; i++) {
    if (normed) {
      const i64 at = rope_at + lane + 32 * i;
      const bool writes = kept && lane + 32 * i < HALF_ROPE;
      const float low = minus(times(first[i], norm.cosine[i]), times(second[i], norm.sine[i]));
      const float high = plus(times(second[i], norm.cosine[i]), times(first[i], norm.sine[i]));
      first[i] = writes ? write(rope, at, low) : rounded(low);
      second[i] = writes ? write(rope, at + HALF_ROPE, high) : rounded(high);
    }
    made.rope[i][0] = narrow(first[i]);
    made.rope[i][1] = narrow(second[i]);
  }
  if (normed) {
#pragma unroll
    for (int i = 0; i < HELD; i++) squares += x[i] * x[i];
    const float factor = rsqrt_near(warp_sum(squares) / RANK + eps);
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      const float value = x[i] * factor * norm.weight[i];
      x[i] = kept ? write(latent, latent_at + HELD * lane + i, value) : rounded(value);
    }
  }
  made.scale = 0;
  if (MODE < 2) {
#pragma unroll
    for (int i = 0; i < HELD / 2; i++) made.latent[i] = narrow(x[2 * i]) | (u32)narrow(x[2 * i + 1]) << 16;
    return made;
  }
#pragma unroll
  for (int i = 0; i < HELD; i++) x[i] = within_half(x[i]);
  if (INT4) {
    u32 words[2];
    made.scale = (u16)rotated_codes(x, words);
    const bool upper = lane & 1;
    const u32 other = shuffle_xor(upper ? words[0] : words[1], 1);
    const words2 both = upper ? zipped(other, words[1]) : zipped(words[0], other);
    made.latent[0] = both.x;
    made.latent[1] = both.y;
  } else {
    u32 words[4];
    made.scale = plain_codes(x, words);
#pragma unroll
    for (int i = 0; i < 4; i++) made.latent[i] = words[i];
  }
  return made;
}

struct Store {
  u8 *latent, *rope, *scales;
  i64 page_bytes;
};
// Stores it in the place of `slot`, nowhere if that is negative.
DEVICE void store_token(const Encoded& token, i64 slot, const Store& store) {
  const int lane = lane_id(), place = (int)(slot % BLOCK);
  const i64 page = slot / BLOCK * store.page_bytes;
  if (slot < 0) return;
#pragma unroll
  for (int i = 0; i < TURNS; i++) {
    if (lane + 32 * i >= HALF_ROPE) continue;
    u16* const to = (u16*)(store.rope + page) + place * ROPE + lane + 32 * i;
    to[0] = token.rope[i][0];
    to[HALF_ROPE] = token.rope[i][1];
  }
  u8* const to = store.latent + page;
  if (INT4) {
    *(words2*)(to + place * (RANK / 2) + lane * 8) = words2{token.latent[0], token.latent[1]};
    if (lane % GROUP_LANES == 0) store.scales[page + place * (RANK / GROUP) + lane / GROUP_LANES] = (u8)token.scale;
    return;
  }
  const int row = MODE < 2 ? RANK * 2 : RANK;
#pragma unroll
  for (int i = 0; i < (MODE < 2 ? 2 : 1); i++)
    *(words4*)(to + place * row + lane * (row / 32) + 16 * i) = words4{
        token.latent[4 * i], token.latent[4 * i + 1], token.latent[4 * i + 2], token.latent[4 * i + 3]};
  if (MODE >= 2 && lane % GROUP_LANES == 0)
    ((u16*)(store.scales + page))[place * (RANK / GROUP) + lane / GROUP_LANES] = token.scale;
}
