// out = x W^T (+ bias) (+ residual) for few rows of x: the weight streams by once, at the speed of memory.
//
// A block owns a range of units (ROW_TILES tiles of 16 rows of W each) and, in a cluster of CLUSTER blocks, a slice of K.
// x's slice lies in shared memory, rounded to bfloat16. Its warps split the units, and each unit's K again SPLIT ways.
// Every lane has a queue of DEPTH stages in shared memory that its own background copies fill, so that no barrier stands
// in the loop; the queue is filled before the kernel ahead has ended, since weights do not depend on it.
// Products are of exact integers with x; a group's sum is scaled in float32. Partial sums of warps and blocks are added
// in a fixed order: a run's bits do not depend on timing.
//
// Macros: TOKENS (rows of x, in eights), ROW_TILES, SPLIT, DEPTH, GROUP (32, 64, 128), CLUSTER, SCALE_KIND, X_BF16,
// OUT_BF16, SILU (x is [M, 2K], gate and up; silu(gate) * up is multiplied).
#include "int4_weight.cuh"

constexpr int STAGE_K = GROUP > CHUNK ? GROUP : CHUNK;
constexpr int STAGE_CHUNKS = STAGE_K / CHUNK, STAGE_GROUPS = STAGE_K / GROUP;
constexpr int META_AT = STAGE_CHUNKS * CHUNK_BYTES;
constexpr int TILE_BYTES = META_AT + STAGE_GROUPS * GROUP_BYTES;
constexpr int STAGE_BYTES = ROW_TILES * TILE_BYTES;
constexpr int UNIT_FLOATS = ROW_TILES * TOKENS * 128;

#if CLUSTER > 1
#define SHAPE __cluster_dims__(1, CLUSTER, 1)
#else
#define SHAPE
#endif

struct Weight {
  const u8* codes;
  const u8* meta;
  int stages;  // of the whole K
};

DEVICE void fetch(u8* slot, const Weight& w, int unit, int stage) {
  const int lane = lane_id();
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++) {
    const i64 at = ((i64)unit * ROW_TILES + r) * w.stages + stage;
    u8* to = slot + r * TILE_BYTES;
#pragma unroll
    for (int c = 0; c < STAGE_CHUNKS; c++)
      copy_async(to + c * CHUNK_BYTES + lane * 16, w.codes + at * META_AT + c * CHUNK_BYTES + lane * 16);
    if (lane * 16 < STAGE_GROUPS * GROUP_BYTES)
      copy_async(to + META_AT + lane * 16, w.meta + at * (STAGE_GROUPS * GROUP_BYTES) + lane * 16);
  }
}

DEVICE float silu(float x) { return x / (1.0f + exp_near(-x)); }

// Eight neighbours of a row as pairs of bfloat16.
DEVICE words4 eight(const void* x, i64 at) {
  if (X_BF16) return *(const words4*)((const u16*)x + at);
  const words4 low = *(const words4*)((const float*)x + at), high = *(const words4*)((const float*)x + at + 4);
  return {bf16_pair(bits_float(low.x), bits_float(low.y)), bf16_pair(bits_float(low.z), bits_float(low.w)),
          bf16_pair(bits_float(high.x), bits_float(high.y)), bf16_pair(bits_float(high.z), bits_float(high.w))};
}
DEVICE u32 gated(u32 gate, u32 up) {
  return bf16_pair(silu(bf16_low(gate)) * bf16_low(up), silu(bf16_high(gate)) * bf16_high(up));
}
DEVICE words4 gated_eight(const void* x, i64 at, int k) {
  if (X_BF16) {
    const words4 a = eight(x, at), b = eight(x, at + k);
    return {gated(a.x, b.x), gated(a.y, b.y), gated(a.z, b.z), gated(a.w, b.w)};
  }
  const float *gate = (const float*)x + at, *up = gate + k;
  u32 r[4];
#pragma unroll
  for (int i = 0; i < 4; i++) r[i] = bf16_pair(silu(gate[2 * i]) * up[2 * i], silu(gate[2 * i + 1]) * up[2 * i + 1]);
  return {r[0], r[1], r[2], r[3]};
}

