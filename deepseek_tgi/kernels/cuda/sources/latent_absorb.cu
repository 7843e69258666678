// Queries of few tokens into latent space: out[h, b] = q[b, h] rows[h, :NOPE], in bfloat16, sums in float32.
// A block makes 64 columns of a head: each of its warps multiplies every fourth row, two columns a lane. The weights are
// under way before the queries are there.
#include "device.cuh"

constexpr int COLUMNS = 64, WARPS = 4, OWN_ROWS = NOPE / WARPS;

static_assert(NOPE % WARPS == 0 && RANK % COLUMNS == 0, "the kernel's cut");

extern "C" __global__ void __launch_bounds__(128)
    latent_absorb(const u16* q, i64 q_head, i64 q_row, const u16* __restrict__ rows, i64 rows_head,
                  u16* __restrict__ out) {
  __shared__ float queries[BATCH][NOPE], sums[WARPS][BATCH][COLUMNS];
  const int column = blockIdx.x * COLUMNS, head = blockIdx.y, warp = threadIdx.x / 32, lane = lane_id();
  u32 weights[OWN_ROWS];
#pragma unroll
  for (int i = 0; i < OWN_ROWS; i++)
    weights[i] = *(const u32*)(rows + head * rows_head + (i64)(warp + WARPS * i) * RANK + column + 2 * lane);
  wait_for_earlier();
  let_next_start();
  for (int at = threadIdx.x; at < BATCH * NOPE; at += 128)
    queries[at / NOPE][at % NOPE] = bf16_float(q[head * q_head + at / NOPE * q_row + at % NOPE]);
  block_sync();
#pragma unroll
  for (int b = 0; b < BATCH; b++) {
    float low = 0.0f, high = 0.0f;
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++) {
      const float x = queries[b][warp + WARPS * i];
      low += x * bf16_low(weights[i]);
      high += x * bf16_high(weights[i]);
    }
    sums[warp][b][2 * lane] = low;
    sums[warp][b][2 * lane + 1] = high;
  }
  block_sync();
  for (int at = threadIdx.x; at < BATCH * COLUMNS; at += 128) {
    const int b = at / COLUMNS, i = at % COLUMNS;
    const float sum = (sums[0][b][i] + sums[1][b][i]) + (sums[2][b][i] + sums[3][b][i]);
    out[((i64)head * BATCH + b) * RANK + column + i] = float_bf16(sum);
  }
}
EXPORT(latent_absorb)
