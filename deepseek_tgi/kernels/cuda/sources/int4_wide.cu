// out = x W^T (+ bias) (+ residual) for many rows of x (sm_90a): warpgroups multiply 64 rows of W, dequantised in their
// registers, by a panel of TOKENS rows of x in shared memory.
//
// A block takes pieces: WARPGROUPS * 64 rows of W and one panel. One more warp asks the copy engine for stages of 64
// columns. Between one stage's products the next stage's codes become floats. Signals tell which stage has come and which
// is done with, so that warpgroups need not march in step, and the next piece's stages come while sums are written.
// A cluster of CLUSTER blocks splits K; it takes one piece, and its sums meet in shared memory, in a fixed order.
//
// Macros: TOKENS (16, 32, 64, 128, 256), WARPGROUPS, STAGES (at least 3), BLOCKS (for each multiprocessor), GROUP,
// SCALE_KIND, CLUSTER, OUT_BF16.
#include "copy_engine.cuh"
#include "int4_scaled.cuh"
#include "warpgroup.cuh"

#if CLUSTER > 1
#define SHAPE __cluster_dims__(1, CLUSTER, 1)
#else
#define SHAPE
#endif

constexpr int WARPS = WARPGROUPS * 4, THREADS = WARPS * 32 + 128, BLOCK_ROWS = WARPGROUPS * 64;
constexpr int PANEL_BYTES = TOKENS * 128;
constexpr int CHUNK_GROUPS = GROUP < CHUNK ? CHUNK / GROUP : 1, GROUP_CHUNKS = GROUP > CHUNK ? GROUP / CHUNK : 1;
constexpr int META_BYTES = CHUNK_GROUPS * GROUP_BYTES, WEIGHT_BYTES = WARPS * (CHUNK_BYTES + META_BYTES);
constexpr int STAGES_BYTES = STAGES * (PANEL_BYTES + WEIGHT_BYTES);
// Codes are read one stage before they become floats where products take longer than reading; else as they are needed:
// then it is copies that are waited for.
constexpr bool READ_EARLY = TOKENS >= 256;
// Sums of ROUND tokens at a time become lines of rows of W: of a warpgroup's in memory of their own, or, where K is
// split, of the block's all at once in place of the stages. No two lanes of a store share a bank.
constexpr bool SPLIT = CLUSTER > 1;
constexpr int ROUND = SPLIT || TOKENS < 32 ? TOKENS : 32, LINE = (SPLIT ? BLOCK_ROWS : 64) + 4;
constexpr int SUMS_BYTES = ROUND * LINE * 4, SUMS_AT = SPLIT ? 0 : STAGES_BYTES;
constexpr int SIGNALS_AT = !SPLIT ? STAGES_BYTES + WARPGROUPS * SUMS_BYTES : STAGES_BYTES > SUMS_BYTES ? STAGES_BYTES : SUMS_BYTES;

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

  DEVICE_IN_CLASS u8* panel(int slot) const { return shared + slot * PANEL_BYTES; }
  DEVICE_IN_CLASS u8* codes(int slot, int warp) const {
    return shared + STAGES * PANEL_BYTES + slot * WEIGHT_BYTES + warp * CHUNK_BYTES;
  }
  DEVICE_IN_CLASS u8* metas(int slot, int warp) const { return codes(slot, WARPS) + warp * META_BYTES; }
  // A piece's first row of x, and its place among the blocks' rows of W.
  DEVICE_IN_CLASS int row(int piece) const { return piece % panels * TOKENS; }
  DEVICE_IN_CLASS int across(int piece) const { return piece / panels; }
  // A warp is done with the slot.
  DEVICE_IN_CLASS void finish(int slot) const {
    if (lane_id() == 0) signal_arrive(done + slot);
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
    copy_tile(w.panel(slot), x, row, chunk * CHUNK, w.come + slot);
  }
  // Weights depend on no earlier kernel: the first ones do not wait.
  DEVICE_IN_CLASS void all() const {
    const int early = w.count < STAGES ? w.count : STAGES, across = w.across(blockIdx.x);
    for (int i = 0; i < early; i++) weights(i, across, w.first + i);
    wait_for_earlier();
    Place at = {0, 0};
    for (int piece = blockIdx.x; piece < w.pieces; piece += gridDim.x)
      for (int i = 0; i < w.count; i++) {
        if (piece != blockIdx.x || i >= early) {
          signal_wait(w.done + at.slot, at.parity ^ 1);
          weights(at.slot, w.across(piece), w.first + i);
        }
        panel(at.slot, w.row(piece), w.first + i);
        at.go_on();
      }
  }
};

// A stage as a lane has it: its codes, and the words of its two rows, which those of the stage before are unless new.
struct Raw {
  words4 codes;
  RowPair rows[CHUNK_GROUPS];

