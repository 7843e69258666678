// The experts of one token, whose only cost is to read their weights: two kernels that read them as one stream.
//
// moe_gate_up_one: every block has SHARED_PAIRS pairs of a gate and an up tile of the shared expert, which it asks for
// before the router has spoken, and ROUTED_PAIRS of routed ones. Each warp has its own inputs, 1 / WARPS of all (or
// several such shares, one after the other), of all the block's pairs: inputs stay in registers, sums meet once. A lane
// fills its own queue of DEPTH stages in shared memory by background copies.
// moe_down_one: a block has a tile of 16 outputs of every slot. It starts when the first kernel has asked for its last
// weights, and asks for all of its own at once. Sums are added in the order that moe_combine adds in.
//
// Macros: those of experts.cuh, WARPS, DEPTH, BLOCKS (the device's multiprocessors: the grid of moe_gate_up_one).
// Registers and shared memory of both are such that a block of each fits on a multiprocessor.
#include "experts.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int ALL_SHARED = SHARED * GATE_TILES, ALL_ROUTED = TOP * GATE_TILES;
constexpr int SHARED_PAIRS = (ALL_SHARED + BLOCKS - 1) / BLOCKS, ROUTED_PAIRS = (ALL_ROUTED + BLOCKS - 1) / BLOCKS;
constexpr int PAIRS = SHARED_PAIRS + ROUTED_PAIRS, SHARES = (HIDDEN_STAGES + WARPS - 1) / WARPS;
constexpr int PAIR_BYTES = 2 * TILE_BYTES, STAGE_STEPS = STAGE_K / 16;

// A lane's part of a stage of inputs as operand B of which all eight columns are the one row, and the groups' sums.
struct Inputs {
  u32 b[STAGE_STEPS][2];
  float sums[STAGE_GROUPS];

  // `from` is where the stage begins; beyond `left` elements, a multiple of 8, lie zeros.
  DEVICE_IN_CLASS void load(const u16* from, int left) {
    const int t = lane_id() % 4;
#pragma unroll
    for (int s = 0; s < STAGE_STEPS; s++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        b[s][half] = s * 16 + half * 8 < left ? *(const u32*)(from + s * 16 + half * 8 + t * 2) : 0;
  }
  DEVICE_IN_CLASS void sum() {
    const u32 ones[4] = {0x3F803F80u, 0x3F803F80u, 0x3F803F80u, 0x3F803F80u};
#pragma unroll
    for (int group = 0; group < STAGE_GROUPS; group++) {
      float all[4] = {};
#pragma unroll
      for (int s = 0; s < GROUP / 16; s++) mma_bf16(all, ones, b[group * (GROUP / 16) + s]);
      sums[group] = all[0];
    }
  }
  // Adds a tile's rows g and g + 8. `codes` is this lane's place in shared memory, `metas` the tile's. A code enters as
  // 128 + code; what that and the zero add goes off with the sum of the inputs.
  DEVICE_IN_CLASS void multiply(float (&to)[2], const u8* codes, const u8* metas) const {
#pragma unroll
    for (int group = 0; group < STAGE_GROUPS; group++) {
      float part[4] = {};
#pragma unroll
      for (int s = group * (GROUP / 16); s < (group + 1) * (GROUP / 16); s++) {
        const words4 four = *(const words4*)(codes + s / 4 * CHUNK_BYTES);
        const u32 q = s % 4 == 0 ? four.x : s % 4 == 1 ? four.y : s % 4 == 2 ? four.z : four.w;
        const u32 a[4] = {widen(q), widen(q >> 4), widen(q >> 8), widen(q >> 12)};
        mma_bf16(part, a, b[s]);
      }
      const RowPair rows = row_pair(metas + group * GROUP_BYTES, lane_id() / 4);
      to[0] += scale_of(rows.scale[0]) * (part[0] - bf16_high(rows.zero[0]) * sums[group]);
      to[1] += scale_of(rows.scale[1]) * (part[2] - bf16_high(rows.zero[1]) * sums[group]);
    }
  }
};

// The same of inputs that lie in shared memory, in few registers.
DEVICE void multiply_line(float (&to)[2], const u8* line, const u8* codes, const u8* metas) {
  const u32 ones[4] = {0x3F803F80u, 0x3F803F80u, 0x3F803F80u, 0x3F803F80u};
#pragma unroll
  for (int group = 0; group < STAGE_GROUPS; group++) {
    float part[4] = {}, all[4] = {};
#pragma unroll
    for (int s = group * (GROUP / 16); s < (group + 1) * (GROUP / 16); s += 2) {
      u32 b[4];
      load_tiles(b, line + s * 32 + lane_id() / 8 * 16);
      const words2 two = *(const words2*)(codes + s / 4 * CHUNK_BYTES + s % 4 * 4);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const u32 q = half ? two.y : two.x, pair[2] = {b[2 * half], b[2 * half + 1]};
        const u32 a[4] = {widen(q), widen(q >> 4), widen(q >> 8), widen(q >> 12)};
        mma_bf16(part, a, pair);
        mma_bf16(all, ones, pair);
      }
    }
    const RowPair rows = row_pair(metas + group * GROUP_BYTES, lane_id() / 4);
    to[0] += scale_of(rows.scale[0]) * (part[0] - bf16_high(rows.zero[0]) * all[0]);
    to[1] += scale_of(rows.scale[1]) * (part[2] - bf16_high(rows.zero[1]) * all[2]);
  }
}

