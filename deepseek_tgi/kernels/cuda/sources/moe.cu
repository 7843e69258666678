// The experts of one layer: pairs of a token and an expert sorted by expert, each expert's weight read once for every ROWS
// of its tokens.
//
// Two ways. A few rows an expert: the warps of a block share the inputs of one tile of outputs, for there is little else
// to share. More rows: every warp has two tiles of its own, and the rows pass through shared memory a unit at a time
// (moe_*_wide).
// Macros: those of experts.cuh, ROWS (pairs of a tile, a multiple of 8), WARPS, DEPTH (units under way a warp).
#include "experts.cuh"

constexpr int COLUMNS = ROWS / 8, UNIT = STAGE_K, THREADS = WARPS * 32;
constexpr int PAD = 8;  // elements: eight rows lie in different banks
constexpr int STRIDE = UNIT + PAD, STAGES = 3, PIECES = UNIT / 8;

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

// One lane's part of a unit of a tile: codes, and for each group the words of rows g and g + 8 (see row_pair).
struct Unit {
  words4 codes[STAGE_CHUNKS];
  words2 metas[STAGE_GROUPS];
};

// `codes` and `metas` are this lane's places in the tile's first unit.
DEVICE void load_unit(Unit& unit, const u8* codes, const u8* metas, int index) {
#pragma unroll
  for (int i = 0; i < STAGE_CHUNKS; i++) unit.codes[i] = load_once(codes + (i64)index * META_AT + i * CHUNK_BYTES);
#pragma unroll
  for (int i = 0; i < STAGE_GROUPS; i++)
    unit.metas[i] = load_kept8(metas + (i64)index * META_BYTES + i * GROUP_BYTES + lane_id() / 4 * 8);
}

// sums[m][n] += units[m] * rows for TILES tiles that share their inputs: `rows` is where this lane's matrix loads begin in
// shared memory, a row being `stride` elements; each further n is eight rows on. Codes enter as what they mean, exactly.
template <int TILES>
DEVICE void multiply_units(float (&sums)[TILES][COLUMNS][4], const Unit (&units)[TILES], const u16* rows, int stride,
                           int count) {
#pragma unroll
  for (int group = 0; group < STAGE_GROUPS; group++) {
    float partial[TILES][COLUMNS][4] = {};
#pragma unroll
    for (int two = group * (GROUP / 16); two < (group + 1) * (GROUP / 16); two += 2) {
      u32 b[COLUMNS][4];
#pragma unroll
      for (int n = 0; n < COLUMNS; n++)
        if (n * 8 < count) load_tiles(b[n], rows + n * 8 * stride + two * 16);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 a[TILES][4];
#pragma unroll
        for (int m = 0; m < TILES; m++) {
          const words4& codes = units[m].codes[two / 4];
          const u32 word = two % 4 ? (half ? codes.w : codes.z) : (half ? codes.y : codes.x);
          const u32 zero[2] = {permute_bytes(units[m].metas[group].x, 0, 0x3232),
                               permute_bytes(units[m].metas[group].y, 0, 0x3232)};
#pragma unroll
          for (int j = 0; j < 4; j++) a[m][j] = bf16_sub(widen(word >> 4 * j), zero[j % 2]);
        }
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
          if (n * 8 >= count) break;
          const u32 pair[2] = {b[n][2 * half], b[n][2 * half + 1]};
#pragma unroll
          for (int m = 0; m < TILES; m++) mma_bf16(partial[m][n], a[m], pair);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < TILES; m++) {
      const float scale[2] = {scale_of(units[m].metas[group].x), scale_of(units[m].metas[group].y)};
#pragma unroll
      for (int n = 0; n < COLUMNS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[m][n][i] += scale[i / 2] * partial[m][n][i];
    }
  }
}

// Where a lane's matrix loads of eight rows begin, four 8 x 8 tiles side by side.
DEVICE int lane_place(int stride) { return lane_id() % 8 * stride + lane_id() / 8 * 8; }

// sums = units of TILES tiles times the staged rows, this warp's share of the inputs.
template <int TILES>
DEVICE void multiply_share(float (&sums)[TILES][COLUMNS][4], const u8* const (&codes)[TILES], const u8* const (&metas)[TILES],
                           const u16* rows, int stride, int share, int units, int count) {
  Unit ring[DEPTH][TILES];
  const int mine = (units - share + WARPS - 1) / WARPS;
#pragma unroll
  for (int i = 0; i < DEPTH; i++)
#pragma unroll
    for (int m = 0; m < TILES; m++)
      if (i < mine) load_unit(ring[i][m], codes[m], metas[m], share + i * WARPS);
  copy_wait<0>();
  block_sync();
  const u16* lane_rows = rows + lane_place(stride);
  for (int base = 0; base < mine; base += DEPTH) {
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      if (base + i >= mine) break;
      const int at = share + (base + i) * WARPS;
      multiply_units(sums, ring[i], lane_rows + at * UNIT, stride, count);
      if (base + i + DEPTH < mine)
#pragma unroll
        for (int m = 0; m < TILES; m++) load_unit(ring[i][m], codes[m], metas[m], at + DEPTH * WARPS);
    }
  }
}

