// A tile of sixteen output features of an INT4 weight times a few rows, on the tensor cores: the weight is the operand
// that lives in registers, so what a warp reads of it is read once and in order.
//
// Layout of a packed weight (see kernels/moe/cuda.py, which writes it): for every tile of 16 outputs and chunk of 64
// inputs, 32 lanes of 16 bytes. Word s of lane 4g + t holds inputs 16s + 4t .. 4t+3 of rows g and g+8: from the lowest
// nibble up, row g input 0, row g+8 input 0, row g input 2, row g+8 input 2, then the same of inputs 1 and 3 in the upper
// half. A nibble in the lowest bits of a bfloat16 128 is 128 + code, exactly; the zero point, kept as 128 + zero, goes
// off exactly as well, and the scale comes once a group on the float32 sums.
#pragma once
#include "device.cuh"

constexpr int TILE = 16, CHUNK = 64;
constexpr int CHUNKS_IN_UNIT = GROUP > CHUNK ? GROUP / CHUNK : 1;  // what is loaded together: one group, or a chunk
constexpr int GROUPS_IN_UNIT = GROUP > CHUNK ? 1 : CHUNK / GROUP;
constexpr int STEPS_IN_GROUP = (GROUP < CHUNK ? GROUP : CHUNK) / 16;

// One lane's part of a unit. `scales` holds for rows g and g+8 a scale of 16 bits (low) and a bfloat16 128 + zero (high).
struct Unit {
  words4 codes[CHUNKS_IN_UNIT];
  u32 scales[GROUPS_IN_UNIT][2];
};

// `codes` starts at the tile's first chunk (this lane's place in it), `scales` at the tile's first group.
DEVICE void load_unit(Unit& unit, const words4* codes, const u32* scales, int index) {
#pragma unroll
  for (int i = 0; i < CHUNKS_IN_UNIT; i++) unit.codes[i] = load_once(codes + (i64)(index * CHUNKS_IN_UNIT + i) * 32);
  int row = lane_id() >> 2;
#pragma unroll
  for (int i = 0; i < GROUPS_IN_UNIT; i++) {
    const u32* at = scales + (index * GROUPS_IN_UNIT + i) * TILE + row;
    unit.scales[i][0] = at[0];
    unit.scales[i][1] = at[8];
  }
}

// GROUP_SCALES: 1 for float16, 2 for bfloat16.
DEVICE float scale_of(u32 pair) { return GROUP_SCALES == 2 ? bf16_low(pair) : half_low(pair); }

DEVICE u32 widened(u32 codes, u32 zero) { return bf16_sub(lop3<0xEA>(codes, 0x000F000Fu, 0x43004300u), zero); }

// sums[m][n] += units[m] * rows for MATRICES tiles that share their inputs: `rows` is this lane's place in shared memory
// (row g of the first eight, input 4t of the unit), a row being `stride` 16-bit elements; each further n is eight rows on.
template <int MATRICES, int N>
DEVICE void multiply_units(float (&sums)[MATRICES][N][4], const Unit (&units)[MATRICES], const u16* rows, int stride,
                           int count) {
#pragma unroll
  for (int group = 0; group < GROUPS_IN_UNIT; group++) {
    float partial[MATRICES][N][4] = {};
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS_IN_UNIT; chunk++) {
#pragma unroll
      for (int step = 0; step < STEPS_IN_GROUP; step++) {
        const int s = group * STEPS_IN_GROUP + step;
        u32 a[MATRICES][4];
#pragma unroll
        for (int m = 0; m < MATRICES; m++) {
          const words4& codes = units[m].codes[chunk];
          const u32 word = s == 0 ? codes.x : s == 1 ? codes.y : s == 2 ? codes.z : codes.w;
          const u32 zero_low = permute_bytes(units[m].scales[group][0], 0, 0x3232);
          const u32 zero_high = permute_bytes(units[m].scales[group][1], 0, 0x3232);
          a[m][0] = widened(word, zero_low);
          a[m][1] = widened(word >> 4, zero_high);
          a[m][2] = widened(word >> 8, zero_low);
          a[m][3] = widened(word >> 12, zero_high);
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
          if (n * 8 >= count) break;
          words2 pair = *(const words2*)(rows + n * 8 * stride + chunk * CHUNK + s * 16);
          const u32 b[2] = {pair.x, pair.y};
#pragma unroll
          for (int m = 0; m < MATRICES; m++) mma_bf16(partial[m][n], a[m], b);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < MATRICES; m++) {
      const float scale[2] = {scale_of(units[m].scales[group][0]), scale_of(units[m].scales[group][1])};
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[m][n][i] += scale[i / 2] * partial[m][n][i];
    }
  }
}
