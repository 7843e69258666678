// out = x W^T (+ bias) (+ residual) for few rows of x: the weight streams by once, at the speed of memory.
//
// A block owns a range of units (ROW_TILES tiles of 16 rows of W each) and, in a cluster of CLUSTER blocks, a slice of K.
// x's slice lies in shared memory, rounded to bfloat16. Its warps split the units, and each unit's K again SPLIT ways.
// Every lane has a queue of DEPTH stages in shared memory that its own background copies fill, so that no barrier stands
// in the loop; the queue is filled before the kernel ahead has ended, since weights do not depend on it.
// Products are of exact integers with x, in float32; a group's sum is scaled at its end. Partial sums of warps and blocks
// are added in a fixed order: a run's bits do not depend on timing.
//
// With WARPGROUP (sm_90a) four warps take a tile each, side by side, and multiply by the warpgroup's instruction, which
// reads x from shared memory once for all four: better from 9 rows on.
//
// Macros: TOKENS (rows of x, in eights), ROW_TILES, SPLIT, DEPTH, GROUP (32, 64, 128), CLUSTER, WARPGROUP, SCALE_KIND,
// X_BF16, OUT_BF16, THREADS, and what is done to x first: SILU (x is [M, 2K], gate and up; silu(gate) * up is multiplied)
// or NORM (x is float32; its RMS norm is multiplied: x by the norm's weight, and the sums by the row's factor).
#include "int4_weight.cuh"
#include "warpgroup.cuh"

constexpr int STAGE_K = GROUP > CHUNK ? GROUP : CHUNK;
constexpr int STAGE_CHUNKS = STAGE_K / CHUNK, STAGE_GROUPS = STAGE_K / GROUP;
constexpr int META_AT = STAGE_CHUNKS * CHUNK_BYTES;
constexpr int TILE_BYTES = META_AT + STAGE_GROUPS * GROUP_BYTES;
constexpr int STAGE_BYTES = ROW_TILES * TILE_BYTES;
constexpr int FEW_ROWS = 2;
constexpr int TEAM = WARPGROUP ? 4 : 1, UNIT_TILES = TEAM * ROW_TILES;
constexpr int UNIT_FLOATS = ROW_TILES * TOKENS * 128, QUADS = UNIT_FLOATS / 4, ALL = TEAM * QUADS;

#if CLUSTER > 1
#define SHAPE __cluster_dims__(1, CLUSTER, 1)
#else
#define SHAPE
#endif

// A warp's queue and its place in the weight: what is asked for next.
struct Queue {
  u8* slots;
  const u8 *codes, *meta;  // of this lane, in the unit's first tile
  i64 codes_tile, meta_tile, codes_jump, meta_jump;
  int at, left, in_unit, unit_left;

  DEVICE_IN_CLASS void open(u8* shared, const u8* all_codes, const u8* all_meta, int unit, int units, int columns,
                            int member, int stage, int count, int stages) {
    const i64 first = ((i64)unit * UNIT_TILES + member * ROW_TILES) * stages + stage;
    slots = shared + lane_id() * 16;
    codes = all_codes + first * META_AT + lane_id() * 16;
    meta = all_meta + first * (STAGE_GROUPS * GROUP_BYTES) + lane_id() * 16;
    codes_tile = (i64)stages * META_AT, meta_tile = (i64)stages * (STAGE_GROUPS * GROUP_BYTES);
    codes_jump = columns * UNIT_TILES * codes_tile - (i64)count * META_AT;
    meta_jump = columns * UNIT_TILES * meta_tile - (i64)count * (STAGE_GROUPS * GROUP_BYTES);
    at = 0, in_unit = unit_left = count, left = unit < units ? (units - unit + columns - 1) / columns * count : 0;
  }
  // The next stage, if there is one; a group is committed either way, so that waiting counts groups.
  DEVICE_IN_CLASS void fetch() {
    if (left > 0) {
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++) {
        u8* to = slots + at + r * TILE_BYTES;
#pragma unroll
        for (int c = 0; c < STAGE_CHUNKS; c++)
          copy_async(to + c * CHUNK_BYTES, codes + r * codes_tile + c * CHUNK_BYTES);
        if (lane_id() * 16 < STAGE_GROUPS * GROUP_BYTES) copy_async(to + META_AT, meta + r * meta_tile);
      }
      left--;
      codes += META_AT, meta += STAGE_GROUPS * GROUP_BYTES;
      if (--unit_left == 0) codes += codes_jump, meta += meta_jump, unit_left = in_unit;
    }
    copy_commit();
    at = at + STAGE_BYTES == DEPTH * STAGE_BYTES ? 0 : at + STAGE_BYTES;
  }
};

