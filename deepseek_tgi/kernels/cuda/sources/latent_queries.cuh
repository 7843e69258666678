// Queries of a decode step into latent space: for every head a product of the step's tokens by its weights, in bfloat16 with
// sums in float32. Weights are on their way before the tokens are there, and are read once for all of them. A token's bits
// depend on itself alone.
//
// Tokens are rows of operand A, 16 at a time. The order of what is summed over is one in which a lane reads 16 bytes of a
// row at once: with t = lane % 4, in columns 32 p .. 32 p + 31 it has elements 8t .. 8t + 7, of which step 2 p takes the
// first four and step 2 p + 1 the others, (0, 1) as columns 2t, 2t + 1 and (2, 3) as those eight on.
//
// Macros: NOPE, RANK.
#pragma once
#include "device.cuh"

constexpr int QUERY_THREADS = 128, COLUMNS = 64;

static_assert(NOPE % 32 == 0 && RANK % COLUMNS == 0, "the cut of a head");

// A lane's part of 32 columns of rows g and g + 8, as operand A of two steps.
struct Rows {
  words4 low, high;
  DEVICE_IN_CLASS void load(const u16* row, i64 stride, int left, int column) {
    const int g = lane_id() / 4, t = lane_id() % 4;
    low = g < left ? *(const words4*)(row + g * stride + column + 8 * t) : words4{0, 0, 0, 0};
    high = g + 8 < left ? *(const words4*)(row + (g + 8) * stride + column + 8 * t) : words4{0, 0, 0, 0};
  }
  DEVICE_IN_CLASS void step(int odd, u32 (&a)[4]) const {
    a[0] = odd ? low.z : low.x, a[2] = odd ? low.w : low.y;
    a[1] = odd ? high.z : high.x, a[3] = odd ? high.w : high.y;
  }
};

// out[h, b] = q[b, h] rows[h, :NOPE] for head blockIdx.y: 64 columns of it a block, 16 a warp.
DEVICE void make_queries(const u16* q, i64 q_head, i64 q_row, const u16* rows, i64 rows_head, u16* out, int tokens) {
  const int head = blockIdx.y, warp = threadIdx.x / 32, lane = lane_id(), column = blockIdx.x * COLUMNS;
  u8* const held = dynamic_shared();  // [NOPE] lines of 64 columns, their 16-byte parts in another order on every line
  auto turn = [](int n) { return (n & 1) | (n >> 3 & 3) << 1; };
  for (int i = threadIdx.x; i < NOPE * 8; i += QUERY_THREADS)
    copy_async(held + i / 8 * 128 + (i % 8 ^ turn(i / 8)) * 16, rows + head * rows_head + (i64)(i / 8) * RANK + column + i % 8 * 8);
  copy_commit();
  wait_for_earlier();
  let_next_start();
#pragma unroll 1
  for (int first = 0; first < tokens; first += 16) {
    Rows given[NOPE / 32];
#pragma unroll
    for (int p = 0; p < NOPE / 32; p++)
      given[p].load(q + head * q_head + first * q_row, q_row, tokens - first, 32 * p);
    copy_wait<0>();
    block_sync();
    float sums[2][4] = {};
#pragma unroll
    for (int s = 0; s < NOPE / 16; s++) {
      u32 a[4], b[4];
      given[s / 2].step(s % 2, a);
      // Tiles: columns 0-7 of the warp's with the step's elements 0-7, with 8-15; columns 8-15 likewise.
      const int j = lane % 8, n = 32 * (s / 2) + 8 * (j / 2) + 4 * (s % 2) + j % 2 + lane / 8 % 2 * 2;
      load_tiles_turned(b, held + n * 128 + ((2 * warp + lane / 16) ^ turn(n)) * 16);
      const u32 first_pair[2] = {b[0], b[1]}, second_pair[2] = {b[2], b[3]};
      mma_bf16(sums[0], a, first_pair);
      mma_bf16(sums[1], a, second_pair);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int token = first + lane / 4 + 8 * half;
      if (token >= tokens) continue;
      u16* const to = out + ((i64)head * tokens + token) * RANK + column + 16 * warp + lane % 4 * 2;
      *(u32*)to = bf16_pair(sums[0][2 * half], sums[0][2 * half + 1]);
      *(u32*)(to + 8) = bf16_pair(sums[1][2 * half], sums[1][2 * half + 1]);
    }
  }
}