// Sums of all warps to shared memory, over whatever lies there: [warp][tile][n][i] lines of 32 floats.
template <int TILES>
DEVICE const float* partial_sums(const float (&sums)[TILES][COLUMNS][4]) {
  block_sync();
  float* partial = (float*)dynamic_shared();
#pragma unroll
  for (int m = 0; m < TILES; m++)
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        partial[((((int)threadIdx.x / 32 * TILES + m) * COLUMNS + n) * 4 + i) * 32 + lane_id()] = sums[m][n][i];
  block_sync();
  return partial;
}
// The sum of a token and a row of tile m.
template <int TILES>
DEVICE float total_of(const float* partial, int m, int token, int row) {
  const int at = ((token / 8) * 4 + (row / 8) * 2 + token % 2) * 32 + row % 8 * 4 + token % 8 / 2;
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) total += partial[(w * TILES + m) * COLUMNS * 128 + at];
  return total;
}

// gated[i] = silu(gate) * up of the i-th sorted pair. Grid: (INNER / 16, groups).
extern "C" __global__ void __launch_bounds__(THREADS)
    moe_gate_up(const u16* __restrict__ x, const u8* __restrict__ codes, const u8* __restrict__ metas,
                const int* __restrict__ order, const int* __restrict__ tiles, const int* __restrict__ total,
                u16* __restrict__ gated) {
  wait_for_earlier();
  let_next_start();
  if (blockIdx.y >= *total) return;
  const int expert = tiles[3 * blockIdx.y], start = tiles[3 * blockIdx.y + 1], count = tiles[3 * blockIdx.y + 2];
  u16* rows = (u16*)dynamic_shared();
  constexpr int WIDTH = HIDDEN_STAGES * UNIT, LINE = WIDTH + PAD;
  for (int i = threadIdx.x; i < count * (WIDTH / 8); i += THREADS) {
    const int row = i / (WIDTH / 8), at = i % (WIDTH / 8) * 8;
    copy_async(rows + row * LINE + at, x + (i64)(order[start + row] / SLOTS) * HIDDEN + at, at < HIDDEN);
  }
  copy_commit();
  const u8 *from[2], *scaled[2];
#pragma unroll
  for (int m = 0; m < 2; m++) {
    const i64 tile = (i64)expert * (2 * GATE_TILES) + m * GATE_TILES + blockIdx.x;
    from[m] = codes + tile * HIDDEN_STAGES * META_AT + lane_id() * 16, scaled[m] = metas + tile * HIDDEN_STAGES * META_BYTES;
  }
  float sums[2][COLUMNS][4] = {};
  multiply_share<2>(sums, from, scaled, rows, LINE, threadIdx.x / 32, HIDDEN_STAGES, count);
  const float* partial = partial_sums<2>(sums);
  for (int e = threadIdx.x; e < count * TILE_ROWS; e += THREADS) {
    const int token = e / TILE_ROWS, row = e % TILE_ROWS;
    const float gate = total_of<2>(partial, 0, token, row), up = total_of<2>(partial, 1, token, row);
    gated[(i64)(start + token) * INNER + blockIdx.x * TILE_ROWS + row] = float_bf16(silu(gate) * up);
  }
}
EXPORT(moe_gate_up)

