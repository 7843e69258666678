// The experts of a few tokens, whose only cost is to read the weights of those that were chosen: two kernels of one block
// a multiprocessor, each of which streams an equal share of them.
//
// Pairs of a token and an expert stand together in groups of at most ROWS, one expert's each; the shared pieces' groups
// come first, since they are known before the router has spoken. An item is two tiles of a group's expert (a gate and an
// up tile, or two neighbours of down) and falls to a team of SPLIT warps, which share its inputs: stage s goes to part
// s % SPLIT, parts go round so that all warps of a team get as many, and their sums meet in the order of the parts. A lane
// fills its own queue of DEPTH stages in shared memory by background copies, over the ends of items: weights, and the
// pairs' rows beside them. Sums of a pair are its own column's; who shares its group does not change their bits.
//
// Macros: those of experts.cuh, WARPS, SPLIT, DEPTH, BLOCKS (of a launch), MOST (tokens).
#include "experts.cuh"

constexpr int THREADS = WARPS * 32, TEAMS = WARPS / SPLIT, ALL_TEAMS = TEAMS * BLOCKS, TEAM_THREADS = SPLIT * 32, ROWS = 8;
constexpr int LINE_BYTES = STAGE_K * 2, SLOT_BYTES = 2 * TILE_BYTES + ROWS * LINE_BYTES;
constexpr int MANY = SHARED ? SHARED : 1;
constexpr int SUMS = SPLIT * 2 * 128;  // floats of a team's partial sums
constexpr int MOST_PAIRS = MOST * TOP, SHARED_GROUPS = SHARED * ((MOST + ROWS - 1) / ROWS);
constexpr int MOST_GROUPS =
    SHARED_GROUPS + (MOST_PAIRS < EXPERTS + MOST_PAIRS / ROWS ? MOST_PAIRS : EXPERTS + MOST_PAIRS / ROWS);

static_assert(WARPS % SPLIT == 0 && (SPLIT & (SPLIT - 1)) == 0 && TEAMS < 16, "teams of a block");

// Groups of pairs; `pairs` has room for ROWS of each group. A token is a bit of the `masks` of its experts, so that all
// blocks number an expert's pairs alike.
struct Groups {
  int count;
  u16 expert[MOST_GROUPS], rows[MOST_GROUPS], pairs[MOST_GROUPS][ROWS];
  int masks[EXPERTS], firsts[EXPERTS];
};

static_assert(MOST <= 32, "a bit for each token");

DEVICE int shared_groups(int tokens) { return SHARED * ((tokens + ROWS - 1) / ROWS); }

// All groups, by the whole block; to be followed by a block_sync.
DEVICE void make_groups(Groups& groups, const int* ids, int tokens) {
  const int each = (tokens + ROWS - 1) / ROWS, lane = lane_id();
#pragma unroll 1
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) groups.masks[e] = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < SHARED * tokens; i += THREADS) {
    const int piece = i % MANY, token = i / MANY, group = piece * each + token / ROWS;
    groups.pairs[group][token % ROWS] = token * SLOTS + TOP + piece;
    if (token % ROWS == 0) {
      groups.expert[group] = EXPERTS + piece;
      groups.rows[group] = tokens - token < ROWS ? tokens - token : ROWS;
    }
  }
  block_sync();
#pragma unroll 1
  for (int i = threadIdx.x; i < tokens * TOP; i += THREADS) atomic_add(&groups.masks[ids[i]], (int)(1u << i / TOP));
  block_sync();
  if (threadIdx.x < 32) {  // one warp adds up, a run of experts a lane
    constexpr int RUN = (EXPERTS + 31) / 32;
    int sets = 0;
#pragma unroll 1
    for (int i = 0; i < RUN; i++) {
      const int e = lane * RUN + i;
      sets += ((e < EXPERTS ? count_bits(groups.masks[e]) : 0) + ROWS - 1) / ROWS;
    }
    int before = sets;
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2) {
      const int below = shuffle(before, (lane - step) & 31);
      if (lane >= step) before += below;
    }
    if (lane == 31) groups.count = SHARED * each + before;
    before += SHARED * each - sets;