// gated[slot] = silu(gate) * up of the only token. What the kernel ahead may still be writing, `ids` as well, is not said to
// be constant: such reads may come before the wait. Grid: BLOCKS.
extern "C" __global__ void __maxnreg__(80)
    moe_gate_up_one(const u16* x, const u8* __restrict__ codes, const u8* __restrict__ metas, const int* ids,
                    u16* __restrict__ gated) {
  __shared__ float sums[PAIRS][2][TILE_ROWS][WARPS + 1];
  const int lane = lane_id(), warp = threadIdx.x / 32, block = blockIdx.x;
  u8* const queue = dynamic_shared() + warp * (DEPTH * PAIR_BYTES);
  const int shared0 = ALL_SHARED * block / BLOCKS, shared_count = ALL_SHARED * (block + 1) / BLOCKS - shared0;
  // The other way round, so that odd pairs of both kinds fall to different blocks.
  const int routed0 = ALL_ROUTED * (BLOCKS - 1 - block) / BLOCKS;
  const int routed_count = ALL_ROUTED * (BLOCKS - block) / BLOCKS - routed0;
  // Stage `i` of this warp's list: pairs in order, for one share of its inputs after the other.
  auto fetch = [&](int i) {
    const int share = i / PAIRS, pair = i % PAIRS, stage = share * WARPS + warp;
    const bool routed = pair >= SHARED_PAIRS;
    const int at = routed ? routed0 + pair - SHARED_PAIRS : shared0 + pair;
    const bool there = share < SHARES && stage < HIDDEN_STAGES && (routed ? pair - SHARED_PAIRS < routed_count : pair < shared_count);
    if (there) {
      const int expert = routed ? ids[at / GATE_TILES] : EXPERTS + at / GATE_TILES;
      const i64 first = ((i64)expert * (2 * GATE_TILES) + at % GATE_TILES) * HIDDEN_STAGES + stage;
      u8* const to = queue + i % DEPTH * PAIR_BYTES;
#pragma unroll
      for (int m = 0; m < 2; m++) {
        const i64 from = first + m * (GATE_TILES * HIDDEN_STAGES);
#pragma unroll
        for (int c = 0; c < STAGE_CHUNKS; c++)
          copy_async(to + m * META_AT + c * CHUNK_BYTES + lane * 16, codes + from * META_AT + c * CHUNK_BYTES + lane * 16);
        if (lane * 16 < META_BYTES) copy_async(to + 2 * META_AT + m * META_BYTES + lane * 16, metas + from * META_BYTES + lane * 16);
      }
    }
    copy_commit();
  };
  constexpr int EARLY = SHARED_PAIRS < DEPTH ? SHARED_PAIRS : DEPTH;
#pragma unroll
  for (int i = 0; i < EARLY; i++) fetch(i);
  wait_for_earlier();
#pragma unroll
  for (int i = EARLY; i < DEPTH; i++) fetch(i);
  float sum[PAIRS][2][2] = {};
  for (int share = 0; share < SHARES; share++) {
    const int stage = share * WARPS + warp;
    Inputs inputs;
    inputs.load(x + stage * STAGE_K, HIDDEN - stage * STAGE_K);
    inputs.sum();
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
      const int i = share * PAIRS + pair;
      copy_wait<DEPTH - 1>();
      warp_sync();  // the groups' words were copied by a few lanes
      const u8* const from = queue + i % DEPTH * PAIR_BYTES;
      if (stage < HIDDEN_STAGES && (pair < SHARED_PAIRS ? pair < shared_count : pair - SHARED_PAIRS < routed_count)) {
#pragma unroll
        for (int m = 0; m < 2; m++)
          inputs.multiply(sum[pair][m], from + m * META_AT + lane * 16, from + 2 * META_AT + m * META_BYTES);
      }
      warp_sync();  // the slot has been read by all
      fetch(i + DEPTH);
      if (i + DEPTH + 1 == SHARES * PAIRS) let_next_start();  // after the wait: what comes next reads `ids` before it waits
    }
  }
  if (DEPTH + 1 > SHARES * PAIRS) let_next_start();
  if (lane % 4 == 0) {
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++)
#pragma unroll
      for (int m = 0; m < 2; m++) {
        sums[pair][m][lane / 4][warp] = sum[pair][m][0];
        sums[pair][m][lane / 4 + 8][warp] = sum[pair][m][1];
      }
  }
  block_sync();
  for (int i = threadIdx.x; i < PAIRS * TILE_ROWS; i += THREADS) {
    const int pair = i / TILE_ROWS, row = i % TILE_ROWS;
    const bool routed = pair >= SHARED_PAIRS;
    const int at = routed ? routed0 + pair - SHARED_PAIRS : ALL_ROUTED + shared0 + pair;  // slots lie one after the other
    if (routed ? pair - SHARED_PAIRS >= routed_count : pair >= shared_count) continue;
    float gate = 0.0f, up = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) gate += sums[pair][0][row][w], up += sums[pair][1][row][w];
    gated[at * TILE_ROWS + row] = float_bf16(silu(gate) * up);
  }
}
EXPORT(moe_gate_up_one)