DEVICE float silu(float x) { return x * reciprocal(1.0f + exp_near(-x)); }

DEVICE float times(u32 a, u32 b) { return bits_float(a) * bits_float(b); }

// Eight neighbours of a row as pairs of bfloat16; `norm` are their weights.
DEVICE words4 eight(const void* x, i64 at, const float* norm) {
  if (X_BF16) return *(const words4*)((const u16*)x + at);
  if (NORM) {
    const words4 a = *(const words4*)((const float*)x + at), b = *(const words4*)((const float*)x + at + 4);
    const words4 c = *(const words4*)norm, d = *(const words4*)(norm + 4);
    return {bf16_pair(times(a.x, c.x), times(a.y, c.y)), bf16_pair(times(a.z, c.z), times(a.w, c.w)),
            bf16_pair(times(b.x, d.x), times(b.y, d.y)), bf16_pair(times(b.z, d.z), times(b.w, d.w))};
  }
  const words4 low = *(const words4*)((const float*)x + at), high = *(const words4*)((const float*)x + at + 4);
  return {bf16_pair(bits_float(low.x), bits_float(low.y)), bf16_pair(bits_float(low.z), bits_float(low.w)),
          bf16_pair(bits_float(high.x), bits_float(high.y)), bf16_pair(bits_float(high.z), bits_float(high.w))};
}
DEVICE u32 gated(u32 gate, u32 up) {
  return bf16_pair(silu(bf16_low(gate)) * bf16_low(up), silu(bf16_high(gate)) * bf16_high(up));
}
DEVICE words4 gated_eight(const void* x, i64 at, int k) {
  if (X_BF16) {
    const words4 a = eight(x, at, nullptr), b = eight(x, at + k, nullptr);
    return {gated(a.x, b.x), gated(a.y, b.y), gated(a.z, b.z), gated(a.w, b.w)};
  }
  const float *gate = (const float*)x + at, *up = gate + k;
  u32 r[4];
#pragma unroll
  for (int i = 0; i < 4; i++) r[i] = bf16_pair(silu(gate[2 * i]) * up[2 * i], silu(gate[2 * i + 1]) * up[2 * i + 1]);
  return {r[0], r[1], r[2], r[3]};
}

// Columns [k0, k1) of x to shared memory: chunks of 64 columns, in each `lines` rows of 128 bytes whose 16-byte parts are
// permuted by the row, so that the eight rows a matrix load takes lie in different banks. Beyond K lie zeros.
//
// Of a few rows the sums of groups are made on the way, [group][TOKENS * 8] floats; GROUP / 8 neighbours have a group.
DEVICE void stage_rows(u8* shared, float* group_sums, const void* x, i64 stride, const float* norm, int rows, int lines,
                       int k0, int k1, int k) {
  constexpr int AT_ONCE = 4, LANES = GROUP / 8;
  const int parts = (k1 - k0) / 8, row_step = THREADS / parts, part_step = THREADS % parts;
  int row = threadIdx.x / parts, part = threadIdx.x % parts;
  for (int done = 0; done < rows * parts; done += AT_ONCE * THREADS) {
    words4 v[AT_ONCE];
    int to[AT_ONCE], sum_at[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const int column = k0 + part * 8;
      to[j] = row < rows ? ((part / 8) * lines + row) * 128 + ((part % 8) ^ (row & 7)) * 16 : -1;
      sum_at[j] = row < rows && part % LANES == 0 ? part / LANES * (TOKENS * 8) + row : -1;
      v[j] = {0, 0, 0, 0};
      if (row < rows && column < k)
        v[j] = SILU ? gated_eight(x, row * stride + column, k) : eight(x, row * stride + column, norm + column);
      row += row_step, part += part_step;
      if (part >= parts) part -= parts, row++;
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++)
      if (to[j] >= 0) *(words4*)(shared + to[j]) = v[j];
    if (rows > FEW_ROWS) continue;
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      float sum = ((bf16_low(v[j].x) + bf16_high(v[j].x)) + (bf16_low(v[j].y) + bf16_high(v[j].y))) +
                  ((bf16_low(v[j].z) + bf16_high(v[j].z)) + (bf16_low(v[j].w) + bf16_high(v[j].w)));
#pragma unroll
      for (int mask = 1; mask < LANES; mask *= 2) sum += shuffle_xor(sum, mask);
      if (sum_at[j] >= 0) group_sums[sum_at[j]] = sum;
    }
  }
}

