// The experts of one layer on INT4 weights: pairs of a token and an expert sorted by expert, each expert's weight read
// once for every ROWS of its tokens.
//
// Pairs are numbered token * SLOTS + slot: TOP routed slots, then SHARED slots that stand for the shared expert, cut into
// pieces as wide as a routed one. Experts are numbered 0 .. EXPERTS-1, then the SHARED pieces.
// Three ways. One token: a block for each pair, no sorting, and the products summed where they are made (moe_*_one). A
// few rows an expert: the warps of a block share the inputs of one tile of outputs, for there is little else to share.
// More rows: every warp has a tile of its own, and the rows pass through shared memory a unit at a time (moe_*_wide).
// Macros: GROUP, GROUP_SCALES, EXPERTS, TOP, SHARED, HIDDEN, INNER (padded to 64), ROWS (pairs of a tile, a multiple of 8), WARPS,
// DEPTH (units under way a warp).
#include "int4_tile.cuh"

constexpr int SLOTS = TOP + SHARED, ALL = EXPERTS + SHARED, COLUMNS = ROWS / 8;
constexpr int HIDDEN_CHUNKS = (HIDDEN + CHUNK - 1) / CHUNK, HIDDEN_PADDED = HIDDEN_CHUNKS * CHUNK;
constexpr int UNIT = CHUNK * CHUNKS_IN_UNIT;
constexpr int PAD = 16;  // elements: rows of eight tokens start in different banks

// Sorts the pairs by expert. `order[i]` is the i-th pair; `tiles[j]` is (expert, first place in order, rows) of the j-th
// group of at most ROWS pairs of one expert; `total` the number of groups. One block.
extern "C" __global__ void __launch_bounds__(1024)
    moe_sort(const int* __restrict__ ids, int* __restrict__ order, int* __restrict__ tiles, int* __restrict__ total,
             int tokens) {
  __shared__ int counts[ALL], starts[ALL], groups[ALL];
  wait_for_earlier();
  let_next_start();
  for (int e = threadIdx.x; e < ALL; e += blockDim.x) counts[e] = e < EXPERTS ? 0 : tokens;
  block_sync();
#pragma unroll 4
  for (int i = threadIdx.x; i < tokens * TOP; i += blockDim.x) atomic_add(&counts[ids[i]], 1);
  block_sync();
  if (threadIdx.x < 32) {  // one warp adds up, a run of experts a lane
    constexpr int RUN = (ALL + 31) / 32;
    int pairs = 0, sets = 0, first = threadIdx.x * RUN;
    for (int i = 0; i < RUN; i++) {
      int count = first + i < ALL ? counts[first + i] : 0;
      pairs += count;
      sets += (count + ROWS - 1) / ROWS;
    }
    int before = pairs, before_sets = sets;
    for (int step = 1; step < 32; step *= 2) {
      int a = shuffle(before, (lane_id() - step) & 31), b = shuffle(before_sets, (lane_id() - step) & 31);
      if (lane_id() >= step) {
        before += a;
        before_sets += b;
      }
    }
    if (threadIdx.x == 31) *total = before_sets;
    before -= pairs;
    before_sets -= sets;
    for (int i = 0; i < RUN; i++) {
      int e = first + i;
      if (e < ALL) {
        starts[e] = before;
        groups[e] = before_sets;
        before += counts[e];
        before_sets += (counts[e] + ROWS - 1) / ROWS;
      }
    }
  }
  block_sync();
  for (int e = threadIdx.x; e < ALL; e += blockDim.x) {
    int count = counts[e];
    for (int i = 0; i * ROWS < count; i++) {
      int* tile = tiles + 3 * (groups[e] + i);
      tile[0] = e;
      tile[1] = starts[e] + i * ROWS;
      tile[2] = count - i * ROWS < ROWS ? count - i * ROWS : ROWS;
    }
  }
  block_sync();
  for (int e = threadIdx.x; e < ALL; e += blockDim.x) counts[e] = starts[e];
  block_sync();
#pragma unroll 4
  for (int i = threadIdx.x; i < tokens * TOP; i += blockDim.x) {
    order[atomic_add(&counts[ids[i]], 1)] = i / TOP * SLOTS + i % TOP;
  }
  for (int i = threadIdx.x; i < tokens * SHARED; i += blockDim.x) {
    order[starts[EXPERTS + i % (SHARED ? SHARED : 1)] + i / (SHARED ? SHARED : 1)] =
        i / (SHARED ? SHARED : 1) * SLOTS + TOP + i % (SHARED ? SHARED : 1);
  }
}
EXPORT(moe_sort)

