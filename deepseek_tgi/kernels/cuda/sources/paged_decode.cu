// Attention of one query token a request over its pages: out[b, h] = softmax(scale q[b, h] K') V, K and V of KV head
// h / RATIO and of positions 0 .. cache_lens[b].
//
// All requests' contexts lie end to end as pieces of STEP tokens, once for each group of QUERIES heads that share a KV
// head; every block takes an equal run of pieces, whatever the lengths. A warp of the block takes TILES tiles of 16
// tokens of each piece straight from memory into registers: while it works on keys, the values are under way, and the
// next keys while it works on values. The blocks that share a request's group write their parts to `parts`; the one
// that finishes last (counted in `arrived`, which it sets back to zero) puts them together. The sum's order follows
// from lengths alone, so results are the same on every run.
// Where contexts are short and groups few, a cluster of blocks takes each group instead, and its blocks read each
// other's parts: two trips to memory less. Both ways are in one launch, for a recorded launch meets contexts of any length.
//
// FUSED: heads come as the projection made them. Each block norms and rotates its queries; the one with the end of a
// context does the same to the new key and value, stores them and reads its own copy. What it takes of other tokens it
// asks for before the projection is done: earlier steps wrote that. Block tables and lengths are older than any kernel
// of the step in every case.
//
// With CENTRE, keys were stored without R_p c, the rotation of a constant to their position; decode_turns.cuh says how
// that comes back. INT4 keys say by their mark whether it was taken off; INT4 vectors are rotated once more, so queries are
// before and results after.
//
// Scores are in powers of two. INT8: q k = scale (q codes) + zero (sum of q); the scale of a value joins its weight as
// an exponent, so that weights fit in half precision, and its zero is summed apart. The largest score is followed
// lazily: sums are scaled again only if a score exceeds it by more than SLACK.
#define X_BF16 Q_BF16
#include "heads.cuh"
#include "head_rows.cuh"

#define QUERIES (8 * NT)
constexpr int GROUPS = (RATIO + QUERIES - 1) / QUERIES;
constexpr int STEP = WARPS * TILES * 16;
constexpr int THREADS = WARPS * 32;
constexpr int PART_FLOATS = QUERIES * (DV + 2);  // sums, then the largest score and the total of each query
constexpr int PART_ROW = DV + 4;                 // of a query's sums in shared memory, off by some banks
constexpr int OUT_HELD = DV / 32;                // elements of a result that a lane has, at lane + 32 j
constexpr int QUERY_ROW = DK / 2 + 1;            // words
constexpr bool FACTORS_APART = MODE == 2 && !CENTRE;  // read where they are used: registers are short
constexpr float SLACK = 8.0f;
constexpr int V_SETS = MODE == 4 ? (RATIO <= 4 ? 1 : 2 * NT) : NT;  // columns of the product with values, by eight
constexpr float LOG2_E = 1.4426950408889634f;
#if CLUSTER > 1
#define SHAPE __cluster_dims__(1, CLUSTER, 1)
#else
#define SHAPE
#endif
#include "decode_shares.cuh"
#include "decode_turns.cuh"

// What undoing the rotation of INT4 vectors multiplies by: 2^-ceil(m / 2), and scales lack 1 / 64.
constexpr float unrotating(int width) { return width == 64 ? 0.125f : 0.0625f; }
constexpr float K_TURN = unrotating(DK);
constexpr float K_FACTOR = MODE == 4 ? 1.0f / 64 : 1.0f, V_FACTOR = MODE == 4 ? unrotating(DV) / 64 : 1.0f;

#if CENTRE
constexpr bool OWN_STARTS = QUERIES * PART_ROW < WORK_FLOATS;
#endif

