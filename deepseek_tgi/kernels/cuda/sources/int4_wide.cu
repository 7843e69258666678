// out = x W^T (+ bias) (+ residual) for many rows of x (sm_90a): warpgroups multiply 64 rows of W, dequantised in their
// registers, by a panel of TOKENS rows of x in shared memory.
//
// A block takes pieces: WARPGROUPS * 64 rows of W and one panel. One more warp asks the copy engine for stages of 64
// columns. Between one stage's products the next stage's codes become floats. Signals tell which stage has come and which
// is done with, so that warpgroups need not march in step, and the next piece's stages come while sums are written.
// In a cluster CLUSTER times SHARERS blocks: SHARERS neighbours take the same panel and other rows of W, and each asks for
// its part of the panel on behalf of all, since what a multiprocessor can have from the L2 cache is less than its products
// would take. CLUSTER parts split K; such a cluster takes one piece, and its sums meet in shared memory, in a fixed order.
//
// Macros: TOKENS (16, 32, 64, 128, 256), WARPGROUPS, STAGES (at least 3), BLOCKS (for each multiprocessor), GROUP,
// SCALE_KIND, CLUSTER, SHARERS, OUT_BF16.
#include "copy_engine.cuh"
#include "int4_scaled.cuh"
#include "warpgroup.cuh"

#if CLUSTER * SHARERS > 1
#define SHAPE __cluster_dims__(1, CLUSTER * SHARERS, 1)
#else
#define SHAPE
#endif

constexpr int WARPS = WARPGROUPS * 4, THREADS = WARPS * 32 + 128, BLOCK_ROWS = WARPGROUPS * 64;
constexpr int PANEL_BYTES = TOKENS * 128, SHARE_TOKENS = TOKENS / SHARERS;
constexpr int CHUNK_GROUPS = GROUP < CHUNK ? CHUNK / GROUP : 1, GROUP_CHUNKS = GROUP > CHUNK ? GROUP / CHUNK : 1;
constexpr int META_BYTES = CHUNK_GROUPS * GROUP_BYTES, WEIGHT_BYTES = WARPS * (CHUNK_BYTES + META_BYTES);
constexpr int STAGES_BYTES = STAGES * (PANEL_BYTES + WEIGHT_BYTES);
// Codes are read one stage before they become floats where products take longer than reading; else as they are needed:
// then it is copies that are waited for.
constexpr bool READ_EARLY = TOKENS >= 256;
// Few tokens: making weights takes longer than multiplying them. Then products are of `code - zero`, exact, and a group's
// sums are scaled at its end, which is less work the fewer tokens there are.
constexpr bool EXACT = TOKENS <= 64 && GROUP >= CHUNK;
// Sets of a stage's fragments. Of 64 tokens by four warpgroups there are registers for one: the others fill the time.
constexpr int SETS = EXACT && TOKENS == 64 && WARPGROUPS == 4 ? 1 : 2;
// Sums of ROUND tokens at a time become lines of rows of W: of a warpgroup's in memory of their own, or, where K is
// split, of the block's all at once in place of the stages. No two lanes of a store share a bank.
constexpr bool SPLIT = CLUSTER > 1;
constexpr int ROUND = SPLIT || TOKENS < 32 ? TOKENS : 32, LINE = (SPLIT ? BLOCK_ROWS : 64) + 4;
constexpr int SUMS_BYTES = ROUND * LINE * 4, SUMS_AT = SPLIT ? 0 : STAGES_BYTES;
constexpr int SIGNALS_AT = !SPLIT ? STAGES_BYTES + WARPGROUPS * SUMS_BYTES : STAGES_BYTES > SUMS_BYTES ? STAGES_BYTES : SUMS_BYTES;

#include "int4_wide_result.cuh"

// Registers of a thread at the start, of one that multiplies and of one that does not. What a block starts with is all it
// has: asking for more would wait for ever.
constexpr int EVEN = 65536 / BLOCKS / THREADS / 8 * 8, REGISTERS = EVEN < 240 ? EVEN : 240, FEW_REGISTERS = 32;
constexpr int SHARED_OUT = (REGISTERS * (WARPGROUPS + 1) - FEW_REGISTERS) / WARPGROUPS / 8 * 8;
constexpr int MANY_REGISTERS = SHARED_OUT < 240 ? SHARED_OUT : 240;
static_assert(MANY_REGISTERS >= REGISTERS);