// sums = units of one or two weights times the staged rows, this warp's share of the inputs.
template <int MATRICES, int N>
DEVICE void multiply_share(float (&sums)[MATRICES][N][4], const words4* const (&codes)[MATRICES],
                           const u32* const (&scales)[MATRICES], const u16* rows, int stride, int share, int units,
                           int count) {
  Unit ring[DEPTH][MATRICES];
  int mine = (units - share + WARPS - 1) / WARPS;
#pragma unroll
  for (int i = 0; i < DEPTH; i++)
#pragma unroll
    for (int m = 0; m < MATRICES; m++)
      if (i < mine) load_unit(ring[i][m], codes[m], scales[m], share + i * WARPS);
  copy_wait<0>();
  block_sync();
  const u16* lane_rows = rows + (lane_id() >> 2) * stride + (lane_id() & 3) * 4;
  for (int base = 0; base < mine; base += DEPTH) {
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      if (base + i >= mine) break;
      int at = share + (base + i) * WARPS;
      multiply_units(sums, ring[i], lane_rows + at * UNIT, stride, count);
      if (base + i + DEPTH < mine)
#pragma unroll
        for (int m = 0; m < MATRICES; m++) load_unit(ring[i][m], codes[m], scales[m], at + DEPTH * WARPS);
    }
  }
}

// gated[i] = silu(gate) * up of the i-th sorted pair. Grid: (INNER / 16, groups); tiles of gate and up take turns.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    moe_gate_up(const u16* __restrict__ x, const words4* __restrict__ codes, const u32* __restrict__ scales,
                const int* __restrict__ order, const int* __restrict__ tiles, const int* __restrict__ total,
                u16* __restrict__ gated) {
  wait_for_earlier();
  let_next_start();
  if (blockIdx.y >= *total) return;
  const int expert = tiles[3 * blockIdx.y], start = tiles[3 * blockIdx.y + 1], count = tiles[3 * blockIdx.y + 2];
  u16* rows = (u16*)dynamic_shared();
  constexpr int STRIDE = HIDDEN_PADDED + PAD, UNITS = HIDDEN_PADDED / UNIT, GROUPS = HIDDEN_PADDED / GROUP;
  const i64 tile = ((i64)expert * (INNER / TILE) + blockIdx.x) * 2;
  const int pieces = HIDDEN_PADDED / 8;
  for (int i = threadIdx.x; i < count * pieces; i += WARPS * 32) {
    int row = i / pieces, at = i % pieces * 8;
    copy_async(rows + row * STRIDE + at, x + (i64)(order[start + row] / SLOTS) * HIDDEN + at, at < HIDDEN);
  }
  copy_commit();
  float sums[2][COLUMNS][4] = {};
  const words4* const from[2] = {codes + tile * HIDDEN_CHUNKS * 32 + lane_id(),
                                 codes + (tile + 1) * HIDDEN_CHUNKS * 32 + lane_id()};
  const u32* const scaled[2] = {scales + tile * GROUPS * TILE, scales + (tile + 1) * GROUPS * TILE};
  const int warp = threadIdx.x / 32;
  multiply_share<2, COLUMNS>(sums, from, scaled, rows, STRIDE, warp, UNITS, count);
  block_sync();  // the rows are done with: their memory takes the partial sums
  float* partial = (float*)dynamic_shared();
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) partial[(((warp * 2 + m) * COLUMNS + n) * 4 + i) * 32 + lane_id()] = sums[m][n][i];
  block_sync();
  for (int e = threadIdx.x; e < count * TILE; e += WARPS * 32) {
    int token = e / TILE, row = e % TILE;
    int at = ((token / 8) * 4 + (row / 8) * 2 + token % 2) * 32 + row % 8 * 4 + token % 8 / 2;
    float gate = 0.0f, up = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      gate += partial[w * 2 * COLUMNS * 128 + at];
      up += partial[(w * 2 + 1) * COLUMNS * 128 + at];
    }
    gated[(i64)(start + token) * INNER + blockIdx.x * TILE + row] = float_bf16(gate / (1.0f + expf(-gate)) * up);
  }
}
EXPORT(moe_gate_up)

