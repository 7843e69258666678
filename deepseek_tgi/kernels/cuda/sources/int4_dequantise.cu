// The packed weight as a matrix [n, k], bfloat16 (rounded once) or float32 (the exact product of scale and integer).
// A warp writes a tile's chunk, 16 rows of 64 columns; a lane 16 consecutive columns of rows g and g + 8.
// Macros: GROUP, SCALE_KIND, OUT_BF16, THREADS. K is the real width; chunks beyond it are not written.
#include "int4_weight.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    int4_dequantise(const u32* __restrict__ codes, const u8* __restrict__ metas, void* __restrict__ out, int n, int k,
                    int chunks, int groups) {
  const int lane = lane_id(), g = lane / 4, t = lane % 4;
  const int chunk = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, tile = blockIdx.y;
  const int column = chunk * CHUNK + t * 16;
  if (column >= k) return;
  const u32* words = codes + ((i64)tile * chunks + chunk) * (CHUNK_BYTES / 4) + g * 16 + t;
  const RowPair pair = row_pair(metas + ((i64)tile * groups + column / GROUP) * GROUP_BYTES, g);
  u32 word[4];
#pragma unroll
  for (int i = 0; i < 4; i++) word[i] = words[i * 4];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const i64 row = (i64)tile * TILE_ROWS + g + half * 8;
    if (row >= n) continue;
    const float scale = scale_of(pair.scale[half]), zero = bf16_high(pair.zero[half]);
    float value[16];
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int far = 0; far < 2; far++) {
        const u32 two = widen(word[i] >> (8 * far + 4 * half));
        value[8 * far + 2 * i] = (bf16_low(two) - zero) * scale;
        value[8 * far + 2 * i + 1] = (bf16_high(two) - zero) * scale;
      }
#pragma unroll
    for (int i = 0; i < 16; i += 8) {
      if (OUT_BF16) {
        *(words4*)((u16*)out + row * k + column + i) = {
            bf16_pair(value[i], value[i + 1]), bf16_pair(value[i + 2], value[i + 3]), bf16_pair(value[i + 4], value[i + 5]),
            bf16_pair(value[i + 6], value[i + 7])};
      } else {
        for (int j = i; j < i + 8; j++) ((float*)out)[row * k + column + j] = value[j];
      }
    }
  }
}
EXPORT(int4_dequantise)