// Behind the table of INT4 levels.
struct __align__(16) Shared {
  float sums[WARPS][QUERIES][PART_ROW];  // a warp's; before that a head each, to work on
  float largest[WARPS][QUERIES], total[WARPS][QUERIES];
  u32 queries[QUERIES][QUERY_ROW];  // as operands, in the order of keys' elements
  float factor[QUERIES], query_sum[QUERIES];  // what makes scores of a query's products, and what a zero counts for
  // What is needed again behind the loop, for which registers are too short.
  Segment segment;
  Shares shares;
  int stop, last;
  u32 key[K_ROW / 4 + 1], value[V_ROW / 4 + 1];  // the new ones as stored, then their scales
#if FUSED
  float turn[DK];  // the row of cosines and sines of the new token's position
#endif
#if CENTRE
  float centre[DK];
  Turns turns;
  words2 starts[OWN_STARTS ? WARPS * 2 * TILES * SLOTS : 1];  // of warps, where sums have no room for them
#endif
};
static_assert(sizeof(Shared) + (MODE == 4 ? LEVEL_TABLE_BYTES : 0) <= SHARED, "what the launch asks for");
static_assert(QUERIES * PART_ROW >= LARGEST, "room for a head");

#include "decode_sums.cuh"

// Query `query` of the group as an operand. Half precision needs it near 1, so it is scaled by a power of two: by which is
// returned.
DEVICE float lay_query(Shared& shared, int query, float (&x)[HELD], float scale) {
  const int lane = lane_id();
  float magnitude = 0.0f, sum = 0.0f, shrink = 1.0f;
  if constexpr (MODE == 4) {
#pragma unroll
    for (int j = 0; j < DK / 32; j++) x[j] *= K_TURN;
    rotate_head<DK>(x);
  }
#pragma unroll
  for (int j = 0; j < DK / 32; j++) magnitude = fmaxf(magnitude, fabsf(x[j]));
  if (AS_HALVES) shrink = power_below(warp_max(magnitude));
#pragma unroll
  for (int j = 0; j < DK / 32; j++) {
    const int d = lane + 32 * j, place = MODE == 4 ? d % (DK / 2) * 2 + d / (DK / 2) : d;
    const u16 operand = (u16)pack_weights(x[j] * shrink, 0.0f);
    if (MODE == 2) sum += half_float(operand);
    ((u16*)shared.queries[query])[place] = operand;
  }
  if (MODE == 2) sum = warp_sum(sum);
  const float factor = 1.0f / shrink * (scale * LOG2_E * K_FACTOR);
  if (lane == 0) shared.factor[query] = factor, shared.query_sum[query] = sum * factor;
  return shrink;
}

#if FUSED
// One row to a page, from shared memory.
template <int row_words, int params>
DEVICE void store_row(u8* rows, u8* scales, const u32* from) {
  for (int i = lane_id(); i < row_words; i += 32) ((u32*)rows)[i] = from[i];
  if (lane_id() == 0) {
    if (params == 4) *(u32*)scales = from[row_words];
    if (params == 2) *(u16*)scales = (u16)from[row_words];
  }
}
#endif

