// out = x W^T (+ bias) (+ residual) for many rows of x (sm_90a): warpgroups multiply 64 rows of W, dequantised in their
// registers, by a panel of TOKENS rows of x in shared memory.
//
// A block owns WARPGROUPS * 64 rows of W and one panel; a cluster of CLUSTER blocks splits K. Stages of 64 columns come by
// background copies. While one stage's products run, the next stage's codes become floats: `code - zero` exactly, times
// the scale in two parts, so that a weight is rounded to bfloat16 once. Sums meet in shared memory, in a fixed order.
//
// Macros: TOKENS (16, 32, 64, 128, 256), WARPGROUPS, STAGES (at least 3), GROUP, SCALE_KIND, CLUSTER, OUT_BF16.
#include "int4_fragments.cuh"
#include "warpgroup.cuh"

#if CLUSTER > 1
#define SHAPE __cluster_dims__(1, CLUSTER, 1)
#else
#define SHAPE
#endif

constexpr int THREADS = WARPGROUPS * 128, BLOCK_ROWS = WARPGROUPS * 64;
constexpr int PANEL_BYTES = TOKENS * 128;
constexpr int COPIES = (TOKENS * 8 + THREADS - 1) / THREADS;
constexpr int LINE = BLOCK_ROWS + 4;  // floats between tokens where sums meet: no two lanes of a store share a bank

struct Panel {
  u8 *xs, *ws;
  const u8 *codes, *metas;  // of this lane in the warp's tile
  const u16* x;             // of this thread's first copy
  i64 copy_step;            // elements between its copies
  int groups, x_at, wanted, columns;

  DEVICE_IN_CLASS void fetch_weight(int slot, int chunk) {
    u8* to = ws + slot * (WARPGROUPS * 4 * WARP_BYTES);
    copy_async(to, codes + (i64)chunk * CHUNK_BYTES);
    if (lane_id() * 16 < CHUNK_GROUPS * GROUP_BYTES)
      copy_async(to + CHUNK_BYTES, metas + (i64)(GROUP < CHUNK ? chunk * CHUNK_GROUPS : chunk / (GROUP / CHUNK)) * GROUP_BYTES);
  }
  DEVICE_IN_CLASS void fetch_x(int slot, int chunk) {
    const bool inside = chunk * CHUNK < columns;
#pragma unroll
    for (int i = 0; i < COPIES; i++)
      if (TOKENS * 8 % THREADS == 0 || threadIdx.x + i * THREADS < TOKENS * 8) {
        const bool real = inside && (wanted >> i & 1);
        copy_async(xs + slot * PANEL_BYTES + x_at + i * (THREADS * 16), x + (real ? i * copy_step + chunk * CHUNK : 0), real);
      }
  }
};

