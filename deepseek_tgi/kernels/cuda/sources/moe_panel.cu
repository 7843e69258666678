// Experts for many tokens (sm_90a): warpgroups multiply 64 rows of an expert's weight each, dequantised in their registers,
// by a panel of that expert's tokens in shared memory.
//
// Pairs are sorted by expert (moe_sort). A block has WARPGROUPS * 64 rows of a weight and one group of at most TOKENS
// pairs; the last group of an expert, which is shorter, has narrower instructions. Stages of 64 columns come by background
// copies, a token's row from wherever it lies. While one stage's products run, the next stage's codes become floats: the
// same floats however short the group, since who is in a token's group must not change the token's bits.
//
// Macros: those of experts.cuh, TOKENS (128), WARPGROUPS (even), STAGES (at least 3), BLOCKS (of a
// multiprocessor).
#include "experts.cuh"
#include "int4_fragments.cuh"
#include "warpgroup.cuh"

constexpr int THREADS = WARPGROUPS * 128, WARPS = WARPGROUPS * 4, BLOCK_ROWS = WARPGROUPS * 64, HALF = BLOCK_ROWS / 2;
constexpr int PANEL_BYTES = TOKENS * 128, WEIGHT_BYTES = WARPS * WARP_BYTES;
constexpr int LINE = BLOCK_ROWS + 4;  // floats between tokens where sums meet: no two lanes of a store share a bank

// A warp's tile of an expert's weight with CHUNKS chunks a tile.
struct Tile {
  const u8 *codes, *metas;  // of this lane
  DEVICE_IN_CLASS void point(const u8* all_codes, const u8* all_metas, i64 tile, int chunks) {
    codes = all_codes + tile * chunks * CHUNK_BYTES + lane_id() * 16;
    metas = all_metas + tile * chunks * (META_BYTES / STAGE_CHUNKS) + lane_id() * 16;
  }
};

// Sums of this warp's tile by `count` rows of K inputs, N at most, to shared memory: [row][LINE] floats, the warp's tile at
// column 16 * warp. `row(r)` is where row r begins.
template <int N, int K, int CHUNKS, class Row>
DEVICE void multiply(const Tile& tile, int count, Row row) {
  constexpr int PIECES = N * 8, COPIES = (PIECES + THREADS - 1) / THREADS;
  const int lane = lane_id(), warp = threadIdx.x / 32, line = threadIdx.x / 8, part = threadIdx.x % 8;
  u8* const xs = dynamic_shared();
  u8* const ws = xs + STAGES * PANEL_BYTES + warp * WARP_BYTES + lane * 16;
  const int x_at = line * 128 + (part ^ (line & 7)) * 16;
  const u16* from[COPIES];
#pragma unroll
  for (int i = 0; i < COPIES; i++) {
    const int r = line + i * (THREADS / 8);
    from[i] = r < count ? row(r) + part * 8 : nullptr;
  }
  auto fetch = [&](int slot, int chunk) {
    if (chunk < CHUNKS) {
      copy_async(ws + slot * WEIGHT_BYTES, tile.codes + (i64)chunk * CHUNK_BYTES);
      if (lane * 16 < CHUNK_GROUPS * GROUP_BYTES)
        copy_async(ws + slot * WEIGHT_BYTES + CHUNK_BYTES,
                   tile.metas + (GROUP < CHUNK ? chunk * CHUNK_GROUPS : chunk / (GROUP / CHUNK)) * GROUP_BYTES);
      const bool inside = chunk * CHUNK + part * 8 < K;
#pragma unroll
      for (int i = 0; i < COPIES; i++)
        if (PIECES % THREADS == 0 || threadIdx.x + i * THREADS < PIECES) {
          const bool real = from[i] && inside;
          copy_async(xs + slot * PANEL_BYTES + x_at + i * (THREADS * 16), real ? from[i] + chunk * CHUNK : (const u16*)tile.codes, real);
        }
    }
    copy_commit();
  };
  for (int i = 0; i < STAGES - 2; i++) fetch(i, i);
  float sum[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; i++) sum[i] = 0.0f;
  u32 a[2][4][4];
  int slot = 0, ahead = STAGES - 2;
  auto step = [&](int i, u32(&fragments)[4][4]) {
    copy_wait<STAGES - 3>();
    fence_for_matrices();
    block_sync();  // the stage is there for all; and all are done with the products before the last
    dequantise(fragments, ws + slot * WEIGHT_BYTES);
    fetch(ahead, i + STAGES - 2);
    warpgroup_fence();
#pragma unroll
    for (int s = 0; s < 4; s++) warpgroup_mma(sum, fragments[s], matrix_lines(xs + slot * PANEL_BYTES, s));
    warpgroup_commit();
    warpgroup_wait<1>();
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    ahead = ahead + 1 == STAGES ? 0 : ahead + 1;
  };
  // Pairs, for two sets of registers; a branch between products under way would make the compiler wait for each.
  if (CHUNKS % 2) {
    step(0, a[0]);
    warpgroup_wait<0>();
  }
  for (int i = CHUNKS % 2; i < CHUNKS; i += 2) {
    step(i, a[0]);
    step(i + 1, a[1]);
  }
  warpgroup_wait<0>();
  copy_wait<0>();
  block_sync();
  float* sums = (float*)dynamic_shared();
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < N / 2; i++)
    sums[(i / 4 * 8 + t * 2 + i % 2) * LINE + warp * TILE_ROWS + g + i / 2 % 2 * 8] = sum[i];
  block_sync();
}