// Where a warp is in the ring of stages.
struct Place {
  int slot, parity;

  DEVICE_IN_CLASS void go_on() {
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    parity ^= slot == 0;
  }
  DEVICE_IN_CLASS int before() const { return (slot ? slot : STAGES) - 1; }
};

// What the block multiplies, and where it is kept.
struct Work {
  u8* shared;
  u64 *come, *done;  // a signal for each slot
  int first, count;  // chunks of a piece
  int panels, pieces;
  int member, members;  // this block among those that share its panels, and the first of them in the cluster

  DEVICE_IN_CLASS u8* panel(int slot) const { return shared + slot * PANEL_BYTES; }
  DEVICE_IN_CLASS u8* codes(int slot, int warp) const {
    return shared + STAGES * PANEL_BYTES + slot * WEIGHT_BYTES + warp * CHUNK_BYTES;
  }
  DEVICE_IN_CLASS u8* metas(int slot, int warp) const { return codes(slot, WARPS) + warp * META_BYTES; }
  // A piece's first row of x, and its place among the blocks' rows of W.
  DEVICE_IN_CLASS int row(int piece) const { return piece % panels * TOKENS; }
  DEVICE_IN_CLASS int across(int piece) const { return piece / panels * SHARERS + member; }
  // A warp is done with the slot, which all that share are told: they fill a part of it.
  DEVICE_IN_CLASS void finish(int slot) const {
    if (SHARERS == 1 && lane_id() == 0) signal_arrive(done + slot);
    if (SHARERS > 1 && lane_id() < SHARERS) signal_arrive_at(done + slot, members + lane_id());
  }
};

// Asks for stages; one lane does.
struct Fetcher {
  const Work& w;
  const tile_map &x, &codes, &metas;

  DEVICE_IN_CLASS void weights(int slot, int across, int chunk) const {
    const bool fresh = chunk % GROUP_CHUNKS == 0;
    signal_arrive_expecting(w.come + slot, PANEL_BYTES + WARPS * CHUNK_BYTES + (fresh ? WARPS * META_BYTES : 0));
    copy_box(w.codes(slot, 0), codes, across * WARPS, chunk, 0, w.come + slot);
    if (fresh) copy_box(w.metas(slot, 0), metas, across * WARPS, chunk * CHUNK / GROUP, 0, w.come + slot);
  }
  DEVICE_IN_CLASS void panel(int slot, int row, int chunk) const {
    if (SHARERS == 1) copy_tile(w.panel(slot), x, row, chunk * CHUNK, w.come + slot);
    if (SHARERS > 1)
      copy_tile_to(w.panel(slot) + w.member * (SHARE_TOKENS * 128), x, row + w.member * SHARE_TOKENS, chunk * CHUNK,
                   w.come + slot, ((1 << SHARERS) - 1) << w.members);
  }
  // Weights depend on no earlier kernel: the first ones do not wait.
  DEVICE_IN_CLASS void all() const {
    const int early = w.count < STAGES ? w.count : STAGES, first_across = w.across(blockIdx.x);
    for (int i = 0; i < early; i++) weights(i, first_across, w.first + i);
    wait_for_earlier();
    Place at = {0, 0};
    for (int piece = blockIdx.x; piece < w.pieces; piece += gridDim.x) {
      const int row = w.row(piece), across = w.across(piece);  // divisions, too slow for each stage
      for (int i = 0; i < w.count; i++) {
        if (piece != blockIdx.x || i >= early) {
          signal_wait(w.done + at.slot, at.parity ^ 1);
          weights(at.slot, across, w.first + i);
        }
        panel(at.slot, row, w.first + i);
        at.go_on();
      }
    }
  }
};

// The four fragments of a stage; factors are those of the stage before unless `fresh`.
DEVICE void dequantise(u32 (&to)[4][4], Factor (&factor)[2], const words4& codes, const RowWords (&words)[CHUNK_GROUPS],
                       bool fresh) {
  const u32 word[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int s = 0; s < 4; s++) {
    if (fresh && s * 16 % GROUP == 0) {
      const RowPair rows = row_pair(words[s * 16 / GROUP]);
      factor[0] = factor_of(rows, 0), factor[1] = factor_of(rows, 1);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) to[s][j] = scaled(word[s] >> (4 * j), factor[j % 2]);
  }
}