// products[pair] = down * gated. Grid: (outputs / 16, groups).
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    moe_down(const u16* __restrict__ gated, const words4* __restrict__ codes, const u32* __restrict__ scales,
             const int* __restrict__ order, const int* __restrict__ tiles, const int* __restrict__ total,
             float* __restrict__ products) {
  wait_for_earlier();
  let_next_start();
  if (blockIdx.y >= *total) return;
  const int expert = tiles[3 * blockIdx.y], start = tiles[3 * blockIdx.y + 1], count = tiles[3 * blockIdx.y + 2];
  u16* rows = (u16*)dynamic_shared();
  constexpr int STRIDE = INNER + PAD, UNITS = INNER / UNIT, GROUPS = INNER / GROUP, CHUNKS = INNER / CHUNK;
  const i64 tile = (i64)expert * gridDim.x + blockIdx.x;
  for (int i = threadIdx.x; i < count * (INNER / 8); i += WARPS * 32) {
    int row = i / (INNER / 8), at = i % (INNER / 8) * 8;
    copy_async(rows + row * STRIDE + at, gated + (i64)(start + row) * INNER + at);
  }
  copy_commit();
  float sums[1][COLUMNS][4] = {};
  const words4* const from[1] = {codes + tile * CHUNKS * 32 + lane_id()};
  const u32* const scaled[1] = {scales + tile * GROUPS * TILE};
  const int warp = threadIdx.x / 32;
  multiply_share<1, COLUMNS>(sums, from, scaled, rows, STRIDE, warp, UNITS, count);
  block_sync();
  float* partial = (float*)dynamic_shared();
#pragma unroll
  for (int n = 0; n < COLUMNS; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) partial[((warp * COLUMNS + n) * 4 + i) * 32 + lane_id()] = sums[0][n][i];
  block_sync();
  for (int e = threadIdx.x; e < count * TILE; e += WARPS * 32) {
    int token = e / TILE, row = e % TILE, output = blockIdx.x * TILE + row;
    int at = ((token / 8) * 4 + (row / 8) * 2 + token % 2) * 32 + row % 8 * 4 + token % 8 / 2;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += partial[w * COLUMNS * 128 + at];
    if (output < HIDDEN) products[(i64)order[start + token] * HIDDEN + output] = sum;
  }
}
EXPORT(moe_down)