// products[pair] = down * gated. Grid: (outputs / 16, groups).
extern "C" __global__ void __launch_bounds__(THREADS)
    moe_down(const u16* __restrict__ gated, const u8* __restrict__ codes, const u8* __restrict__ metas,
             const int* __restrict__ order, const int* __restrict__ tiles, const int* __restrict__ total,
             float* __restrict__ products) {
  wait_for_earlier();
  let_next_start();
  if (blockIdx.y >= *total) return;
  const int expert = tiles[3 * blockIdx.y], start = tiles[3 * blockIdx.y + 1], count = tiles[3 * blockIdx.y + 2];
  u16* rows = (u16*)dynamic_shared();
  constexpr int LINE = INNER + PAD;
  for (int i = threadIdx.x; i < count * (INNER / 8); i += THREADS) {
    const int row = i / (INNER / 8), at = i % (INNER / 8) * 8;
    copy_async(rows + row * LINE + at, gated + (i64)(start + row) * INNER + at);
  }
  copy_commit();
  const i64 tile = (i64)expert * DOWN_TILES + blockIdx.x;
  const u8* const from[1] = {codes + tile * INNER_STAGES * META_AT + lane_id() * 16};
  const u8* const scaled[1] = {metas + tile * INNER_STAGES * META_BYTES};
  float sums[1][COLUMNS][4] = {};
  multiply_share<1>(sums, from, scaled, rows, LINE, threadIdx.x / 32, INNER_STAGES, count);
  const float* partial = partial_sums<1>(sums);
  for (int e = threadIdx.x; e < count * TILE_ROWS; e += THREADS) {
    const int token = e / TILE_ROWS, row = e % TILE_ROWS, output = blockIdx.x * TILE_ROWS + row;
    if (output < HIDDEN) products[(i64)order[start + token] * HIDDEN + output] = total_of<1>(partial, 0, token, row);
  }
}
EXPORT(moe_down)

// --- more rows an expert --------------------------------------------------------------------------------------------
// sums = units of two tiles, this warp's own, times rows that pass through shared memory. `row(r)`
// is where row r begins; `width` elements of it count, what is beyond is 0.
template <class Row>
DEVICE void multiply_passing(float (&sums)[2][COLUMNS][4], const u8* const (&codes)[2], const u8* const (&metas)[2],
                             u16* stages, Row row, int width, int units, int count) {
  auto fetch = [&](int unit) {
    u16* stage = stages + unit % STAGES * ROWS * STRIDE;
    if (unit < units)
      for (int i = threadIdx.x; i < count * PIECES; i += THREADS) {
        int at = i % PIECES * 8, from = unit * UNIT + at;
        copy_async(stage + i / PIECES * STRIDE + at, row(i / PIECES) + from, from < width);
      }
    copy_commit();
  };
  Unit ring[DEPTH][2];
#pragma unroll
  for (int i = 0; i < DEPTH; i++)
#pragma unroll
    for (int m = 0; m < 2; m++)
      if (i < units) load_unit(ring[i][m], codes[m], metas[m], i);
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) fetch(i);
  for (int base = 0; base < units; base += DEPTH) {
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      const int unit = base + i;
      if (unit >= units) break;
      copy_wait<STAGES - 2>();
      block_sync();
      fetch(unit + STAGES - 1);
      const u16* rows = stages + unit % STAGES * ROWS * STRIDE + lane_place(STRIDE);
      multiply_units(sums, ring[i], rows, STRIDE, count);
      if (unit + DEPTH < units)
#pragma unroll
        for (int m = 0; m < 2; m++) load_unit(ring[i][m], codes[m], metas[m], unit + DEPTH);
    }
  }
}