// The same, unscaled.
DEVICE void subtract(u32 (&to)[4][4], const words4& codes, const u32 (&zero)[2]) {
  const u32 word[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int s = 0; s < 4; s++)
#pragma unroll
    for (int j = 0; j < 4; j++) to[s][j] = bf16_sub(widen(word[s] >> (4 * j)), zero[j % 2]);
}

// The stages of all pieces in turn: while one is multiplied, the next one's fragments are made.
struct Multiplier {
  const Work& w;
  int warp;
  int left;  // stages to be read
  u64 panels;
  words4 codes;
  RowWords words[CHUNK_GROUPS];
  Factor factor[2];
  u32 zero[2];                 // of the stage that was read last
  float scale[2], coming[2];   // of the group that is multiplied, and of that stage's
  float part[TOKENS / 2];      // of the group's sums
  Place at, next;  // the stage that is multiplied, and the next to be read
  u32 a[SETS][4][4];

  // A stage's codes, and the words of the lane's two rows, which those of the stage before are unless `fresh`. Behind the
  // last stage what lies in the slot is read again.
  DEVICE_IN_CLASS void read(bool fresh) {
    signal_wait(w.come + next.slot, left > 0 ? next.parity : next.parity ^ 1);
    codes = *(const words4*)(w.codes(next.slot, warp) + lane_id() * 16);
    if (fresh)
#pragma unroll
      for (int i = 0; i < CHUNK_GROUPS; i++)
        words[i] = row_words(w.metas(next.slot, warp) + i * GROUP_BYTES, lane_id() / 4);
    next.go_on();
    left--;
  }
  DEVICE_IN_CLASS void open() {
    panels = matrix_lines(w.shared, 0);
    at = next = {0, 0};
    read(true);
    make(a[0], true);
    if (READ_EARLY) read(GROUP_CHUNKS == 1);
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) part[i] = 0.0f;
    scale[0] = coming[0], scale[1] = coming[1];
  }
  DEVICE_IN_CLASS void make(u32 (&to)[4][4], bool fresh) {
    if (EXACT && fresh) {
      const RowPair rows = row_pair(words[0]);
#pragma unroll
      for (int half = 0; half < 2; half++) zero[half] = rows.zero[half], coming[half] = scale_of(rows.scale[half]);
    }
    if (EXACT) {
      subtract(to, codes, zero);
    } else {
      dequantise(to, factor, codes, words, fresh);
    }
  }
  // A group is over, and the next one's first fragments are there.
  DEVICE_IN_CLASS void fold(float (&sum)[TOKENS / 2]) {
    warpgroup_wait<0>();
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) sum[i] += scale[i / 2 % 2] * part[i];
    scale[0] = coming[0], scale[1] = coming[1];
  }
  // Of a group's own sums the first stage's products are the first.
  template <bool first>
  DEVICE_IN_CLASS void multiply(float (&sum)[TOKENS / 2], u32 (&from)[4][4]) {
    const u64 lines = lines_on(panels, at.slot * PANEL_BYTES);
    warpgroup_fence();
    warpgroup_mma<!(EXACT && first)>(sum, from[0], lines);
#pragma unroll
    for (int s = 1; s < 4; s++) warpgroup_mma(sum, from[s], lines_on(lines, s * 32));
    warpgroup_commit();
  }
  DEVICE_IN_CLASS void make_next(u32 (&to)[4][4], bool fresh) {
    if (!READ_EARLY) read(fresh);
    make(to, fresh);
    if (READ_EARLY) read(GROUP_CHUNKS == 1 || !fresh);
    at.go_on();
  }
  // Products of stage i, the first of a group or not, and meanwhile the next one's fragments, which begin one if `fresh`.
  template <bool first>
  DEVICE_IN_CLASS void step(float (&sum)[TOKENS / 2], int i, u32 (&from)[4][4], u32 (&to)[4][4], bool fresh) {
    multiply<first>(sum, from);
    warpgroup_wait<SETS - 1>();  // the stage is done whose fragments are written over
    if (i > 0) w.finish(at.before());
    make_next(to, fresh);
  }
  // A piece: its first fragments are there, and behind it those of the next one.
  DEVICE_IN_CLASS void piece(float (&sum)[TOKENS / 2]) {
    constexpr bool each = GROUP_CHUNKS == 1;  // stage begins a group
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) sum[i] = 0.0f;
    // Pairs, for two sets of registers; a branch between products under way would make the compiler wait for each.
    float(&products)[TOKENS / 2] = EXACT ? part : sum;
    const int odd = each ? w.count % 2 : 0;
    if (odd) {
      multiply<true>(products, a[0]);
      warpgroup_wait<0>();
      make_next(a[0], true);
      if (EXACT) fold(sum);
    }
    for (int i = odd; i < w.count; i += 2) {
      step<true>(products, i, a[0], a[SETS - 1], each);
      if (EXACT && each) fold(sum);
      step<each>(products, i + 1, a[SETS - 1], a[0], true);
      if (EXACT) fold(sum);
    }
    warpgroup_wait<0>();
    w.finish(at.before());
  }
};