// Each warp's part of the rows' sums of squares, [rows][warps]; and of all parts the rows' factors.
DEVICE void square_rows(float* squares, const float* x, i64 stride, int rows, int k) {
  for (int row = 0; row < rows; row++) {
    float sum = 0.0f;
    for (int at = threadIdx.x * 4; at < k; at += THREADS * 4) {
      const words4 v = *(const words4*)(x + row * stride + at);
      sum += times(v.x, v.x) + times(v.y, v.y) + times(v.z, v.z) + times(v.w, v.w);
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) squares[row * (THREADS / 32) + threadIdx.x / 32] = sum;
  }
}
DEVICE void factor_rows(float* factors, const float* squares, int rows, int k, float eps) {
  const int row = threadIdx.x;
  if (row >= rows) return;
  float sum = 0.0f;
  for (int i = 0; i < THREADS / 32; i++) sum += squares[row * (THREADS / 32) + i];
  factors[row] = rsqrt_near(sum / k + eps);
}

// Where a lane's row of x begins for matrix loads of its eight; missing rows repeat the last.
DEVICE int row_address(int eight, int rows) {
  const int lane = lane_id(), wanted = eight * 8 + lane % 8, row = wanted < rows ? wanted : rows - 1;
  return row * 128 + ((lane / 8) ^ (row & 7)) * 16;
}

// The sum of each group of x, for each row: [group][TOKENS * 8] floats; a product with ones.
DEVICE void sum_groups(float* group_sums, const u8* xs, int rows, int chunk_bytes, int groups) {
  const u32 ones[4] = {0x3F803F80u, 0x3F803F80u, 0x3F803F80u, 0x3F803F80u};
  const int lane = lane_id();
  for (int group = threadIdx.x / 32; group < groups; group += THREADS / 32)
#pragma unroll
    for (int m = 0; m < TOKENS; m++) {
      const int row_at = row_address(m, rows);
      float sum[2][4] = {};  // apart, so that products wait less for one another
#pragma unroll
      for (int part = 0; part < GROUP / 32; part++) {
        const int at = group * (GROUP / 32) + part;
        u32 b[4];
        load_tiles(b, xs + at / 2 * chunk_bytes + (row_at ^ (at % 2 * 64)));
        const u32 first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
        mma_bf16(sum[0], ones, first);
        mma_bf16(sum[1], ones, second);
      }
      const float low = sum[0][0] + sum[1][0], high = sum[0][1] + sum[1][1];
      if (lane < 4) *(words2*)(group_sums + (group * TOKENS + m) * 8 + lane * 2) = {float_bits(low), float_bits(high)};
    }
}