// gated[i] = silu(gate) * up of the i-th sorted pair; grid: (INNER / 16 / WARPS, rounded up, groups).
extern "C" __global__ void __launch_bounds__(THREADS)
    moe_gate_up_wide(const u16* __restrict__ x, const u8* __restrict__ codes, const u8* __restrict__ metas,
                     const int* __restrict__ order, const int* __restrict__ tiles, const int* __restrict__ total,
                     u16* __restrict__ gated) {
  __shared__ int tokens[ROWS];
  wait_for_earlier();
  let_next_start();
  if (blockIdx.y >= *total) return;
  const int expert = tiles[3 * blockIdx.y], start = tiles[3 * blockIdx.y + 1], count = tiles[3 * blockIdx.y + 2];
  if (threadIdx.x < count) tokens[threadIdx.x] = order[start + threadIdx.x] / SLOTS;
  block_sync();
  const int own = blockIdx.x * WARPS + threadIdx.x / 32;
  const u8 *from[2], *scaled[2];
#pragma unroll
  for (int m = 0; m < 2; m++) {
    const i64 tile = (i64)expert * (2 * GATE_TILES) + m * GATE_TILES + (own < GATE_TILES ? own : GATE_TILES - 1);
    from[m] = codes + tile * HIDDEN_STAGES * META_AT + lane_id() * 16, scaled[m] = metas + tile * HIDDEN_STAGES * META_BYTES;
  }
  float sums[2][COLUMNS][4] = {};
  multiply_passing(
      sums, from, scaled, (u16*)dynamic_shared(), [&](int r) { return x + (i64)tokens[r] * HIDDEN; }, HIDDEN,
      HIDDEN_STAGES, count);
  if (own < GATE_TILES) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int token = n * 8 + lane_id() % 4 * 2 + i % 2, output = own * TILE_ROWS + lane_id() / 4 + i / 2 * 8;
        if (token < count)
          gated[(i64)(start + token) * INNER + output] = float_bf16(silu(sums[0][n][i]) * sums[1][n][i]);
      }
  }
}
EXPORT(moe_gate_up_wide)

// products[pair] = down * gated, two tiles of outputs a warp; grid: (outputs / 32 / WARPS, rounded up, groups).
extern "C" __global__ void __launch_bounds__(THREADS)
    moe_down_wide(const u16* __restrict__ gated, const u8* __restrict__ codes, const u8* __restrict__ metas,
                  const int* __restrict__ order, const int* __restrict__ tiles, const int* __restrict__ total,
                  float* __restrict__ products) {
  __shared__ int pairs[ROWS];
  wait_for_earlier();
  let_next_start();
  if (blockIdx.y >= *total) return;
  const int expert = tiles[3 * blockIdx.y], start = tiles[3 * blockIdx.y + 1], count = tiles[3 * blockIdx.y + 2];
  if (threadIdx.x < count) pairs[threadIdx.x] = order[start + threadIdx.x];
  block_sync();
  const int own = (blockIdx.x * WARPS + threadIdx.x / 32) * 2;
  const u8 *from[2], *scaled[2];
#pragma unroll
  for (int m = 0; m < 2; m++) {
    const i64 tile = (i64)expert * DOWN_TILES + (own + m < DOWN_TILES ? own + m : DOWN_TILES - 1);
    from[m] = codes + tile * INNER_STAGES * META_AT + lane_id() * 16, scaled[m] = metas + tile * INNER_STAGES * META_BYTES;
  }
  float sums[2][COLUMNS][4] = {};
  multiply_passing(
      sums, from, scaled, (u16*)dynamic_shared(), [&](int r) { return gated + (i64)(start + r) * INNER; }, INNER,
      INNER_STAGES, count);
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int token = n * 8 + lane_id() % 4 * 2 + i % 2, output = (own + m) * TILE_ROWS + lane_id() / 4 + i / 2 * 8;
        if (token < count && output < HIDDEN)
          products[(i64)pairs[token] * HIDDEN + output] = sums[m][n][i];
      }
}
EXPORT(moe_down_wide)

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