  DEVICE_IN_CLASS void load(const Work& w, int slot, int warp, bool fresh) {
    codes = *(const words4*)(w.codes(slot, warp) + lane_id() * 16);
    if (fresh)
#pragma unroll
      for (int i = 0; i < CHUNK_GROUPS; i++) rows[i] = row_pair(w.metas(slot, warp) + i * GROUP_BYTES, lane_id() / 4);
  }
};

// The four fragments of a stage; factors are those of the stage before unless `fresh`.
DEVICE void dequantise(u32 (&to)[4][4], Factor (&factor)[2], const Raw& raw, bool fresh) {
  const u32 word[4] = {raw.codes.x, raw.codes.y, raw.codes.z, raw.codes.w};
#pragma unroll
  for (int s = 0; s < 4; s++) {
    if (fresh && s * 16 % GROUP == 0)
#pragma unroll
      for (int half = 0; half < 2; half++) factor[half] = factor_of(raw.rows[s * 16 / GROUP], half);
#pragma unroll
    for (int j = 0; j < 4; j++) to[s][j] = scaled(word[s] >> (4 * j), factor[j % 2]);
  }
}

// Sums of the tokens of round r, as the matrix instruction leaves them, into lines of rows of W from `row` on.
DEVICE void put_sums(const float (&sum)[TOKENS / 2], int r, float* lines, int row) {
  const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
  for (int i = 0; i < ROUND / 2; i++)
    lines[(i / 4 * 8 + t * 2 + i % 2) * LINE + row + g + i / 2 % 2 * 8] = sum[r * (ROUND / 2) + i];
}

// The stages of all pieces in turn: while one is multiplied, the next one's fragments are made.
struct Multiplier {
  const Work& w;
  int warp;
  int left;  // stages to be read
  u64 panels;
  Raw raw;
  Factor factor[2];
  Place at, next;  // the stage that is multiplied, and the next to be read
  u32 a[2][4][4];

  // Behind the last stage what lies in the slot is read again.
  DEVICE_IN_CLASS void read(bool fresh) {
    signal_wait(w.come + next.slot, left > 0 ? next.parity : next.parity ^ 1);
    raw.load(w, next.slot, warp, fresh);
    next.go_on();
    left--;
  }
  DEVICE_IN_CLASS void open() {
    panels = matrix_lines(w.shared, 0);
    at = next = {0, 0};
    read(true);
    dequantise(a[0], factor, raw, true);
    if (READ_EARLY) read(GROUP_CHUNKS == 1);
  }
  // Products of stage i, and meanwhile the next one's fragments, which begin a group if `fresh`.
  DEVICE_IN_CLASS void step(float (&sum)[TOKENS / 2], int i, u32 (&from)[4][4], u32 (&to)[4][4], bool fresh) {
    const u64 lines = lines_on(panels, at.slot * PANEL_BYTES);
    warpgroup_fence();
#pragma unroll
    for (int s = 0; s < 4; s++) warpgroup_mma(sum, from[s], lines_on(lines, s * 32));
    warpgroup_commit();
    warpgroup_wait<1>();  // the stage before is done, whose fragments are written over
    if (i > 0) w.finish(at.before());
    if (!READ_EARLY) read(fresh);
    dequantise(to, factor, raw, fresh);
    if (READ_EARLY) read(GROUP_CHUNKS == 1 || !fresh);
    at.go_on();
  }
  // A piece: its first fragments are there, and behind it the next piece's are.
  DEVICE_IN_CLASS void piece(float (&sum)[TOKENS / 2]) {
    constexpr bool each = GROUP_CHUNKS == 1;  // stage begins a group
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) sum[i] = 0.0f;
    // Pairs, for two sets of registers; a branch between products under way would make the compiler wait for each.
    int i = 0;
    if (each && w.count % 2) {
      step(sum, 0, a[0], a[1], true);
      warpgroup_wait<0>();
#pragma unroll
      for (int s = 0; s < 4; s++)
#pragma unroll
        for (int j = 0; j < 4; j++) a[0][s][j] = a[1][s][j];
      i = 1;
    }
    for (; i < w.count; i += 2) {
      step(sum, i, a[0], a[1], each);
      step(sum, i + 1, a[1], a[0], true);
    }
    warpgroup_wait<0>();
    w.finish(at.before());
  }
};

// Where products go, and what is added to them.
struct Result {
  const float *bias, *residual;
  void* out;
  int rows, n;
  bool aligned;  // eight neighbours of `out` are written at once