#pragma unroll 1
    for (int i = 0; i < RUN; i++) {
      const int e = lane * RUN + i;
      if (e >= EXPERTS) break;
      groups.firsts[e] = before;
#pragma unroll 1
      for (int left = count_bits(groups.masks[e]); left > 0; left -= ROWS, before++) {
        groups.expert[before] = e;
        groups.rows[before] = left < ROWS ? left : ROWS;
      }
    }
  }
  block_sync();
#pragma unroll 1
  for (int i = threadIdx.x; i < tokens * TOP; i += THREADS) {
    const int e = ids[i], at = count_bits(groups.masks[e] & ((1u << i / TOP) - 1));
    groups.pairs[groups.firsts[e] + at / ROWS][at % ROWS] = i / TOP * SLOTS + i % TOP;
  }
}

// Where a warp is among STAGES stages of its team's items, and what its lane reads there: of the first of two tiles, and
// of every fourth row of the group's.
template <int STAGES>
struct Place {
  int item, part, stage;
  const u8 *codes, *metas;
  const u16* rows[ROWS / 4];
  int count;  // of rows

  DEVICE_IN_CLASS void next_item() {
    item += ALL_TEAMS;
    part = (part + SPLIT - STAGES % SPLIT) % SPLIT;
    stage = part;
  }
  // To the next item that has a stage for this part, if it has none of this item's left.
  DEVICE_IN_CLASS void settle(int items) {
#pragma unroll 1
    while (stage >= STAGES && item < items) next_item();
  }
  DEVICE_IN_CLASS void point(const u8* all_codes, const u8* all_metas, i64 tile) {
    codes = all_codes + (tile * STAGES + stage) * META_AT + lane_id() * 16;
    metas = all_metas + (tile * STAGES + stage) * META_BYTES + lane_id() * 16;
  }
  DEVICE_IN_CLASS void advance() {
    stage += SPLIT, codes += SPLIT * META_AT, metas += SPLIT * META_BYTES;
#pragma unroll
    for (int j = 0; j < ROWS / 4; j++) rows[j] += SPLIT * STAGE_K;
  }
};

// Two tiles times a stage of rows: sums[m] += tile m * rows, columns being pairs. A code enters as 128 + code; what that
// and the zero add goes off with the sum of the inputs.
DEVICE void multiply_stage(float (&sums)[2][4], const u8* slot) {
  const int lane = lane_id();
  const u32 ones[4] = {0x3F803F80u, 0x3F803F80u, 0x3F803F80u, 0x3F803F80u};
  const u8* const rows = slot + 2 * TILE_BYTES + lane % 8 * 128;
#pragma unroll
  for (int group = 0; group < STAGE_GROUPS; group++) {
    float part[2][4] = {}, all[4] = {};
#pragma unroll
    for (int s = group * (GROUP / 16); s < (group + 1) * (GROUP / 16); s += 2) {
      u32 b[4];
      load_tiles(b, rows + s / 4 * (ROWS * 128) + ((s % 4 * 2 + lane / 8) ^ (lane % 8)) * 16);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const u32 pair[2] = {b[2 * half], b[2 * half + 1]};
#pragma unroll
        for (int m = 0; m < 2; m++) {
          const words4 four = *(const words4*)(slot + m * META_AT + s / 4 * CHUNK_BYTES + lane * 16);
          const u32 q = s % 4 ? (half ? four.w : four.z) : (half ? four.y : four.x);
          const u32 a[4] = {widen(q), widen(q >> 4), widen(q >> 8), widen(q >> 12)};
          mma_bf16(part[m], a, pair);
        }
        mma_bf16(all, ones, pair);
      }
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
      const RowPair pair = row_pair(slot + 2 * META_AT + m * META_BYTES + group * GROUP_BYTES, lane / 4);
#pragma unroll
      for (int i = 0; i < 4; i++) sums[m][i] += scale_of(pair.scale[i / 2]) * (part[m][i] - bf16_high(pair.zero[i / 2]) * all[i % 2]);
    }
  }
}