constexpr int UNITS = SLOTS * INNER_STAGES, OWN = (UNITS + WARPS - 1) / WARPS, LINE_BYTES = STAGE_K * 2;

// out += the sum over all slots of weight * down * gated. Grid: (outputs / 16).
extern "C" __global__ void __maxnreg__(48)
    moe_down_one(const u16* gated, const u8* __restrict__ codes, const u8* __restrict__ metas,
                 const int* __restrict__ ids, const float* __restrict__ weights, float* __restrict__ out) {
  __shared__ float products[UNITS][TILE_ROWS], totals[SLOTS][TILE_ROWS];
  __shared__ int chosen[TOP];
  const int lane = lane_id(), warp = threadIdx.x / 32;
  u8* const tiles = dynamic_shared();  // of unit u, a slot's stage, at u * TILE_BYTES
  for (int unit = warp; unit < UNITS; unit += WARPS) {
    const int slot = unit / INNER_STAGES, expert = slot < TOP ? ids[slot] : EXPERTS + slot - TOP;
    const i64 at = ((i64)expert * DOWN_TILES + blockIdx.x) * INNER_STAGES + unit % INNER_STAGES;
#pragma unroll
    for (int c = 0; c < STAGE_CHUNKS; c++)
      copy_async(tiles + unit * TILE_BYTES + c * CHUNK_BYTES + lane * 16, codes + at * META_AT + c * CHUNK_BYTES + lane * 16);
    if (lane * 16 < META_BYTES) copy_async(tiles + unit * TILE_BYTES + META_AT + lane * 16, metas + at * META_BYTES + lane * 16);
  }
  copy_commit();
  if (threadIdx.x < TOP) chosen[threadIdx.x] = ids[threadIdx.x];
  wait_for_earlier();
  let_next_start();
  // The warp's inputs, as lines that matrix loads find.
  u8* const lines = tiles + UNITS * TILE_BYTES + warp * (OWN * LINE_BYTES);
  words2 elements[OWN];
#pragma unroll
  for (int i = 0; i < OWN; i++)
    if (warp + i * WARPS < UNITS && lane * 4 < STAGE_K)
      elements[i] = *(const words2*)(gated + (warp + i * WARPS) * STAGE_K + lane * 4);
#pragma unroll
  for (int i = 0; i < OWN; i++)
    if (warp + i * WARPS < UNITS && lane * 4 < STAGE_K) *(words2*)(lines + i * LINE_BYTES + lane * 8) = elements[i];
  copy_wait<0>();
  warp_sync();
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int unit = warp + i * WARPS;
    if (unit >= UNITS) break;
    float sum[2] = {};
    multiply_line(sum, lines + i * LINE_BYTES, tiles + unit * TILE_BYTES + lane * 16, tiles + unit * TILE_BYTES + META_AT);
    if (lane % 4 == 0) products[unit][lane / 4] = sum[0], products[unit][lane / 4 + 8] = sum[1];
  }
  block_sync();
  for (int i = threadIdx.x; i < SLOTS * TILE_ROWS; i += THREADS) {
    const int slot = i / TILE_ROWS, row = i % TILE_ROWS;
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < INNER_STAGES; s++) sum += products[slot * INNER_STAGES + s][row];
    int rank = slot;  // among the routed by expert, the shared pieces last
    if (slot < TOP) {
      rank = 0;
      for (int j = 0; j < TOP; j++) rank += chosen[j] < chosen[slot];
      sum *= weights[slot];
    }
    totals[rank][row] = sum;
  }
  block_sync();
  const int output = blockIdx.x * TILE_ROWS + threadIdx.x;
  if (threadIdx.x < TILE_ROWS && output < HIDDEN) {
    float sum = out[output];
#pragma unroll
    for (int s = 0; s < SLOTS; s++) sum += totals[s][threadIdx.x];
    out[output] = sum;
  }
}
EXPORT(moe_down_one)
