// The packed weight as a matrix [n, k], bfloat16 (rounded once) or float32 (the exact product of scale and integer).
// A warp writes EACH chunks of a tile, 16 rows of 64 columns. A lane writes 8 consecutive columns at a time, and
// neighbours in pairs fill whole sectors of 32 bytes: memory is not asked to complete halves.
// Macros: GROUP, SCALE_KIND, OUT_BF16, THREADS, EACH. K is the real width; chunks beyond it are not written.
#include "int4_weight.cuh"

// Columns of one step and row, in order: `word` holds those of lanes t = 0 .. 3.
DEVICE void write_eight(void* out, const u32 (&word)[4], int shift, u32 zero, float scale) {
  u32 two[4];
#pragma unroll
  for (int i = 0; i < 4; i++) two[i] = bf16_sub(widen(word[i] >> shift), zero);
  if (OUT_BF16) {
#pragma unroll
    for (int i = 0; i < 4; i++) two[i] = bf16_pair(bf16_low(two[i]) * scale, bf16_high(two[i]) * scale);
    *(words4*)out = {two[0], two[1], two[2], two[3]};
  } else {
#pragma unroll
    for (int i = 0; i < 4; i += 2)
      ((words4*)out)[i / 2] = {
          float_bits(bf16_low(two[i]) * scale), float_bits(bf16_high(two[i]) * scale),
          float_bits(bf16_low(two[i + 1]) * scale), float_bits(bf16_high(two[i + 1]) * scale)};
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    int4_dequantise(const u32* __restrict__ codes, const u8* __restrict__ metas, u8* __restrict__ out, int n, int k,
                    int chunks, int groups) {
  const int lane = lane_id(), g = lane / 4, t = lane % 4, tile = blockIdx.y;
  const int first = (blockIdx.x * (THREADS / 32) + threadIdx.x / 32) * EACH;
  const int within = t / 2 * 32 + t % 2 * 8;  // the lane's first column of a chunk; the other eight are 16 columns on
  words2 word[EACH][4];
  RowPair pair[EACH];
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int chunk = first + e < chunks ? first + e : chunks - 1;
    const u32* from = codes + ((i64)tile * chunks + chunk) * (CHUNK_BYTES / 4) + g * 16 + t / 2 * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) word[e][i] = *(const words2*)(from + i * 4);
    pair[e] = row_pair(metas + ((i64)tile * groups + (chunk * CHUNK + t / 2 * 32) / GROUP) * GROUP_BYTES, g);
  }
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int column = (first + e) * CHUNK + within;
    const u32 low[4] = {word[e][0].x, word[e][1].x, word[e][2].x, word[e][3].x};
    const u32 high[4] = {word[e][0].y, word[e][1].y, word[e][2].y, word[e][3].y};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const i64 row = (i64)tile * TILE_ROWS + g + half * 8;
      if (row >= n) continue;
      u8* to = out + (row * k + column) * (OUT_BF16 ? 2 : 4);
      const float scale = scale_of(pair[e].scale[half]);
      if (column < k) write_eight(to, low, t % 2 * 8 + half * 4, pair[e].zero[half], scale);
      if (column + 16 < k) write_eight(to + (OUT_BF16 ? 32 : 64), high, t % 2 * 8 + half * 4, pair[e].zero[half], scale);
    }
  }
}
EXPORT(int4_dequantise)