// Heads are not declared constant (`__restrict__`): a compiler might read them before the wait.
extern "C" __global__ void SHAPE __launch_bounds__(THREADS, BLOCKS)
    paged_decode(const void* q, i64 q_stride, u8* k, u8* v, u8* k_params, u8* v_params, i64 page_bytes,
                 const int* __restrict__ tables, int columns, const int* __restrict__ cache_lens, int batch, int kv_heads,
                 float scale, void* __restrict__ out, float* parts, int* arrived, int least_pieces, int more_pieces,
                 const float* __restrict__ centre, const u8* __restrict__ turn_starts, const u8* __restrict__ turn_heads,
                 int turn_steps, const float* __restrict__ cos_sin, int rotary, const void* new_k,
                 i64 k_stride, const void* new_v, i64 v_stride, const float* __restrict__ q_norm,
                 const float* __restrict__ k_norm, float eps, const int* __restrict__ positions,
                 const i64* __restrict__ slots, float k_scale, float v_scale) {
  Shared& shared = *(Shared*)(dynamic_shared() + (MODE == 4 ? LEVEL_TABLE_BYTES : 0));
  const int lane = lane_id(), warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int groups = kv_heads * GROUPS;
#if MODE == 4
  fill_levels(dynamic_shared());
#endif
  const int flat = blockIdx.x * CLUSTER + blockIdx.y, blocks = gridDim.x * CLUSTER;
  const Contexts contexts = all_contexts(cache_lens, batch);
  const int total = contexts.total * groups;
  const bool together = CLUSTER > 1 && batch * groups <= (int)gridDim.x &&
                        (contexts.longest + CLUSTER - 1) / CLUSTER <= (total + blocks - 1) / blocks + more_pieces;
  const int workers = together ? batch * groups * CLUSTER : smaller(blocks, (total + least_pieces - 1) / least_pieces);
  if (flat >= workers) return;
  Shares shares{together ? 0 : total / workers, together ? 0 : total % workers};
  if (threadIdx.x == 0) shared.shares = shares, shared.stop = together ? 1 : start_of(shares, flat + 1);
  block_sync();

  for (int at = together ? 0 : start_of(shares, flat); at < shared.stop;) {
    Segment segment;
    if (CLUSTER > 1 && !shares.base) {
      const int request = blockIdx.x / groups, pieces = pieces_of(cache_lens, request);
      segment = {request, (int)blockIdx.x % groups, pieces * (int)blockIdx.y / CLUSTER,
                 pieces * ((int)blockIdx.y + 1) / CLUSTER, pieces, 0};
    } else {
      segment = find_segment(cache_lens, batch, groups, at, shared.stop);
    }
    if (threadIdx.x == 0) shared.segment = segment;
    const int length = cache_lens[segment.request] + 1;
    const int kv_head = segment.group / GROUPS, first_query = segment.group % GROUPS * QUERIES;
    const int queries = smaller(QUERIES, RATIO - first_query), first_head = kv_head * RATIO + first_query;
    const int* table = tables + (i64)segment.request * columns;

    // Pages of the warp's tiles, 32 of them a lane each; the next 32 are asked for in good time.
    const int offset = warp * TILES * 16;
    auto page_of = [&](int n) {
      int token = (segment.begin + n / TILES) * STEP + offset + n % TILES * 16;
      return token < length && segment.begin + n / TILES < segment.end ? table[token / BLOCK] : 0;
    };
    int pages = page_of(lane), pages_ahead = page_of(32 + lane);

    KeyTile keys[TILES];
    ValueTile values[TILES];
    // Offsets in a page stay 32-bit and the parts' addresses in the kernel's parameters: registers are short here.
    const int first_place = kv_head * BLOCK;
    int next_page[TILES];
    auto turn_to = [&](int n) {  // the pages of iteration n
      if (n && n * TILES % 32 == 0) pages = pages_ahead, pages_ahead = page_of(n * TILES + 32 + lane);
#pragma unroll
      for (int j = 0; j < TILES; j++) next_page[j] = shuffle(pages, n * TILES + j & 31);
    };
    auto fetch_keys = [&](int token) {
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        const int place = first_place + (BLOCK == 16 ? 0 : (token + 16 * j) % BLOCK);
        load_keys(keys[j], k, k_params, next_page[j] * page_bytes, place);
      }
    };
    auto fetch_values = [&](int token) {
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        const int place = first_place + (BLOCK == 16 ? 0 : (token + 16 * j) % BLOCK);
        load_values(values[j], v, v_params, next_page[j] * page_bytes, place);
      }
    };
    // A warp leaves when its own tiles end: the last piece may hold fewer.
    int iterations = segment.end - segment.begin;
    if (iterations && (segment.end - 1) * STEP + offset >= length) iterations--;
    int token = segment.begin * STEP + offset;
#if CENTRE
    const TurnHead head = turn_head(shared.turns, turn_heads, kv_head, turn_steps);
    words2* const turned =
        OWN_STARTS ? shared.starts + warp * (2 * TILES * SLOTS) : (words2*)(shared.sums[warp][0] + LARGEST);
    bring_table(shared.turns, head);
    bring_starts<false>(turned, head, turn_starts, token, length, rotary / 2);