template <int K, int CHUNKS, class Row>
DEVICE void multiply_group(const Tile& tile, int count, Row row) {
  if (count > 64) {
    multiply<128, K, CHUNKS>(tile, count, row);
  } else if (count > 32) {
    multiply<64, K, CHUNKS>(tile, count, row);
  } else {
    multiply<32, K, CHUNKS>(tile, count, row);
  }
}

// gated[i] = silu(gate) * up of the i-th sorted pair. Half of a block's warps have gate, the others up. Grid: (INNER /
// half a block's rows, groups).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    moe_gate_up_panel(const u16* __restrict__ x, const u8* __restrict__ codes, const u8* __restrict__ metas,
                      const int* __restrict__ order, const int* __restrict__ tiles, const int* __restrict__ total,
                      u16* __restrict__ gated) {
  wait_for_earlier();
  let_next_start();
  if (blockIdx.y >= *total) return;
  const int expert = tiles[3 * blockIdx.y], start = tiles[3 * blockIdx.y + 1], count = tiles[3 * blockIdx.y + 2];
  const int warp = threadIdx.x / 32, wanted = blockIdx.x * (WARPS / 2) + warp % (WARPS / 2);
  const int own = wanted < GATE_TILES ? wanted : GATE_TILES - 1;
  Tile tile;
  tile.point(codes, metas, (i64)expert * (2 * GATE_TILES) + warp / (WARPS / 2) * GATE_TILES + own, HIDDEN_STAGES * STAGE_CHUNKS);
  multiply_group<HIDDEN, HIDDEN_STAGES * STAGE_CHUNKS>(
      tile, count, [&](int r) { return x + (i64)(order[start + r] / SLOTS) * HIDDEN; });
  const float* sums = (const float*)dynamic_shared();
  for (int i = threadIdx.x; i < count * (HALF / 2); i += THREADS) {
    const int token = i / (HALF / 2), at = i % (HALF / 2) * 2, output = blockIdx.x * HALF + at;
    const float *gate = sums + token * LINE + at, *up = gate + HALF;
    if (output < INNER)
      *(u32*)(gated + (i64)(start + token) * INNER + output) = bf16_pair(silu(gate[0]) * up[0], silu(gate[1]) * up[1]);
  }
}
EXPORT(moe_gate_up_panel)

// products[pair] = down * gated. Grid: (HIDDEN / a block's rows, groups).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    moe_down_panel(const u16* __restrict__ gated, const u8* __restrict__ codes, const u8* __restrict__ metas,
                   const int* __restrict__ order, const int* __restrict__ tiles, const int* __restrict__ total,
                   float* __restrict__ products) {
  wait_for_earlier();
  let_next_start();
  if (blockIdx.y >= *total) return;
  const int expert = tiles[3 * blockIdx.y], start = tiles[3 * blockIdx.y + 1], count = tiles[3 * blockIdx.y + 2];
  const int wanted = blockIdx.x * WARPS + threadIdx.x / 32, own = wanted < DOWN_TILES ? wanted : DOWN_TILES - 1;
  Tile tile;
  tile.point(codes, metas, (i64)expert * DOWN_TILES + own, INNER_STAGES * STAGE_CHUNKS);
  multiply_group<INNER, INNER_STAGES * STAGE_CHUNKS>(tile, count, [&](int r) { return gated + (i64)(start + r) * INNER; });
  const float* sums = (const float*)dynamic_shared();
  for (int i = threadIdx.x; i < count * (BLOCK_ROWS / 4); i += THREADS) {
    const int token = i / (BLOCK_ROWS / 4), at = i % (BLOCK_ROWS / 4) * 4, output = blockIdx.x * BLOCK_ROWS + at;
    if (output < HIDDEN)  // a multiple of 4, as are the runs
      *(words4*)(products + (i64)order[start + token] * HIDDEN + output) = *(const words4*)(sums + token * LINE + at);
  }
}
EXPORT(moe_down_panel)