// A code enters its product as 128 + code; what that and the zero add, (128 + zero) times the group's sum of x, is taken
// off at the group's end.
DEVICE void finish_group(float (&sum)[TOKENS][4], const float (&part)[TOKENS][4], const u8* meta, const float* group_sums) {
  const RowPair rows = row_pair(meta, lane_id() / 4);
  const float s0 = scale_of(rows.scale[0]), s1 = scale_of(rows.scale[1]);
  const float z0 = bf16_high(rows.zero[0]), z1 = bf16_high(rows.zero[1]);
#pragma unroll
  for (int m = 0; m < TOKENS; m++) {
    const words2 all = *(const words2*)(group_sums + m * 8 + lane_id() % 4 * 2);
    const float x0 = bits_float(all.x), x1 = bits_float(all.y);
    sum[m][0] += s0 * (part[m][0] - z0 * x0);
    sum[m][1] += s0 * (part[m][1] - z0 * x1);
    sum[m][2] += s1 * (part[m][2] - z1 * x0);
    sum[m][3] += s1 * (part[m][3] - z1 * x1);
  }
}

// A stage's part of the sums.
DEVICE void multiply(float (&sum)[ROW_TILES][TOKENS][4], const u8* slot, const u8* xs, const float* group_sums,
                     const int (&row_at)[TOKENS], int chunk_bytes) {
  const int lane = lane_id();
  // Few products at a time wait for one another: then every other one adds to sums of its own.
  constexpr int CHAINS = ROW_TILES * TOKENS <= 2 ? 2 : 1;
  float part[CHAINS][ROW_TILES][TOKENS][4];
  words4 word[ROW_TILES];
#pragma unroll
  for (int step = 0; step < STAGE_K / 16; step += 2) {
    const int chunk = step / 4;
    if (step % 4 == 0) {
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++)
        word[r] = *(const words4*)(slot + r * TILE_BYTES + chunk * CHUNK_BYTES + lane * 16);
    }
    if (step * 16 % GROUP == 0) {
#pragma unroll
      for (int i = 0; i < CHAINS * ROW_TILES * TOKENS * 4; i++) (&part[0][0][0][0])[i] = 0.0f;
    }
    u32 b[TOKENS][4];
#pragma unroll
    for (int m = 0; m < TOKENS; m++) load_tiles(b[m], xs + chunk * chunk_bytes + (row_at[m] ^ (step % 4 / 2 * 64)));
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
      const words2 q = step % 4 ? words2{word[r].z, word[r].w} : words2{word[r].x, word[r].y};
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const u32 codes = half ? q.y : q.x;
        const u32 a[4] = {widen(codes), widen(codes >> 4), widen(codes >> 8), widen(codes >> 12)};
#pragma unroll
        for (int m = 0; m < TOKENS; m++) {
          const u32 pair[2] = {b[m][2 * half], b[m][2 * half + 1]};
          mma_bf16(part[half % CHAINS][r][m], a, pair);
        }
      }
    }
    if ((step + 2) * 16 % GROUP == 0) {
      const int group = (step + 2) * 16 / GROUP - 1;
#pragma unroll
      for (int i = 0; i < ROW_TILES * TOKENS * 4; i++)
        if (CHAINS > 1) (&part[0][0][0][0])[i] += (&part[CHAINS - 1][0][0][0])[i];
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++)
        finish_group(sum[r], part[0][r], slot + r * TILE_BYTES + META_AT + group * GROUP_BYTES, group_sums + group * TOKENS * 8);
    }
  }
}

// The same for one tile a warp, four warps together; `next` runs while the first group's products do.
template <class Next>
DEVICE void multiply_together(float (&sum)[TOKENS][4], const u8* slot, const u8* xs, const float* group_sums,
                              int chunk_bytes, Next next) {
  constexpr int STEPS = GROUP / 16;
#pragma unroll
  for (int group = 0; group < STAGE_GROUPS; group++) {
    u32 a[STEPS][4];
    float part[TOKENS * 4];
#pragma unroll
    for (int i = 0; i < TOKENS * 4; i++) part[i] = 0.0f;
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      const int step = group * STEPS + s;
      const words4 q = *(const words4*)(slot + step / 4 * CHUNK_BYTES + lane_id() * 16);
      const u32 codes = step % 4 == 0 ? q.x : step % 4 == 1 ? q.y : step % 4 == 2 ? q.z : q.w;
#pragma unroll
      for (int j = 0; j < 4; j++) a[s][j] = widen(codes >> (4 * j));
    }
    warpgroup_fence();
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      const int step = group * STEPS + s;
      warpgroup_mma(part, a[s], matrix_lines(xs + step / 4 * chunk_bytes, step % 4));
    }
    warpgroup_commit();
    if (group == 0) next();
    warpgroup_wait<0>();
    float quads[TOKENS][4];