#endif
    // The new token's row comes with the others as it was; what is stored there replaces it.
    if (!FUSED) wait_for_earlier();
    if (iterations > 0) {
      turn_to(0);
      fetch_keys(token);
      fetch_values(token);
    }
    const i64 slot = FUSED && segment.end == segment.pieces ? slots[segment.request] : -1;
    const bool fresh = FUSED && slot >= 0;
#if FUSED
    const float* row_of_turns = cos_sin + (i64)positions[segment.request] * rotary;
    for (int i = threadIdx.x; i < rotary; i += THREADS) shared.turn[i] = row_of_turns[i];
#endif
#if CENTRE
    for (int i = threadIdx.x; i < DK; i += THREADS) shared.centre[i] = centre[kv_head * DK + i];
    const float grow = head.grow() / K_FACTOR;
    if (FUSED) copy_wait<0>(), turn_centre<false>(turned, head);
#endif
    // Queries that are not, of a group that is not full: what is computed with them is not used, and no NaN.
    for (int query = queries + warp; query < QUERIES; query += WARPS) {
      for (int i = lane; i < DK / 2; i += 32) shared.queries[query][i] = 0;
      if (lane == 0) shared.factor[query] = shared.query_sum[query] = 0.0f;
#if CENTRE
      lay_no_pairs(shared.turns, query, turn_steps);
#endif
    }
    if (FUSED) wait_for_earlier();
    if (FUSED || CENTRE) block_sync();

    // A warp works on one head at a time.
    float x[HELD] = {}, *own = shared.sums[warp][0];
#if FUSED
    if (fresh && warp < 2) {
      const bool is_value = warp == 0;  // the shorter one: this warp may have a query as well
      u32* row = is_value ? shared.value : shared.key;
      const i64 page = slot / BLOCK * page_bytes;
      const int place = kv_head * BLOCK + (int)(slot % BLOCK);
      const bool stores = segment.group % GROUPS == 0;
      if (is_value) {
        read_head(x, new_v, segment.request * v_stride + (i64)kv_head * DV, DV);
        store_vector(x, DV, (u8*)row, (u8*)(row + V_ROW / 4), v_scale);
        warp_sync();
        if (stores) store_row<V_ROW / 4, PARAMS>(v + page + place * V_ROW, v_params + page + place * PARAM_BYTES, row);
      } else {
        read_head(x, new_k, segment.request * k_stride + (i64)kv_head * DK, DK);
        norm_and_turn(x, DK, k_norm, eps, true, shared.turn, rotary, own);
#if CENTRE
        take_off(x, shared.centre, shared.turn, rotary);
#endif
        store_vector(x, DK, (u8*)row, (u8*)(row + K_ROW / 4), k_scale);
        warp_sync();
        if (stores) store_row<K_ROW / 4, PARAMS>(k + page + place * K_ROW, k_params + page + place * PARAM_BYTES, row);
      }
    }
#endif
#pragma unroll 1
    for (int query = (warp + (fresh ? WARPS - 2 : 0)) % WARPS; query < queries; query += WARPS) {
      read_head(x, q, segment.request * q_stride + (i64)(first_head + query) * DK, DK);
#if FUSED
      norm_and_turn(x, DK, q_norm, eps, true, shared.turn, rotary, own);
#endif
#if CENTRE
#pragma unroll
      for (int j = 0; j < DK / 32; j++) own[lane + 32 * j] = x[j];
      warp_sync();
      const float shrink = lay_query(shared, query, x, scale);
      lay_pairs<FUSED>(shared.turns, query, own, shrink, shared.centre, head, rotary / 2);
      warp_sync();
#else
      lay_query(shared, query, x, scale);
#endif
    }
#if CENTRE
    if (!FUSED) copy_wait<0>(), turn_centre<false>(turned, head);
#endif
    block_sync();
    u32 operand[NT][K_STEPS][2];
    const volatile float *factors = shared.factor, *query_sums = shared.query_sum;
    float factor[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int step = 0; step < K_STEPS; step++) {
        const int place = step * 4 / QUERY_RUN * 4 * QUERY_RUN + t * QUERY_RUN + step * 4 % QUERY_RUN;
        operand[n][step][0] = shared.queries[8 * n + g][place / 2];
        operand[n][step][1] = shared.queries[8 * n + g][place / 2 + 1];
      }
