// A request's context out of its pages in bfloat16, for attention over expanded keys. MODE numbers formats as
// latent_decode.cu does; INT4 stays in the rotated space of its groups. A warp has a position, 16 elements of its latent
// a lane.
#include "device.cuh"

constexpr int HELD = 16, WARPS = 4;

static_assert(RANK == 32 * HELD && ROPE == 64, "a warp holds a latent and a rotary key");
static_assert(MODE != 4 || GROUP == 2 * HELD, "two lanes share a group of INT4");

DEVICE float int4_value(u32 code) {
  const float levels[8] = {6, 18, 31, 45, 60, 77, 98, 127};
  float level = levels[0];
  const u32 index = code & 8 ? code & 7 : 7 - code;
#pragma unroll
  for (u32 k = 1; k < 8; k++)
    if (index == k) level = levels[k];
  return code & 8 ? level : -level;
}

// The lane's elements; `row` is the position's latent, `scales` its scales.
DEVICE void read_latent(const u8* row, const u8* scales, float (&x)[HELD]) {
  const int lane = lane_id();
  if (MODE < 2) {
    const words4 parts[2] = {load_once(row + 32 * lane), load_once(row + 32 * lane + 16)};
#pragma unroll
    for (int w = 0; w < HELD / 2; w++) {
      const words4 part = parts[w / 4];
      const u32 pair = w % 4 == 0 ? part.x : w % 4 == 1 ? part.y : w % 4 == 2 ? part.z : part.w;
      x[2 * w] = MODE ? half_low(pair) : bf16_low(pair);
      x[2 * w + 1] = MODE ? half_high(pair) : bf16_high(pair);
    }
    return;
  }
  const words4 codes = load_once(row + (MODE == 4 ? lane / 2 * HELD : lane * HELD));
  const float scale = MODE == 4 ? half_float((u16)(scales[lane / 2] << 7)) / 64.0f
                                : half_float(((const u16*)scales)[lane * HELD / GROUP]);
#pragma unroll
  for (int w = 0; w < 4; w++) {
    const u32 word = w == 0 ? codes.x : w == 1 ? codes.y : w == 2 ? codes.z : codes.w;
    if (MODE == 3) {
      const u32 low = fp8_halves((u16)word), high = fp8_halves((u16)(word >> 16));
      x[4 * w] = times(half_low(low), scale);
      x[4 * w + 1] = times(half_high(low), scale);
      x[4 * w + 2] = times(half_low(high), scale);
      x[4 * w + 3] = times(half_high(high), scale);
      continue;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 byte = word >> 8 * i & 0xFF;
      const float value = MODE == 4 ? int4_value(byte >> 4 * (lane & 1) & 15) : (float)(i8)byte;
      x[4 * w + i] = times(value, scale);
    }
  }
}

// `latent [length, RANK]` and `rope [length, ROPE]` of the request with the block table `table`.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    latent_unpack(const u8* latents, const u8* ropes, const u8* scales, i64 page_bytes, const int* table, int length,
                  u16* latent, u16* rope) {
  const int lane = lane_id(), position = blockIdx.x * WARPS + threadIdx.x / 32;
  wait_for_earlier();
  if (position >= length) return;
  const int place = position % BLOCK;
  const i64 page = table[position / BLOCK] * page_bytes;
  constexpr int ROW = MODE < 2 ? 2 * RANK : MODE == 4 ? RANK / 2 : RANK, SCALES = RANK / GROUP * (MODE == 4 ? 1 : 2);
  float x[HELD];
  read_latent(latents + page + place * ROW, scales + page + place * SCALES, x);
  u32 made[HELD / 2];
#pragma unroll
  for (int i = 0; i < HELD / 2; i++) made[i] = bf16_pair(x[2 * i], x[2 * i + 1]);
  words4* const to = (words4*)(latent + (i64)position * RANK + lane * HELD);
  to[0] = words4{made[0], made[1], made[2], made[3]};
  to[1] = words4{made[4], made[5], made[6], made[7]};
  u32 pair = load_once4(ropes + page + place * ROPE * 2 + 4 * lane);
  if (MODE == 1) pair = bf16_pair(half_low(pair), half_high(pair));
  *(u32*)(rope + (i64)position * ROPE + 2 * lane) = pair;
}
EXPORT(latent_unpack)