// gated[slot] = silu(gate) * up of the only token. Grid: (INNER / 16, slots).
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    moe_gate_up_one(const u16* __restrict__ x, const words4* __restrict__ codes, const u32* __restrict__ scales,
                    const int* __restrict__ ids, u16* __restrict__ gated) {
  __shared__ float partial[WARPS][2][TILE];
  u16* rows = (u16*)dynamic_shared();
  constexpr int UNITS = HIDDEN_PADDED / UNIT, GROUPS = HIDDEN_PADDED / GROUP;
  const int slot = blockIdx.y, warp = threadIdx.x / 32;
  wait_for_earlier();
  let_next_start();  // after the wait: moe_down_one reads `ids` without waiting for this kernel
  const int expert = slot < TOP ? ids[slot] : EXPERTS + slot - TOP;
  for (int at = threadIdx.x * 8; at < HIDDEN_PADDED; at += WARPS * 256) copy_async(rows + at, x + at, at < HIDDEN);
  copy_commit();
  const i64 tile = ((i64)expert * (INNER / TILE) + blockIdx.x) * 2;
  const words4* const from[2] = {codes + tile * HIDDEN_CHUNKS * 32 + lane_id(),
                                 codes + (tile + 1) * HIDDEN_CHUNKS * 32 + lane_id()};
  const u32* const scaled[2] = {scales + tile * GROUPS * TILE, scales + (tile + 1) * GROUPS * TILE};
  float sums[2][1][4] = {};
  multiply_share<2, 1>(sums, from, scaled, rows, 0, warp, UNITS, 1);  // all columns read the one row
  if (lane_id() % 4 == 0) {  // column 0 of the products: the token
    for (int m = 0; m < 2; m++)
      for (int half = 0; half < 2; half++) partial[warp][m][lane_id() / 4 + half * 8] = sums[m][0][half * 2];
  }
  block_sync();
  if (threadIdx.x < TILE) {
    float gate = 0.0f, up = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) gate += partial[w][0][threadIdx.x], up += partial[w][1][threadIdx.x];
    gated[slot * INNER + blockIdx.x * TILE + threadIdx.x] = float_bf16(gate / (1.0f + expf(-gate)) * up);
  }
}
EXPORT(moe_gate_up_one)

// out += the products of all slots of the only token, in the order that moe_combine sums in. A warp a slot; grid:
// (outputs / 16). Its weights are on their way while moe_gate_up_one still runs.
extern "C" __global__ void __launch_bounds__(SLOTS * 32, 1)
    moe_down_one(const u16* __restrict__ gated, const words4* __restrict__ codes, const u32* __restrict__ scales,
                 const int* __restrict__ ids, const float* __restrict__ weights, float* __restrict__ out) {
  __shared__ float products[SLOTS][TILE];
  __shared__ __align__(16) u16 rows[SLOTS][INNER + PAD];
  constexpr int UNITS = INNER / UNIT, GROUPS = INNER / GROUP, CHUNKS = INNER / CHUNK;
  constexpr int AHEAD = UNITS < DEPTH ? UNITS : DEPTH;
  const int slot = threadIdx.x / 32;
  const int expert = slot < TOP ? ids[slot] : EXPERTS + slot - TOP;
  const i64 tile = (i64)expert * gridDim.x + blockIdx.x;
  const words4* from = codes + tile * CHUNKS * 32 + lane_id();
  const u32* scaled = scales + tile * GROUPS * TILE;
  Unit ring[AHEAD][1];
#pragma unroll
  for (int i = 0; i < AHEAD; i++) load_unit(ring[i][0], from, scaled, i);
  wait_for_earlier();
  let_next_start();
  for (int at = lane_id() * 8; at < INNER; at += 256) copy_async(&rows[slot][at], gated + slot * INNER + at);
  copy_commit();
  copy_wait<0>();
  warp_sync();
  float sums[1][1][4] = {};
  const u16* lane_row = &rows[slot][(lane_id() & 3) * 4];  // one token: all eight columns read it
  for (int base = 0; base < UNITS; base += AHEAD) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      if (base + i >= UNITS) break;
      multiply_units(sums, ring[i], lane_row + (base + i) * UNIT, 0, 1);
      if (base + i + AHEAD < UNITS) load_unit(ring[i][0], from, scaled, base + i + AHEAD);
    }
  }
  if (lane_id() % 4 == 0) {
    products[slot][lane_id() / 4] = sums[0][0][0];
    products[slot][lane_id() / 4 + 8] = sums[0][0][2];
  }
  block_sync();
  const int output = blockIdx.x * TILE + threadIdx.x;
  if (threadIdx.x < TILE && output < HIDDEN) {
    float sum = out[output];
    int last = -1;
    for (int j = 0; j < TOP; j++) {  // ascending experts
      int next = 0x7FFFFFFF, at = 0;
      for (int i = 0; i < TOP; i++)
        if (ids[i] > last && ids[i] < next) next = ids[i], at = i;
      sum += weights[at] * products[at][threadIdx.x];
      last = next;
    }
    for (int j = TOP; j < SLOTS; j++) sum += products[j][threadIdx.x];
    out[output] = sum;
  }
}
EXPORT(moe_down_one)