  // Eight rows of W from `row` on, neighbours in `out`, of one token; `from` holds them, where K is split in all blocks.
  DEVICE_IN_CLASS void write_eight(const words4* from, int token, int row) const {
    const int real = n - row;
    if (token >= rows || real <= 0) return;
    float v[8];
#pragma unroll
    for (int q = 0; q < CLUSTER; q++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const words4 part = SPLIT ? cluster_load(from + h, q) : from[h];
        const u32 four[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
        for (int j = 0; j < 4; j++) v[4 * h + j] = q ? v[4 * h + j] + bits_float(four[j]) : bits_float(four[j]);
      }
    const i64 to = (i64)token * n + row;
    if (bias)
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] += j < real ? bias[row + j] : 0.0f;
    if (residual && aligned) {
#pragma unroll
      for (int h = 0; h < 8; h += 4) {
        const words4 more = *(const words4*)(residual + to + h);
        v[h] += bits_float(more.x), v[h + 1] += bits_float(more.y), v[h + 2] += bits_float(more.z), v[h + 3] += bits_float(more.w);
      }
    } else if (residual) {
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] += j < real ? residual[to + j] : 0.0f;
    }
    if (OUT_BF16 && aligned) {
      *(words4*)((u16*)out + to) = {bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]), bf16_pair(v[4], v[5]), bf16_pair(v[6], v[7])};
    } else if (aligned) {
#pragma unroll
      for (int h = 0; h < 8; h += 4)
        *(words4*)((float*)out + to + h) = {float_bits(v[h]), float_bits(v[h + 1]), float_bits(v[h + 2]), float_bits(v[h + 3])};
    } else {
#pragma unroll
      for (int j = 0; j < 8; j++) {
        if (j < real && OUT_BF16) ((u16*)out)[to + j] = float_bf16(v[j]);
        if (j < real && !OUT_BF16) ((float*)out)[to + j] = v[j];
      }
    }
  }
  // A warpgroup's sums, whole.
  DEVICE_IN_CLASS void write(const float (&sum)[TOKENS / 2], float* lines, int group, int token0, int row0) const {
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int r = 0; r < TOKENS / ROUND; r++) {
      if (token0 + r * ROUND >= rows) break;
      warpgroup_sync(group);  // what was there before has been read
      put_sums(sum, r, lines, thread / 32 * TILE_ROWS);
      warpgroup_sync(group);
#pragma unroll
      for (int i = thread; i < ROUND * 8; i += 128)
        write_eight((const words4*)(lines + i / 8 * LINE + i % 8 * 8), token0 + r * ROUND + i / 8, row0 + i % 8 * 8);
    }
  }
};

extern "C" __global__ void SHAPE __launch_bounds__(THREADS, BLOCKS)
    int4_wide(IN_PARAMETERS tile_map x, IN_PARAMETERS tile_map codes, IN_PARAMETERS tile_map metas,
               const float* __restrict__ bias, const float* residual, void* out, int rows, int n, int chunks, int panels,
               int pieces, int aligned) {
  const int warp = shuffle((int)threadIdx.x / 32, 0), wholes = chunks / GROUP_CHUNKS, rank = blockIdx.y;
  Work w;
  w.shared = dynamic_shared();
  w.come = (u64*)(w.shared + SIGNALS_AT);
  w.done = w.come + STAGES;
  w.panels = panels, w.pieces = pieces;
  w.first = wholes * rank / CLUSTER * GROUP_CHUNKS;
  w.count = wholes * (rank + 1) / CLUSTER * GROUP_CHUNKS - w.first;
  if (threadIdx.x == WARPS * 32) expect_boxes(x), expect_boxes(codes), expect_boxes(metas);
  if (threadIdx.x < STAGES) {
    signal_init(w.come + threadIdx.x, 1);
    signal_init(w.done + threadIdx.x, WARPS);
    signals_made();
  }
  let_next_start();
  block_sync();

  const Result result = {bias, residual, out, rows, n, aligned != 0};
  float* const lines = (float*)(w.shared + SUMS_AT);
  if (warp >= WARPS) {
    registers_fewer<FEW_REGISTERS>();
    if (threadIdx.x == WARPS * 32) Fetcher{w, x, codes, metas}.all();
    warp_sync();
    wait_for_earlier();
    if (SPLIT) block_sync();
  } else {
    registers_more<MANY_REGISTERS>();
    wait_for_earlier();
    const int mine = blockIdx.x < pieces ? (pieces - 1 - blockIdx.x) / gridDim.x + 1 : 0;
    Multiplier m = {w, warp, mine * w.count};
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
  if (!SPLIT) return;
  cluster_sync();
  constexpr int EIGHTS = BLOCK_ROWS / 8;
  const int token0 = w.row(blockIdx.x), row0 = w.across(blockIdx.x) * BLOCK_ROWS;
  for (int i = threadIdx.x + THREADS * rank; i < TOKENS * EIGHTS; i += THREADS * CLUSTER)
    result.write_eight((const words4*)(lines + i / EIGHTS * LINE + i % EIGHTS * 8), token0 + i / EIGHTS,
                       row0 + i % EIGHTS * 8);
  cluster_sync();
}
EXPORT_CLUSTER(int4_wide, CLUSTER)