// Runs this block's items of a product, ITEMS of a group. `tile(group, item)` is the first tile's number among all of the
// weight's, the second stands JUMP tiles on; `row(pair)` is where the pair's row of `width` elements begins; `early` groups
// are known before `begin()`, behind which all are and rows may be read; `finish(pair, item, line, sums)` takes a pair's
// sums of a line of both tiles.
template <int STAGES, int ITEMS, int JUMP, int WIDTH, class Tile, class Begin, class Row, class Finish>
DEVICE void run_items(const Groups& groups, const u8* codes, const u8* metas, int early, Tile tile, Begin begin, Row row,
                      Finish finish) {
  const int lane = lane_id(), warp = threadIdx.x / 32, team = warp / SPLIT, member = warp % SPLIT;
  u8* const queue = dynamic_shared() + warp * (DEPTH * SLOT_BYTES);
  float* const partial = (float*)(dynamic_shared() + WARPS * DEPTH * SLOT_BYTES) + team * (2 * SUMS);
  const int first = team * BLOCKS + (int)blockIdx.x;
  auto point = [&](Place<STAGES>& at) { at.point(codes, metas, tile(at.item / ITEMS, at.item % ITEMS)); };
  auto point_rows = [&](Place<STAGES>& at) {
    const int group = at.item / ITEMS;
    at.count = groups.rows[group];
#pragma unroll
    for (int j = 0; j < ROWS / 4; j++) {
      const int line = lane / 8 + 4 * j;
      if (line < at.count) at.rows[j] = row(groups.pairs[group][line]) + at.stage * STAGE_K + lane % 8 * 8;
    }
  };
  auto copy_weights = [&](u8* slot, const Place<STAGES>& at) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
      u8* const to = slot + lane * 16;
#pragma unroll
      for (int c = 0; c < STAGE_CHUNKS; c++)
        copy_async(to + m * META_AT + c * CHUNK_BYTES, at.codes + (i64)m * JUMP * STAGES * META_AT + c * CHUNK_BYTES);
      if (lane * 16 < META_BYTES)
        copy_async(to + 2 * META_AT + m * META_BYTES, at.metas + (i64)m * JUMP * STAGES * META_BYTES);
    }
  };
  auto copy_rows = [&](u8* slot, const Place<STAGES>& at) {
#pragma unroll
    for (int c = 0; c < STAGE_CHUNKS; c++)
#pragma unroll
      for (int j = 0; j < ROWS / 4; j++) {
        const int line = lane / 8 + 4 * j;
        if (line < at.count)
          copy_async(slot + 2 * TILE_BYTES + c * (ROWS * 128) + line * 128 + (lane % 8 ^ line) * 16, at.rows[j] + c * CHUNK,
                     WIDTH == STAGES * STAGE_K || at.stage * STAGE_K + c * CHUNK + lane % 8 * 8 < WIDTH);
      }
  };
  auto start = [&](int items) {
    Place<STAGES> at;
    at.item = first, at.part = at.stage = member;
    at.settle(items);
    return at;
  };
  auto next = [&](Place<STAGES>& at, int items, bool with_rows) {
    at.advance();
    if (at.stage < STAGES) return;
    at.settle(items);
    if (at.item >= items) return;
    point(at);
    if (with_rows) point_rows(at);
  };
  // Weights of the groups that are known do not wait for anything.
  const int soon = early * ITEMS;
  Place<STAGES> ahead = start(soon);
  if (ahead.item < soon) point(ahead);
#pragma unroll 1
  for (int i = 0; i < DEPTH && ahead.item < soon; i++) {
    copy_weights(queue + i * SLOT_BYTES, ahead);
    next(ahead, soon, false);
  }
  begin();
  const int items = groups.count * ITEMS;
  ahead = start(items);
  if (ahead.item < items) point(ahead), point_rows(ahead);
#pragma unroll 1
  for (int i = 0; i < DEPTH; i++) {
    if (ahead.item < items) {
      if (ahead.item >= soon) copy_weights(queue + i * SLOT_BYTES, ahead);
      copy_rows(queue + i * SLOT_BYTES, ahead);
      next(ahead, items, true);
    }
    copy_commit();
  }
  u8* slot = queue;
  int parity = 0, part = member;