// out[t] += the token's products, each times its weight, in ascending order of its experts; then the shared pieces. The
// choice was there before the kernel ahead could let this one start. Grid: (HIDDEN / (4 * threads), tokens).
extern "C" __global__ void __launch_bounds__(256)
    moe_combine(const float* __restrict__ products, const int* __restrict__ ids, const float* __restrict__ weights,
                float* __restrict__ out, i64 out_stride) {
  __shared__ int slots[TOP];
  __shared__ float shares[TOP];
  const i64 token = blockIdx.y;
  const int at = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
  if (threadIdx.x < TOP) {
    int own = ids[token * TOP + threadIdx.x], rank = 0;
    for (int j = 0; j < TOP; j++) rank += ids[token * TOP + j] < own;
    slots[rank] = threadIdx.x;
    shares[rank] = weights[token * TOP + threadIdx.x];
  }
  block_sync();
  wait_for_earlier();
  let_next_start();
  if (at >= HIDDEN) return;
  words4 v[SLOTS];
#pragma unroll
  for (int j = 0; j < SLOTS; j++) v[j] = load_once(products + (token * SLOTS + (j < TOP ? slots[j] : j)) * HIDDEN + at);
  float* to = out + token * out_stride + at;
  float sum[4] = {to[0], to[1], to[2], to[3]};
#pragma unroll
  for (int j = 0; j < SLOTS; j++) {
    const float share = j < TOP ? shares[j] : 1.0f;
    sum[0] += share * bits_float(v[j].x), sum[1] += share * bits_float(v[j].y);
    sum[2] += share * bits_float(v[j].z), sum[3] += share * bits_float(v[j].w);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) to[i] = sum[i];
}
EXPORT(moe_combine)

// --- more rows an expert --------------------------------------------------------------------------------------------
constexpr int WIDE_STRIDE = UNIT + PAD, STAGES = 3, THREADS = WARPS * 32, PIECES = UNIT / 8;

// sums = units of two tiles, this warp's own, times rows that pass through shared memory. `row(r)`
// is where row r begins; `width` elements of it count, what is beyond is 0.
template <class Row>
DEVICE void multiply_passing(float (&sums)[2][COLUMNS][4], const words4* const (&codes)[2],
                             const u32* const (&scales)[2], u16* stages, Row row, int width, int units, int count) {
  constexpr int MATRICES = 2;
  auto fetch = [&](int unit) {
    u16* stage = stages + unit % STAGES * ROWS * WIDE_STRIDE;
    if (unit < units)
      for (int i = threadIdx.x; i < count * PIECES; i += THREADS) {
        int at = i % PIECES * 8, from = unit * UNIT + at;
        copy_async(stage + i / PIECES * WIDE_STRIDE + at, row(i / PIECES) + from, from < width);
      }
    copy_commit();
  };
  Unit ring[DEPTH][MATRICES];
#pragma unroll
  for (int i = 0; i < DEPTH; i++)
#pragma unroll
    for (int m = 0; m < MATRICES; m++)
      if (i < units) load_unit(ring[i][m], codes[m], scales[m], i);
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) fetch(i);
  const int place = (lane_id() >> 2) * WIDE_STRIDE + (lane_id() & 3) * 4;
  for (int base = 0; base < units; base += DEPTH) {
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      const int unit = base + i;
      if (unit >= units) break;
      copy_wait<STAGES - 2>();
      block_sync();
      fetch(unit + STAGES - 1);
      const u16* rows = stages + unit % STAGES * ROWS * WIDE_STRIDE + place;
      multiply_units(sums, ring[i], rows, WIDE_STRIDE, count);
      if (unit + DEPTH < units)
#pragma unroll
        for (int m = 0; m < MATRICES; m++) load_unit(ring[i][m], codes[m], scales[m], unit + DEPTH);
    }
  }
}