extern "C" __global__ void SHAPE __launch_bounds__(THREADS, BLOCKS)
    int4_wide(IN_PARAMETERS tile_map x, IN_PARAMETERS tile_map codes, IN_PARAMETERS tile_map metas,
              const float* __restrict__ bias, const float* residual, void* out, int rows, int n, int chunks, int panels,
              int pieces, int aligned) {
  const int warp = shuffle((int)threadIdx.x / 32, 0), wholes = chunks / GROUP_CHUNKS;
  const int part = blockIdx.y / SHARERS, member = blockIdx.y % SHARERS;
  Work w;
  w.shared = dynamic_shared();
  w.come = (u64*)(w.shared + SIGNALS_AT);
  w.done = w.come + STAGES;
  w.panels = panels, w.pieces = pieces;
  w.member = member, w.members = part * SHARERS;
  w.first = wholes * part / CLUSTER * GROUP_CHUNKS;
  w.count = wholes * (part + 1) / CLUSTER * GROUP_CHUNKS - w.first;
  if (threadIdx.x == WARPS * 32) expect_boxes(x), expect_boxes(codes), expect_boxes(metas);
  if (threadIdx.x < STAGES) {
    signal_init(w.come + threadIdx.x, 1);
    signal_init(w.done + threadIdx.x, WARPS * SHARERS);
    signals_made();
  }
  let_next_start();
  if (SHARERS > 1) {
    cluster_sync();
  } else {
    block_sync();
  }

  const Result result = {bias, residual, out, rows, n, aligned != 0, member};
  float* const lines = (float*)(w.shared + SUMS_AT);
  if (warp >= WARPS) {
    registers_fewer<FEW_REGISTERS>();
    if (threadIdx.x == WARPS * 32) Fetcher{w, x, codes, metas}.all();
    warp_sync();
    wait_for_earlier();
    if (SPLIT) block_sync();
  } else {
    registers_more<MANY_REGISTERS>();
    const int mine = blockIdx.x < pieces ? (pieces - 1 - blockIdx.x) / gridDim.x + 1 : 0;
    Multiplier m = {w, warp, mine * w.count};
    wait_for_earlier();
    m.open();
    for (int piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
      float sum[TOKENS / 2];
      m.piece(sum);
      if (SPLIT) {
        block_sync();  // all are done with the stages, where sums meet now
        put_sums(sum, 0, lines, warp * TILE_ROWS);
        break;
      }
      const int group = warp / 4;
      result.write(sum, lines + group * (ROUND * LINE), group, w.row(piece), w.across(piece) * BLOCK_ROWS + group * 64);
    }
  }
  if (SHARERS > 1 && !SPLIT) cluster_sync();  // nobody leaves whom others still tell what they are done with
  if (!SPLIT) return;
  cluster_sync();
  constexpr int EIGHTS = BLOCK_ROWS / 8;
  const int token0 = w.row(blockIdx.x), row0 = w.across(blockIdx.x) * BLOCK_ROWS;
  for (int i = threadIdx.x + THREADS * part; i < TOKENS * EIGHTS; i += THREADS * CLUSTER)
    result.write_eight((const words4*)(lines + i / EIGHTS * LINE + i % EIGHTS * 8), token0 + i / EIGHTS,
                       row0 + i % EIGHTS * 8);
  cluster_sync();
}
EXPORT_CLUSTER(int4_wide, CLUSTER * SHARERS)