#pragma unroll
    for (int i = 0; i < TOKENS * 4; i++) quads[i / 4][i % 4] = part[i];
    finish_group(sum, quads, slot + META_AT + group * GROUP_BYTES, group_sums + group * TOKENS * 8);
  }
}

DEVICE words4 plus(const words4& a, const words4& b) {
  return {float_bits(bits_float(a.x) + bits_float(b.x)), float_bits(bits_float(a.y) + bits_float(b.y)),
          float_bits(bits_float(a.z) + bits_float(b.z)), float_bits(bits_float(a.w) + bits_float(b.w))};
}

// Two blocks of few rows have room for their registers on a multiprocessor: the next kernel's is one of them.
extern "C" __global__ void SHAPE __launch_bounds__(THREADS, TOKENS * ROW_TILES == 1 && THREADS <= 512 ? 2 : 1)
    int4_stream(const u8* __restrict__ codes, const u8* __restrict__ metas, const void* __restrict__ x, i64 x_stride,
                const float* __restrict__ bias, const float* residual, void* out, int rows, int n, int k, int units,
                int stages, const float* __restrict__ norm, float eps) {
  const int lane = lane_id(), warp = threadIdx.x / 32;
  const int member = warp % TEAM, team = warp / TEAM;
  const int part = team % SPLIT, column = team / SPLIT, columns = THREADS / 32 / TEAM / SPLIT;
  const int rank = blockIdx.y;
  const int first = (i64)units * blockIdx.x / gridDim.x, last = (i64)units * (blockIdx.x + 1) / gridDim.x;
  const int rounds = (last - first + columns - 1) / columns;
  const int block0 = stages * rank / CLUSTER, block1 = stages * (rank + 1) / CLUSTER;
  const int stage0 = block0 + (block1 - block0) * part / SPLIT, stage1 = block0 + (block1 - block0) * (part + 1) / SPLIT;

  const int lines = WARPGROUP ? TOKENS * 8 : rows, chunk_bytes = lines * 128;
  u8* const xs = dynamic_shared();
  u8* const slots = xs + (stages + CLUSTER - 1) / CLUSTER * STAGE_CHUNKS * chunk_bytes + warp * (DEPTH * STAGE_BYTES);
  float* const sums = (float*)(slots + (THREADS / 32 - warp) * (DEPTH * STAGE_BYTES));
  float* const group_sums = sums + THREADS / 32 * UNIT_FLOATS;
  float* const factors = group_sums + (stages + CLUSTER - 1) / CLUSTER * STAGE_GROUPS * TOKENS * 8;  // and squares

  Queue queue;
  queue.open(slots, codes, metas, first + column, last, columns, member, stage0, stage1 - stage0, stages);
  for (int i = 0; i < DEPTH - 1; i++) queue.fetch();
  wait_for_earlier();
  let_next_start();  // not before: steps of whole models took 3 % longer on an H200, although one product alone gains
  stage_rows(xs, group_sums, x, x_stride, norm, rows, lines, block0 * STAGE_K, block1 * STAGE_K, k);
  if (NORM) square_rows(factors + TOKENS * 8, (const float*)x, x_stride, rows, k);
  if (WARPGROUP) fence_for_matrices();
  block_sync();
  if (NORM) factor_rows(factors, factors + TOKENS * 8, rows, k, eps);  // read behind the next barrier
  if (rows > FEW_ROWS) {
    sum_groups(group_sums, xs, rows, chunk_bytes, (block1 - block0) * STAGE_GROUPS);
    block_sync();
  }

  int row_at[TOKENS];
#pragma unroll
  for (int m = 0; m < TOKENS; m++) row_at[m] = row_address(m, rows);

  int slot = 0;
  for (int round = 0; round < rounds; round++) {
    float sum[ROW_TILES][TOKENS][4] = {};
    if (first + round * columns + column < last) {
      const u8* part_of_x = xs + (stage0 - block0) * STAGE_CHUNKS * chunk_bytes;
      const float* part_of_sums = group_sums + (stage0 - block0) * STAGE_GROUPS * TOKENS * 8;
      for (int stage = stage0; stage < stage1; stage++) {
        copy_wait<DEPTH - 2>();
        warp_sync();  // the groups' words were copied by a few lanes; and the slot filled next has been read by all
        if constexpr (WARPGROUP) {
          multiply_together(sum[0], slots + slot, part_of_x, part_of_sums, chunk_bytes, [&] { queue.fetch(); });
        } else {
          multiply(sum, slots + slot, part_of_x, part_of_sums, row_at, chunk_bytes);
          queue.fetch();
        }
        part_of_x += STAGE_CHUNKS * chunk_bytes;
        part_of_sums += STAGE_GROUPS * TOKENS * 8;
        slot = slot + STAGE_BYTES == DEPTH * STAGE_BYTES ? 0 : slot + STAGE_BYTES;
      }
    }
    words4* const partial = (words4*)sums;  // [columns][SPLIT][TEAM * QUADS]
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
      for (int m = 0; m < TOKENS; m++)
        partial[warp * QUADS + (r * TOKENS + m) * 32 + lane] = {float_bits(sum[r][m][0]), float_bits(sum[r][m][1]),
                                                                float_bits(sum[r][m][2]), float_bits(sum[r][m][3])};
    block_sync();
    if (CLUSTER > 1) {
      if (SPLIT > 1)
        for (int i = threadIdx.x; i < columns * ALL; i += THREADS) {
          words4* own = partial + i / ALL * (SPLIT * ALL) + i % ALL;
          words4 total = own[0];
#pragma unroll
          for (int p = 1; p < SPLIT; p++) total = plus(total, own[p * ALL]);
          own[0] = total;
        }
      cluster_sync();
    }
    for (int i = threadIdx.x + THREADS * rank; i < columns * ALL; i += THREADS * CLUSTER) {
      const int e = i % ALL, tile = e / 32, unit = first + round * columns + i / ALL;
      const int token = tile % TOKENS * 8 + e % 4 * 2;
      const i64 line = ((i64)unit * UNIT_TILES + tile / TOKENS) * TILE_ROWS + e % 32 / 4;
      if (unit >= last || token >= rows || line >= n) continue;
      const words4* from = partial + i / ALL * (SPLIT * ALL) + e;
      constexpr int PARTS = CLUSTER > 1 ? CLUSTER : SPLIT;
      words4 v[PARTS];
#pragma unroll
      for (int q = 0; q < PARTS; q++) v[q] = CLUSTER > 1 ? cluster_load(from, q) : from[q * ALL];
#pragma unroll
      for (int q = 1; q < PARTS; q++) v[0] = plus(v[0], v[q]);
      float four[4] = {bits_float(v[0].x), bits_float(v[0].y), bits_float(v[0].z), bits_float(v[0].w)};
      i64 at[4];  // of (row, token), the next token; 8 rows on, the same. All is read before anything is written.
      float added[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const i64 row = line + j / 2 * 8;
        at[j] = token + j % 2 < rows && row < n ? (i64)(token + j % 2) * n + row : -1;
        added[j] = residual && at[j] >= 0 ? residual[at[j]] : 0.0f;
        if (NORM) four[j] *= factors[token + j % 2];
        if (bias && at[j] >= 0) four[j] += bias[row];
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if (at[j] < 0) continue;
        const float total = residual ? four[j] + added[j] : four[j];
        if (OUT_BF16) {
          ((u16*)out)[at[j]] = float_bf16(total);
        } else {
          ((float*)out)[at[j]] = total;
        }
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
