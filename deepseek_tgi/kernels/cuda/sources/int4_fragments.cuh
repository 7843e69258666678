// A chunk of a packed INT4 weight in shared memory as operand A of bfloat16 matrix instructions.
#pragma once
#include "int4_scaled.cuh"

constexpr int CHUNK_GROUPS = GROUP < CHUNK ? CHUNK / GROUP : 1;
constexpr int WARP_BYTES = CHUNK_BYTES + CHUNK_GROUPS * GROUP_BYTES;  // a tile's chunk and its groups' words behind it

// The chunk's four fragments; `chunk` is this lane's place in it.
DEVICE void dequantise(u32 (&a)[4][4], const u8* chunk) {
  const int lane = lane_id(), g = lane / 4;
  const words4 q = *(const words4*)chunk;
  const u32 word[4] = {q.x, q.y, q.z, q.w};
  Factor f[2];
#pragma unroll
  for (int step = 0; step < 4; step++) {
    if (step * 16 % GROUP == 0) {
      const RowPair pair = row_pair(chunk - lane * 16 + CHUNK_BYTES + step * 16 / GROUP * GROUP_BYTES, g);
      f[0] = factor_of(pair, 0), f[1] = factor_of(pair, 1);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) a[step][j] = scaled(word[step] >> (4 * j), f[j % 2]);
  }
}
