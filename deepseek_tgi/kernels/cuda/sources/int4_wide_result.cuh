// What int4_wide.cu does with its sums: they meet in shared memory, take what is added, and are written in lines. Its
// macros and constants say how wide all that is.
#pragma once

// Sums of the tokens of round r, as the matrix instruction leaves them, into lines of rows of W from `row` on.
DEVICE void put_sums(const float (&sum)[TOKENS / 2], int r, float* lines, int row) {
  const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
  for (int i = 0; i < ROUND / 2; i++)
    lines[(i / 4 * 8 + t * 2 + i % 2) * LINE + row + g + i / 2 % 2 * 8] = sum[r * (ROUND / 2) + i];
}

// Where products go, and what is added to them.
struct Result {
  const float *bias, *residual;
  void* out;
  int rows, n;
  bool aligned;  // eight neighbours of `out` are written at once
  int member;

  // Eight rows of W from `row` on, neighbours in `out`, of one token; `from` holds them, where K is split in all blocks.
  DEVICE_IN_CLASS void write_eight(const words4* from, int token, int row) const {
    const int real = n - row;
    if (token >= rows || real <= 0) return;
    float v[8];
#pragma unroll
    for (int q = 0; q < CLUSTER; q++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const words4 part = SPLIT ? cluster_load(from + h, q * SHARERS + member) : from[h];
        const u32 four[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
        for (int j = 0; j < 4; j++) v[4 * h + j] = q ? v[4 * h + j] + bits_float(four[j]) : bits_float(four[j]);
      }
    const i64 to = (i64)token * n + row;
    if (bias)
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] += j < real ? bias[row + j] : 0.0f;
    if (residual && aligned) {
#pragma unroll
      for (int h = 0; h < 8; h += 4) {
        const words4 more = *(const words4*)(residual + to + h);
        v[h] += bits_float(more.x), v[h + 1] += bits_float(more.y), v[h + 2] += bits_float(more.z), v[h + 3] += bits_float(more.w);
      }
    } else if (residual) {
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] += j < real ? residual[to + j] : 0.0f;
    }
    if (OUT_BF16 && aligned) {
      *(words4*)((u16*)out + to) = {bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]), bf16_pair(v[4], v[5]), bf16_pair(v[6], v[7])};
    } else if (aligned) {
#pragma unroll
      for (int h = 0; h < 8; h += 4)
        *(words4*)((float*)out + to + h) = {float_bits(v[h]), float_bits(v[h + 1]), float_bits(v[h + 2]), float_bits(v[h + 3])};
    } else {
#pragma unroll
      for (int j = 0; j < 8; j++) {
        if (j < real && OUT_BF16) ((u16*)out)[to + j] = float_bf16(v[j]);
        if (j < real && !OUT_BF16) ((float*)out)[to + j] = v[j];
      }
    }
  }
  // A warpgroup's sums, whole.
  DEVICE_IN_CLASS void write(const float (&sum)[TOKENS / 2], float* lines, int group, int token0, int row0) const {
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int r = 0; r < TOKENS / ROUND; r++) {
      if (token0 + r * ROUND >= rows) break;
      warpgroup_sync(group);  // what was there before has been read
      put_sums(sum, r, lines, thread / 32 * TILE_ROWS);
      warpgroup_sync(group);
#pragma unroll
      for (int i = thread; i < ROUND * 8; i += 128)
        write_eight((const words4*)(lines + i / 8 * LINE + i % 8 * 8), token0 + r * ROUND + i / 8, row0 + i % 8 * 8);
    }
  }
};