// Columns [k0, k1) of x to shared memory: chunks of 64 columns, in each `rows` rows of 128 bytes whose 16-byte parts are
// permuted by the row, so that the eight rows a matrix load takes lie in different banks. Beyond K lie zeros.
DEVICE void stage_rows(u8* shared, const void* x, i64 stride, int rows, int k0, int k1, int k) {
  for (int row = 0; row < rows; row++)
    for (int at = k0 + (int)threadIdx.x * 8; at < k1; at += blockDim.x * 8) {
      words4 v = {0, 0, 0, 0};
      if (at < k) v = SILU ? gated_eight(x, row * stride + at, k) : eight(x, row * stride + at);
      const int part = (at - k0) / 8;
      *(words4*)(shared + ((part / 8) * rows + row) * 128 + ((part % 8) ^ (row & 7)) * 16) = v;
    }
}

DEVICE void multiply(float (&sum)[ROW_TILES][TOKENS][4], const u8* slot, const u8* xs, const int (&row_at)[TOKENS],
                     int chunk_bytes) {
  const int lane = lane_id(), g = lane / 4;
  float part[ROW_TILES][TOKENS][4];
  words4 word[ROW_TILES];
  RowPair rows[ROW_TILES];
#pragma unroll
  for (int step = 0; step < STAGE_K / 16; step++) {
    if (step * 16 % GROUP == 0) {
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++) {
        rows[r] = row_pair(slot + r * TILE_BYTES + META_AT + step * 16 / GROUP * GROUP_BYTES, g);
#pragma unroll
        for (int m = 0; m < TOKENS; m++)
#pragma unroll
          for (int j = 0; j < 4; j++) part[r][m][j] = 0.0f;
      }
    }
    if (step % 2) continue;
    const int chunk = step / 4;
    if (step % 4 == 0) {
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++)
        word[r] = *(const words4*)(slot + r * TILE_BYTES + chunk * CHUNK_BYTES + lane * 16);
    }
    u32 b[TOKENS][4];
#pragma unroll
    for (int m = 0; m < TOKENS; m++) load_tiles(b[m], xs + chunk * chunk_bytes + (row_at[m] ^ (step % 4 / 2 * 64)));
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
      const words2 q = step % 4 ? words2{word[r].z, word[r].w} : words2{word[r].x, word[r].y};
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 a[4];
        weight_fragment(a, half ? q.y : q.x, rows[r].zero[0], rows[r].zero[1]);
#pragma unroll
        for (int m = 0; m < TOKENS; m++) {
          const u32 pair[2] = {b[m][2 * half], b[m][2 * half + 1]};
          mma_bf16(part[r][m], a, pair);
        }
      }
    }
    if ((step + 2) * 16 % GROUP == 0) {
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++) {
        const float s0 = scale_of(rows[r].scale[0]), s1 = scale_of(rows[r].scale[1]);
#pragma unroll
        for (int m = 0; m < TOKENS; m++)
#pragma unroll
          for (int j = 0; j < 4; j++) sum[r][m][j] += (j < 2 ? s0 : s1) * part[r][m][j];
      }
    }
  }
}

