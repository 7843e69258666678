// What latent attention needs of a step's tokens: queries and rotary keys turned by their positions, latents normed,
// and both stored in their pages in the format MODE (numbered as in latent_decode.cu). One block a token: its first
// warp has the latent and the key, the others the queries' heads. NORM 0: the latent is stored as it comes, nothing is
// turned (one warp is enough).
//
// A lane holds 16 elements of the latent. Bytes follow kernels/latent_format.py to the bit: each operation of the
// formats is one rounding of its own, in the order given there. What is stored is what the norm leaves in `latent`.
#include "device.cuh"

#define INT8 (MODE == 2)
#define FP8 (MODE == 3)
#define INT4 (MODE == 4)
constexpr int HELD = 16, LANES = RANK / HELD, GROUP_LANES = GROUP / HELD, HALF_ROPE = ROPE / 2;
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

// Elements `at` and `at + HALF_ROPE` turned in place.
DEVICE void turn(void* x, i64 at, float cosine, float sine, float (&turned)[2]) {
  const float first = read(x, at), second = read(x, at + HALF_ROPE);
  turned[0] = write(x, at, minus(times(first, cosine), times(second, sine)));
  turned[1] = write(x, at + HALF_ROPE, plus(times(second, cosine), times(first, sine)));
}

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

extern "C" __global__ void __launch_bounds__(THREADS)
    latent_prepare(void* __restrict__ q, i64 q_row, int heads, int head_width, void* __restrict__ latent, i64 latent_row,
                   void* __restrict__ rope, i64 rope_row, const float* __restrict__ norm_weight, float eps,
                   const int* __restrict__ positions, const float* __restrict__ cos_sin, const i64* __restrict__ slots,
                   u8* __restrict__ latent_pages, u8* __restrict__ rope_pages, u8* __restrict__ scale_pages,
                   i64 page_bytes) {
  const i64 token = blockIdx.x;
  const int lane = lane_id();
  wait_for_earlier();
  let_next_start();
  const float* turns_of = NORM ? cos_sin + (i64)positions[token] * ROPE : cos_sin;
  if (threadIdx.x >= 32) {
    for (int at = threadIdx.x - 32; at < heads * HALF_ROPE; at += THREADS - 32) {
      const int i = at % HALF_ROPE;
      float turned[2];
      turn(q, token * q_row + (i64)(at / HALF_ROPE) * head_width + i, turns_of[i], turns_of[HALF_ROPE + i], turned);
    }
    return;
  }

  const i64 slot = slots[token];
  const i64 page = slot / BLOCK * page_bytes;
  const int place = (int)(slot % BLOCK);
  for (int i = lane; i < HALF_ROPE; i += 32) {
    const i64 at = token * rope_row + i;
    float turned[2];
    if (NORM) {
      turn(rope, at, turns_of[i], turns_of[HALF_ROPE + i], turned);
    } else {
      turned[0] = read(rope, at);
      turned[1] = read(rope, at + HALF_ROPE);
    }
    if (slot >= 0) {
      u16* to = (u16*)(rope_pages + page) + place * ROPE + i;
      to[0] = narrow(turned[0]);
      to[HALF_ROPE] = narrow(turned[1]);
    }
  }

  float x[HELD];
  const i64 at = token * latent_row + HELD * lane;
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    x[i] = read(latent, at + i);
    squares += x[i] * x[i];
  }
  if (NORM) {
    const float factor = rsqrt_near(warp_sum(squares) / RANK + eps);
#pragma unroll
    for (int i = 0; i < HELD; i++) x[i] = write(latent, at + i, x[i] * factor * norm_weight[HELD * lane + i]);
  }
  if (MODE < 2) {
    if (slot >= 0) {
      u16* to = (u16*)(latent_pages + page) + place * RANK + HELD * lane;
#pragma unroll
      for (int i = 0; i < HELD; i++) to[i] = narrow(x[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < HELD; i++) x[i] = within_half(x[i]);
    if (INT4) {
      u32 words[2];
      const int scale = rotated_codes(x, words);
      const bool upper = lane & 1;
      const u32 other = shuffle_xor(upper ? words[0] : words[1], 1);
      if (slot >= 0) {
        *(words2*)(latent_pages + page + place * (RANK / 2) + lane * 8) =
            upper ? zipped(other, words[1]) : zipped(words[0], other);
        if (!upper) scale_pages[page + place * (RANK / GROUP) + lane / 2] = (u8)scale;
      }
    } else {
      u32 words[4];
      const u16 scale = plain_codes(x, words);
      if (slot >= 0) {
        *(words4*)(latent_pages + page + place * RANK + lane * HELD) = words4{words[0], words[1], words[2], words[3]};
        if (lane % GROUP_LANES == 0) ((u16*)(scale_pages + page))[place * (RANK / GROUP) + lane / GROUP_LANES] = scale;
      }
    }
  }
}
EXPORT(latent_prepare)