extern "C" __global__ void SHAPE __launch_bounds__(THREADS)
    int4_panel(const u8* __restrict__ codes, const u8* __restrict__ metas, const u16* __restrict__ x, i64 x_stride,
               const float* __restrict__ bias, const float* residual, void* out, int rows, int n, int k, int tiles,
               int chunks, int groups) {
  const int lane = lane_id(), warp = threadIdx.x / 32, rank = blockIdx.y;
  const int wanted_tile = blockIdx.z * (BLOCK_ROWS / TILE_ROWS) + warp;
  const int tile = wanted_tile < tiles ? wanted_tile : tiles - 1;
  const int first = chunks * rank / CLUSTER, last = chunks * (rank + 1) / CLUSTER, count = last - first;
  const int row0 = blockIdx.x * TOKENS, line = threadIdx.x / 8, part = threadIdx.x % 8;

  Panel p;
  p.xs = dynamic_shared();
  p.ws = p.xs + STAGES * PANEL_BYTES + warp * WARP_BYTES + lane * 16;
  p.codes = codes + (i64)tile * chunks * CHUNK_BYTES + lane * 16;
  p.metas = metas + (i64)tile * groups * GROUP_BYTES + lane * 16;
  p.x = x + (i64)(row0 + line < rows ? row0 + line : 0) * x_stride + part * 8;
  p.copy_step = (i64)(THREADS / 8) * x_stride;
  p.x_at = line * 128 + (part ^ (line & 7)) * 16;
  p.columns = k - part * 8;
  p.wanted = 0;
#pragma unroll
  for (int i = 0; i < COPIES; i++) p.wanted |= (row0 + line + i * (THREADS / 8) < rows) << i;

  let_next_start();
  for (int i = 0; i < STAGES - 2; i++)
    if (i < count) p.fetch_weight(i, first + i);
  wait_for_earlier();
  for (int i = 0; i < STAGES - 2; i++) {
    if (i < count) p.fetch_x(i, first + i);
    copy_commit();
  }

  float sum[TOKENS / 2];
#pragma unroll
  for (int i = 0; i < TOKENS / 2; i++) sum[i] = 0.0f;
  u32 a[2][4][4];
  int slot = 0, ahead = STAGES - 2;
  auto step = [&](int i, u32(&fragments)[4][4]) {
    copy_wait<STAGES - 3>();
    fence_for_matrices();
    block_sync();  // the stage is there for all; and all are done with the products before the last
    dequantise(fragments, p.ws + slot * (WARPGROUPS * 4 * WARP_BYTES));
    if (i + STAGES - 2 < count) {
      p.fetch_weight(ahead, first + i + STAGES - 2);
      p.fetch_x(ahead, first + i + STAGES - 2);
    }
    copy_commit();
    warpgroup_fence();
#pragma unroll
    for (int s = 0; s < 4; s++) warpgroup_mma(sum, fragments[s], matrix_lines(p.xs + slot * PANEL_BYTES, s));
    warpgroup_commit();
    warpgroup_wait<1>();
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    ahead = ahead + 1 == STAGES ? 0 : ahead + 1;
  };
  // Pairs, for two sets of registers; a branch between products under way would make the compiler wait for each.
  if (count % 2) {
    step(0, a[0]);
    warpgroup_wait<0>();
  }
  for (int i = count % 2; i < count; i += 2) {
    step(i, a[0]);
    step(i + 1, a[1]);
  }
  warpgroup_wait<0>();
  copy_wait<0>();
  block_sync();

  float* sums = (float*)dynamic_shared();
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < TOKENS / 2; i++)
    sums[(i / 4 * 8 + t * 2 + i % 2) * LINE + warp * TILE_ROWS + g + i / 2 % 2 * 8] = sum[i];
  if (CLUSTER > 1) {
    cluster_sync();
  } else {
    block_sync();
  }
  const int base = blockIdx.z * BLOCK_ROWS;
  for (int i = threadIdx.x + THREADS * rank; i < TOKENS * (BLOCK_ROWS / 2); i += THREADS * CLUSTER) {
    const int token = i / (BLOCK_ROWS / 2), at = i % (BLOCK_ROWS / 2) * 2;
    if (row0 + token >= rows || base + at >= n) continue;
    const float* from = sums + token * LINE + at;
    float low = 0.0f, high = 0.0f;
#pragma unroll
    for (int q = 0; q < CLUSTER; q++) {
      low += CLUSTER > 1 ? cluster_load(from, q) : from[0];
      high += CLUSTER > 1 ? cluster_load(from + 1, q) : from[1];
    }
    const bool pair = base + at + 1 < n;
    const i64 to = (i64)(row0 + token) * n + base + at;
    if (bias) low += bias[base + at], high += pair ? bias[base + at + 1] : 0.0f;
    if (residual) low += residual[to], high += pair ? residual[to + 1] : 0.0f;
    if (OUT_BF16) {
      if (n % 2 == 0) {
        *(u32*)((u16*)out + to) = bf16_pair(low, high);
      } else {
        ((u16*)out)[to] = float_bf16(low);
        if (pair) ((u16*)out)[to + 1] = float_bf16(high);
      }
    } else {
      ((float*)out)[to] = low;
      if (pair) ((float*)out)[to + 1] = high;
    }
  }
  if (CLUSTER > 1) cluster_sync();
}
EXPORT_CLUSTER(int4_panel, CLUSTER)