extern "C" __global__ void SHAPE __launch_bounds__(THREADS)
    int4_stream(const u8* __restrict__ codes, const u8* __restrict__ metas, const void* __restrict__ x, i64 x_stride,
                const float* __restrict__ bias, const float* residual, void* out, int rows, int n, int k, int units,
                int stages) {
  const int lane = lane_id(), warp = threadIdx.x / 32;
  const int part = warp % SPLIT, column = warp / SPLIT, columns = THREADS / 32 / SPLIT;
  const int rank = blockIdx.y;
  const int first = (i64)units * blockIdx.x / gridDim.x, last = (i64)units * (blockIdx.x + 1) / gridDim.x;
  const int rounds = (last - first + columns - 1) / columns;
  const int block0 = stages * rank / CLUSTER, block1 = stages * (rank + 1) / CLUSTER;
  const int stage0 = block0 + (block1 - block0) * part / SPLIT, stage1 = block0 + (block1 - block0) * (part + 1) / SPLIT;
  const Weight w = {codes, metas, stages};

  u8* const queue = dynamic_shared() + warp * (DEPTH * STAGE_BYTES);
  float* const sums = (float*)(dynamic_shared() + THREADS / 32 * DEPTH * STAGE_BYTES);
  u8* const xs = (u8*)(sums + THREADS / 32 * UNIT_FLOATS);

  int ahead_unit = first + column, ahead_stage = stage0, ahead_slot = 0, slot = 0;
  auto fetch_next = [&] {
    if (ahead_unit < last && ahead_stage < stage1) fetch(queue + ahead_slot * STAGE_BYTES, w, ahead_unit, ahead_stage);
    copy_commit();
    ahead_slot = ahead_slot + 1 == DEPTH ? 0 : ahead_slot + 1;
    if (++ahead_stage >= stage1) ahead_stage = stage0, ahead_unit += columns;
  };
  let_next_start();
  for (int i = 0; i < DEPTH - 1; i++) fetch_next();
  wait_for_earlier();
  stage_rows(xs, x, x_stride, rows, block0 * STAGE_K, block1 * STAGE_K, k);
  block_sync();

  int row_at[TOKENS];  // of the part of x that this lane addresses for matrix loads; missing rows repeat the last
#pragma unroll
  for (int m = 0; m < TOKENS; m++) {
    const int wanted = m * 8 + lane % 8, row = wanted < rows ? wanted : rows - 1;
    row_at[m] = row * 128 + ((lane / 8) ^ (row & 7)) * 16;
  }
  const int chunk_bytes = rows * 128;

  for (int round = 0; round < rounds; round++) {
    const int unit = first + round * columns + column;
    float sum[ROW_TILES][TOKENS][4] = {};
    if (unit < last)
      for (int stage = stage0; stage < stage1; stage++) {
        copy_wait<DEPTH - 2>();
        warp_sync();  // the groups' words were copied by a few lanes; and the slot filled next has been read by all
        multiply(sum, queue + slot * STAGE_BYTES, xs + (stage - block0) * STAGE_CHUNKS * chunk_bytes, row_at, chunk_bytes);
        fetch_next();
        slot = slot + 1 == DEPTH ? 0 : slot + 1;
      }
    float* mine = sums + warp * UNIT_FLOATS;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
      for (int m = 0; m < TOKENS; m++)
        *(words4*)(mine + (r * TOKENS + m) * 128 + lane * 4) = {float_bits(sum[r][m][0]), float_bits(sum[r][m][1]),
                                                                 float_bits(sum[r][m][2]), float_bits(sum[r][m][3])};
    if (CLUSTER > 1) {
      cluster_sync();
    } else {
      block_sync();
    }
    // Element e of a unit: row e % 16 of tile r, token 8 m + e / 16 % 8, so that neighbours store to neighbours.
    for (int i = threadIdx.x + THREADS * rank; i < columns * UNIT_FLOATS; i += THREADS * CLUSTER) {
      const int c = i / UNIT_FLOATS, e = i % UNIT_FLOATS, row = e % 16, token = e / 16 % 8, tile = e / 128;
      const int from = tile * 128 + ((row % 8) * 4 + token / 2) * 4 + row / 8 * 2 + token % 2;
      const int unit_of = first + round * columns + c, m = tile % TOKENS * 8 + token;
      const i64 line = ((i64)unit_of * ROW_TILES + tile / TOKENS) * TILE_ROWS + row;
      if (unit_of >= last || m >= rows || line >= n) continue;
      float total = 0.0f;
#pragma unroll
      for (int q = 0; q < CLUSTER; q++)
#pragma unroll
        for (int p = 0; p < SPLIT; p++) {
          const float* at = sums + (c * SPLIT + p) * UNIT_FLOATS + from;
          total += CLUSTER > 1 ? cluster_load(at, q) : *at;
        }
      if (bias) total += bias[line];
      if (residual) total += residual[(i64)m * n + line];
      if (OUT_BF16) {
        ((u16*)out)[(i64)m * n + line] = float_bf16(total);
      } else {
        ((float*)out)[(i64)m * n + line] = total;
      }
    }
    if (CLUSTER > 1) {
      cluster_sync();
    } else if (round + 1 < rounds) {
      block_sync();
    }
  }
}
EXPORT_CLUSTER(int4_stream, CLUSTER)