#pragma unroll 1
  for (int item = first; item < items; item += ALL_TEAMS) {
    float sums[2][4] = {};
#pragma unroll 1
    for (int stage = part; stage < STAGES; stage += SPLIT) {
      copy_wait<DEPTH - 1>();
      warp_sync();  // other lanes' copies
      multiply_stage(sums, slot);
      warp_sync();  // the slot has been read by all
      if (ahead.item < items) {
        copy_weights(slot, ahead);
        copy_rows(slot, ahead);
        next(ahead, items, true);
      }
      copy_commit();
      slot = slot + SLOT_BYTES == queue + DEPTH * SLOT_BYTES ? queue : slot + SLOT_BYTES;
    }
    float* const own = partial + parity * SUMS;
    parity ^= 1;  // nobody is further ahead than the barrier of the next item
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) own[(part * 2 + m) * 128 + i * 32 + lane] = sums[m][i];
    part = (part + SPLIT - STAGES % SPLIT) % SPLIT;
    gate_wait(1 + team, TEAM_THREADS);
    const int group = item / ITEMS, count = groups.rows[group];
#pragma unroll 1
    for (int e = member * 32 + lane; e < 128; e += TEAM_THREADS) {
      const int column = e % 4 * 2 + e / 32 % 2, line = e % 32 / 4 + e / 64 * 8;
      if (column >= count) continue;
      float both[2] = {0.0f, 0.0f};
#pragma unroll
      for (int p = 0; p < SPLIT; p++)
#pragma unroll
        for (int m = 0; m < 2; m++) both[m] += own[(p * 2 + m) * 128 + e];
      finish(groups.pairs[group][column], item % ITEMS, line, both);
    }
  }
}

// gated[pair] = silu(gate) * up of every pair. Grid: BLOCKS.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    moe_gate_up_few(const u16* x, const u8* __restrict__ codes, const u8* __restrict__ metas, const int* ids, u16* gated,
                    int tokens) {
  __shared__ Groups groups;
  run_items<HIDDEN_STAGES, GATE_TILES, GATE_TILES, HIDDEN>(
      groups, codes, metas, shared_groups(tokens),
      [&](int group, int item) {
        // Behind shared groups stand those that the list tells of.
        const int each = (tokens + ROWS - 1) / ROWS;
        int expert = EXPERTS;
        if (group < SHARED * each) {
          for (int piece = 1; piece < SHARED; piece++) expert += group >= piece * each;
        } else {
          expert = groups.expert[group];
        }
        return (i64)expert * (2 * GATE_TILES) + item;
      },
      [&] {
        wait_for_earlier();
        let_next_start();  // after the wait: what comes next reads `ids` before it waits
        make_groups(groups, ids, tokens);
        block_sync();
      },
      [&](int pair) { return x + (i64)(pair / SLOTS) * HIDDEN; },
      [&](int pair, int item, int line, const float(&both)[2]) {
        gated[(i64)pair * INNER + item * TILE_ROWS + line] = float_bf16(silu(both[0]) * both[1]);
      });
}
EXPORT(moe_gate_up_few)

// products[pair] = down * gated. Grid: BLOCKS.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    moe_down_few(const u16* gated, const u8* __restrict__ codes, const u8* __restrict__ metas, const int* __restrict__ ids,
                 float* products, int tokens) {
  __shared__ Groups groups;
  make_groups(groups, ids, tokens);
  block_sync();
  run_items<INNER_STAGES, DOWN_TILES / 2, 1, INNER>(
      groups, codes, metas, groups.count,
      [&](int group, int item) { return (i64)groups.expert[group] * DOWN_TILES + 2 * item; },
      [&] {
        wait_for_earlier();
        let_next_start();
      },
      [&](int pair) { return gated + (i64)pair * INNER; },
      [&](int pair, int item, int line, const float(&both)[2]) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
          const int output = (2 * item + m) * TILE_ROWS + line;
          if (output < HIDDEN) products[(i64)pair * HIDDEN + output] = both[m];
        }
      });
}
EXPORT(moe_down_few)