#pragma unroll
      for (int i = 0; i < 2; i++) factor[n][i] = FACTORS_APART ? 0.0f : factors[8 * n + 2 * t + i];
    }

    Running now;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int i = 0; i < 2; i++)
        now.largest[n][i] = now.top[n][i] = -infinity(), now.total[n][i] = now.aside[n][i] = 0.0f;
    }
#pragma unroll
    for (int m = 0; m < V_TILES; m++)
#pragma unroll
      for (int n = 0; n < V_SETS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) now.sums[m][n][i] = 0.0f;
    for (int n = 0; n < iterations; n++, token += STEP) {
      const bool more = n + 1 < iterations;
      if (more) turn_to(n + 1);
#if CENTRE
      words2* const now_turned = turned + n % 2 * (TILES * SLOTS);
      if (n) copy_wait<0>(), turn_centre<true>(now_turned, head);
      warp_sync();
      if (more) {
        words2* const next = turned + (n + 1) % 2 * (TILES * SLOTS);
        bring_starts<true>(next, head, turn_starts, token + STEP, length, rotary / 2);
      }
#endif
      float s[TILES][NT][4], bits[TILES][2], zeros[TILES][2], lift[2];
#pragma unroll
      for (int j = 0; j < TILES; j++) {
#if CENTRE
        float off[NT][4];  // first: keys may still be under way
        turned_scores(off, shared.turns, now_turned + j * SLOTS, turn_steps);
#endif
        if (fresh) take_key(keys[j], shared.key, length - 1 - token - 16 * j);
#pragma unroll
        for (int m = 0; m < NT; m++) s[j][m][0] = s[j][m][1] = s[j][m][2] = s[j][m][3] = 0.0f;
#if CENTRE
        bool marked[2] = {true, true};
        if (MODE == 4) {
#pragma unroll
          for (int half = 0; half < 2; half++) marked[half] = shuffle(keys[j].params[half], lane & ~3) & 1;
        }
#endif
#if MODE == 4
        settle(keys[j], lift);
#endif
#pragma unroll
        for (int step = 0; step < K_STEPS; step++) {
          u32 a[4];
          key_operand(a, keys[j], step);
#pragma unroll
          for (int m = 0; m < NT; m++) mma_pages(s[j][m], a, operand[m][step]);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float key_scale = SCALED ? half_low(keys[j].params[half]) : MODE == 4 ? lift[half] : 1.0f;
          float key_zero = MODE == 2 ? half_high(keys[j].params[half]) + 128.0f * key_scale : 0.0f;
#pragma unroll
          for (int m = 0; m < NT; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
              float& score = s[j][m][2 * half + i];
              score *= key_scale * (FACTORS_APART ? factors[8 * m + 2 * t + i] : factor[m][i]);
              if (MODE == 2) score += query_sums[8 * m + 2 * t + i] * key_zero;
#if CENTRE
              if (marked[half]) score += off[m][2 * half + i] * (factor[m][i] * grow);
#endif
            }
        }
      }
      if (more) fetch_keys(token + STEP);
      const bool cut = token + 16 * TILES > length;
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        if (fresh) take_value(values[j], shared.value, length - 1 - token - 16 * j);
        if (cut) cut_values(values[j], length - token - 16 * j);
#if MODE == 4
        settle(values[j], lift);
#endif
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const bool hidden = cut && token + 16 * j + g + 8 * half >= length;
          float value_scale = SCALED ? half_low(values[j].params[half]) : 1.0f;
          bits[j][half] = MODE == 4 ? lift[half] : hidden ? 0.0f : log2_near(value_scale);
          zeros[j][half] = hidden || MODE != 2 ? 0.0f : half_high(values[j].params[half]) + 128.0f * value_scale;
          if (hidden) {
#pragma unroll
            for (int m = 0; m < NT; m++) s[j][m][2 * half] = s[j][m][2 * half + 1] = -infinity();
          }
        }
      }
      bool exceeds = false;