// As moe_gate_up; grid: (INNER / 16 / WARPS, rounded up, groups).
extern "C" __global__ void __launch_bounds__(THREADS)
    moe_gate_up_wide(const u16* __restrict__ x, const words4* __restrict__ codes, const u32* __restrict__ scales,
                     const int* __restrict__ order, const int* __restrict__ tiles, const int* __restrict__ total,
                     u16* __restrict__ gated) {
  __shared__ int tokens[ROWS];
  wait_for_earlier();
  let_next_start();
  if (blockIdx.y >= *total) return;
  const int expert = tiles[3 * blockIdx.y], start = tiles[3 * blockIdx.y + 1], count = tiles[3 * blockIdx.y + 2];
  if (threadIdx.x < count) tokens[threadIdx.x] = order[start + threadIdx.x] / SLOTS;
  block_sync();
  constexpr int GROUPS = HIDDEN_PADDED / GROUP, TILES = INNER / TILE;
  const int own = blockIdx.x * WARPS + threadIdx.x / 32;
  const i64 tile = ((i64)expert * TILES + (own < TILES ? own : TILES - 1)) * 2;
  const words4* const from[2] = {codes + tile * HIDDEN_CHUNKS * 32 + lane_id(),
                                 codes + (tile + 1) * HIDDEN_CHUNKS * 32 + lane_id()};
  const u32* const scaled[2] = {scales + tile * GROUPS * TILE, scales + (tile + 1) * GROUPS * TILE};
  float sums[2][COLUMNS][4] = {};
  multiply_passing(
      sums, from, scaled, (u16*)dynamic_shared(), [&](int r) { return x + (i64)tokens[r] * HIDDEN; }, HIDDEN,
      HIDDEN_PADDED / UNIT, count);
  if (own < TILES) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int token = n * 8 + lane_id() % 4 * 2 + i % 2, output = own * TILE + lane_id() / 4 + i / 2 * 8;
        float gate = sums[0][n][i];
        if (token < count)
          gated[(i64)(start + token) * INNER + output] = float_bf16(gate / (1.0f + expf(-gate)) * sums[1][n][i]);
      }
  }
}
EXPORT(moe_gate_up_wide)

// As moe_down, two tiles of outputs a warp; grid: (outputs / 32 / WARPS, rounded up, groups).
extern "C" __global__ void __launch_bounds__(THREADS)
    moe_down_wide(const u16* __restrict__ gated, const words4* __restrict__ codes, const u32* __restrict__ scales,
                  const int* __restrict__ order, const int* __restrict__ tiles, const int* __restrict__ total,
                  float* __restrict__ products) {
  __shared__ int pairs[ROWS];
  wait_for_earlier();
  let_next_start();
  if (blockIdx.y >= *total) return;
  const int expert = tiles[3 * blockIdx.y], start = tiles[3 * blockIdx.y + 1], count = tiles[3 * blockIdx.y + 2];
  if (threadIdx.x < count) pairs[threadIdx.x] = order[start + threadIdx.x];
  block_sync();
  constexpr int GROUPS = INNER / GROUP, CHUNKS = INNER / CHUNK, TILES = (HIDDEN + TILE - 1) / TILE;
  const int own = (blockIdx.x * WARPS + threadIdx.x / 32) * 2;
  const words4* from[2];
  const u32* scaled[2];
#pragma unroll
  for (int m = 0; m < 2; m++) {
    const i64 tile = (i64)expert * TILES + (own + m < TILES ? own + m : TILES - 1);
    from[m] = codes + tile * CHUNKS * 32 + lane_id();
    scaled[m] = scales + tile * GROUPS * TILE;
  }
  float sums[2][COLUMNS][4] = {};
  multiply_passing(
      sums, from, scaled, (u16*)dynamic_shared(), [&](int r) { return gated + (i64)(start + r) * INNER; }, INNER,
      INNER / UNIT, count);
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int token = n * 8 + lane_id() % 4 * 2 + i % 2, output = (own + m) * TILE + lane_id() / 4 + i / 2 * 8;
        if (token < count && own + m < TILES && output < HIDDEN)
          products[(i64)pairs[token] * HIDDEN + output] = sums[m][n][i];
      }
}
EXPORT(moe_down_wide)