#pragma unroll
      for (int j = 0; j < TILES; j++)
#pragma unroll
        for (int m = 0; m < NT; m++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            exceeds |= s[j][m][i] > now.largest[m][i % 2] + SLACK;
            if (SCALED) exceeds |= s[j][m][i] + bits[j][i / 2] > now.top[m][i % 2] + SLACK;
          }
      if (warp_ballot(exceeds)) raise(now, s, bits);
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        u32 weights[NT][2];
#pragma unroll
        for (int m = 0; m < NT; m++) {
          float w[4];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            float plain = exp2_near(s[j][m][i] - guarded(now.largest[m][i % 2]));
            now.total[m][i % 2] += plain;
            if (MODE == 2) now.aside[m][i % 2] += plain * zeros[j][i / 2];
            w[i] = MODE == 4 ? plain * bits[j][i / 2] : SCALED ? exp2_near(s[j][m][i] + bits[j][i / 2] - guarded(now.top[m][i % 2])) : plain;
          }
          weights[m][0] = turn_tile(pack_weights(w[0], w[1]));
          weights[m][1] = turn_tile(pack_weights(w[2], w[3]));
        }
#if MODE == 4
        // A query's weights go to two columns: alone with the lower elements, and alone with the upper ones.
        u32 spread[V_SETS][2][2];
#pragma unroll
        for (int n = 0; n < V_SETS; n++)
#pragma unroll
          for (int behind = 0; behind < 2; behind++) {
            const u32 pair = shuffle(weights[n / 2][behind], (n % 2 * 4 + g / 2) * 4 + t);
            spread[n][behind][0] = permute_bytes(pair, 0, g % 2 ? 0x1044 : 0x4410);
            spread[n][behind][1] = permute_bytes(pair, 0, g % 2 ? 0x3244 : 0x4432);
          }
#pragma unroll
        for (int tile = 0; tile < V_TILES; tile++)
#pragma unroll
          for (int behind = 0; behind < 2; behind++) {
            u32 a[4];
            value_operand(a, values[j], tile, behind);
#pragma unroll
            for (int n = 0; n < V_SETS; n++) mma_half(now.sums[tile][n], a, spread[n][behind]);
          }
#else
#pragma unroll
        for (int tile = 0; tile < V_TILES; tile++) {
          u32 a[4];
          value_operand(a, values[j], tile);
#pragma unroll
          for (int m = 0; m < NT; m++) mma_pages(now.sums[tile][m], a, weights[m]);
        }
#endif
      }
      if (more) fetch_values(token + STEP);
    }

    // The warps' parts become the block's.
#pragma unroll
    for (int m = 0; m < NT; m++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int query = 8 * m + 2 * t + i;
        float sum = column_sum(now.total[m][i]), aside = MODE == 2 ? column_sum(now.aside[m][i]) : 0.0f;
        float size = SCALED ? exp2_near(now.top[m][i] - guarded(now.largest[m][i])) : 1.0f;
        if (g == 0) shared.largest[warp][query] = now.largest[m][i], shared.total[warp][query] = sum;
#if MODE != 4
#pragma unroll
        for (int tile = 0; tile < V_TILES; tile++)
#pragma unroll
          for (int half = 0; half < 2; half++)
            shared.sums[warp][query][value_element(tile, half)] = now.sums[tile][m][i + 2 * half] * size + aside;
#endif
      }
#if MODE == 4
#pragma unroll
    for (int n = 0; n < V_SETS; n++)
#pragma unroll
      for (int tile = 0; tile < V_TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          shared.sums[warp][4 * n + t][value_byte(tile, i / 2) + i % 2 * (DV / 2)] = now.sums[tile][n][i];
#endif
    block_sync();
    segment = shared.segment, shares = shared.shares;
    at = shares.base ? segment.first + segment.end : 1;
    finish(shared, segment, shares, kv_heads, out, parts, arrived);
    block_sync();
  }
  // Not sooner: kernels that come early pile up on the multiprocessors with most room, and wait for the fullest there.
  let_next_start();
}
EXPORT_CLUSTER(paged_decode, CLUSTER)
