// Attention of one query token a request over its pages: out[b, h] = softmax(scale q[b, h] K') V, K and V of KV head
// h / RATIO and of positions 0 .. cache_lens[b].
//
// All requests' contexts lie end to end as pieces of STEP tokens, once for each group of QUERIES heads that share a KV
// head; every block takes an equal run of pieces, whatever the lengths. A warp of the block takes TILES tiles of 16
// tokens of each piece straight from memory into registers: while it works on keys, the values are under way, and the
// next keys while it works on values. The blocks that share a request's group write their parts to `parts`; the one
// that finishes last (counted in `arrived`, which it sets back to zero) puts them together. The sum's order follows
// from lengths alone, so results are the same on every run.
//
// With CENTRE, keys were stored without R_p c, the rotation of a constant to their position. What that adds to a score is
// a sum over pairs of elements of cos and sin times what query and constant come to: more columns of the product, whose
// keys are a table of cosines and sines in two halves each, high and low. INT4 keys say by their mark whether they did;
// INT4 vectors are rotated once more, so queries are before and results after.
//
// Scores are in powers of two. INT8: q k = scale (q codes) + zero (sum of q); the scale of a value joins its weight as
// an exponent, so that weights fit in half precision, and its zero is summed apart. The largest score is followed
// lazily: sums are scaled again only if a score exceeds it by more than SLACK.
#include "heads.cuh"

#define QUERIES (8 * NT)
constexpr int GROUPS = (RATIO + QUERIES - 1) / QUERIES;
constexpr int STEP = WARPS * TILES * 16;
constexpr int THREADS = WARPS * 32;
constexpr int PART_FLOATS = QUERIES * (DV + 2);  // sums, then the largest score and the total of each query
constexpr int PART_ROW = DV + 4;                 // of a query's sums in shared memory, off by some banks
constexpr float SLACK = 8.0f;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr int WIDEST = (DK > DV ? DK : DV) + 4;
constexpr int MAX_TURNS = DK / 8 + 1;  // steps of four pairs; one pair stands for all that does not turn

DEVICE int smaller(int a, int b) { return a < b ? a : b; }

DEVICE void store_out(void* out, i64 at, float x) {
  if (OUT_BF16) {
    ((u16*)out)[at] = float_bf16(x);
  } else {
    ((float*)out)[at] = x;
  }
}

// A run of pieces [begin, end) of the contexts of request `request`, for heads of `group` (KV head, then part of it).
struct Segment {
  int request, group, begin, end, pieces, first;  // `first` is the flat number of the group's piece 0
};

// Equal shares of `total` pieces.
struct Shares {
  int base, extra;
};
DEVICE int start_of(const Shares& shares, int block) { return block * shares.base + smaller(block, shares.extra); }
DEVICE int owner_of(const Shares& shares, int piece) {
  int longer = shares.extra * (shares.base + 1);
  return piece < longer ? piece / (shares.base + 1) : shares.extra + (piece - longer) / shares.base;
}

DEVICE int pieces_of(const int* cache_lens, int request) { return cache_lens[request] / STEP + 1; }

// The segment that flat piece `at` lies in; `total` becomes the number of all pieces of one group.
DEVICE int total_pieces(const int* cache_lens, int batch) {
  int sum = 0;
  for (int b = lane_id(); b < batch; b += 32) sum += pieces_of(cache_lens, b);
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) sum += shuffle_xor(sum, mask);
  return sum;
}
DEVICE Segment find_segment(const int* cache_lens, int batch, int groups, int at, int end) {
  int before = 0;
  for (int from = 0; from < batch; from += 32) {
    int b = from + lane_id();
    int own = b < batch ? pieces_of(cache_lens, b) : 0, upto = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int other = shuffle(upto, lane_id() - step & 31);
      if (lane_id() >= step) upto += other;
    }
    u32 behind = warp_ballot((before + upto) * groups > at);
    if (behind) {
      int lane = first_bit(behind);
      int pieces = shuffle(own, lane), first = (before + shuffle(upto, lane) - pieces) * groups;
      int group = (at - first) / pieces, begin = (at - first) % pieces;
      return {from + lane, group, begin, smaller(pieces, begin + end - at), pieces, first + group * pieces};
    }
    before += shuffle(upto, 31);
  }
  return {batch, 0, 0, 0, 1, at};
}

// `rows [QUERIES][width]` times the Hadamard matrix, by the whole block.
template <int width>
DEVICE void rotate_rows(float (*rows)[WIDEST]) {
#pragma unroll 1
  for (int half = width / 2; half; half /= 2) {
    block_sync();
    for (int i = threadIdx.x; i < QUERIES * width / 2; i += THREADS) {
      float* pair = rows[i / (width / 2)] + i % (width / 2) / half * 2 * half + i % half;
      const float a = pair[0], b = pair[half];
      pair[0] = a + b, pair[half] = a - b;
    }
  }
  block_sync();
}
// What undoing the rotation of INT4 vectors multiplies by: 2^-ceil(m / 2), and scales lack 1 / 64.
constexpr float unrotating(int width) { return width == 64 ? 0.125f : 0.0625f; }
constexpr float K_TURN = unrotating(DK);
constexpr float K_FACTOR = MODE == 4 ? 1.0f / 64 : 1.0f, V_FACTOR = MODE == 4 ? unrotating(DV) / 64 : 1.0f;

DEVICE float power_below(float magnitude) {  // 2^-e for a magnitude of 2^e or a little more
  u32 exponent = float_bits(magnitude) >> 23;
  exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
  return bits_float((254 - exponent) << 23);
}
DEVICE float query_at(const void* q, i64 at) { return Q_BF16 ? bf16_float(((const u16*)q)[at]) : ((const float*)q)[at]; }

// The columns that stand for the centre, for one query: of each pair of elements what goes with cos and sin, in halves.
struct Turns {
  u32 high[MAX_TURNS][32], low[MAX_TURNS][32];  // as the matrix instruction wants them
  float grow[8];
  int pairs[4 * MAX_TURNS];
};
DEVICE void turned_query(float (&c)[2], const void* q, i64 row, const float* centre, int pair, int rotary) {
  const int half = rotary / 2;
  c[0] = c[1] = 0.0f;
  if (pair < 0) return;
  if (pair == half) {
    for (int d = rotary; d < DK; d++) c[0] += query_at(q, row + d) * centre[d];
    return;
  }
  const float a = query_at(q, row + pair), b = query_at(q, row + half + pair);
  c[0] = a * centre[pair] + b * centre[half + pair];
  c[1] = b * centre[pair] - a * centre[half + pair];
}
DEVICE void turn_query(Turns& turns, int query, const void* q, i64 row, const float* centre, const int* pairs, int steps,
                       int rotary) {
  float magnitude = 0.0f, c[2];
  for (int i = lane_id(); i < 4 * steps; i += 32) {
    turned_query(c, q, row, centre, pairs[i], rotary);
    magnitude = fmaxf(magnitude, fmaxf(fabsf(c[0]), fabsf(c[1])));
  }
  const float shrink = power_below(warp_max(magnitude));
  for (int i = lane_id(); i < 4 * steps; i += 32) {
    turned_query(c, q, row, centre, pairs[i], rotary);
    const float x = c[0] * shrink, y = c[1] * shrink;
    const u32 high = half_pair(x, y);
    turns.high[i / 4][4 * query + i % 4] = high;
    turns.low[i / 4][4 * query + i % 4] = half_pair(x - half_low(high), y - half_high(high));
    if (query == 0) turns.pairs[i] = pairs[i] < 0 ? 0 : pairs[i];
  }
  if (lane_id() == 0) turns.grow[query] = 1.0f / shrink;
}

struct Running {
  float sums[V_TILES][NT][4];                              // element, query as the matrix instruction has them
  float largest[NT][2], total[NT][2], aside[NT][2], top[NT][2];  // of queries 2t and 2t + 1
};

DEVICE float guarded(float x) { return x == -infinity() ? 0.0f : x; }
DEVICE float column_max(float x) {
  x = fmaxf(x, shuffle_xor(x, 4));
  x = fmaxf(x, shuffle_xor(x, 8));
  return fmaxf(x, shuffle_xor(x, 16));
}
DEVICE float column_sum(float x) {
  x += shuffle_xor(x, 4);
  x += shuffle_xor(x, 8);
  return x + shuffle_xor(x, 16);
}

// Raises what scores and weighted scores are measured against to those of these tiles; once in a while.
DEVICE void raise(Running& now, const float (&s)[TILES][NT][4], const float (&bits)[TILES][2]) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float largest = now.largest[n][i], top = now.top[n][i];
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        largest = fmaxf(largest, fmaxf(s[j][n][i], s[j][n][i + 2]));
        if (SCALED) top = fmaxf(top, fmaxf(s[j][n][i] + bits[j][0], s[j][n][i + 2] + bits[j][1]));
      }
      largest = column_max(largest);
      float factor = exp2_near(now.largest[n][i] - guarded(largest));
      now.largest[n][i] = largest;
      now.total[n][i] *= factor;
      now.aside[n][i] *= factor;
      if (SCALED) {
        top = column_max(top);
        factor = exp2_near(now.top[n][i] - guarded(top));
        now.top[n][i] = top;
      }
#pragma unroll
      for (int m = 0; m < V_TILES; m++) now.sums[m][n][i] *= factor, now.sums[m][n][i + 2] *= factor;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    paged_decode(const void* __restrict__ q, i64 q_stride, const u8* __restrict__ k, const u8* __restrict__ v,
                 const u8* __restrict__ k_params, const u8* __restrict__ v_params, i64 page_bytes,
                 const int* __restrict__ tables, int columns, const int* __restrict__ cache_lens, int batch, int kv_heads,
                 float scale, void* __restrict__ out, float* parts, int* arrived, int least_pieces,
                 const float* __restrict__ centre, const u8* __restrict__ turn_table, const int* __restrict__ turn_pairs,
                 int turn_steps, int rotary) {
  __shared__ float shared_sums[WARPS][QUERIES][PART_ROW];
  __shared__ float shared_largest[WARPS][QUERIES], shared_total[WARPS][QUERIES];
  __shared__ int shared_last;
  // What is needed again behind the loop, for which registers are too short.
  __shared__ Segment shared_segment;
  __shared__ Shares shared_shares;
#if CENTRE
  __shared__ Turns shared_turns[NT];
#endif
#if MODE == 4
  __shared__ float shared_rows[QUERIES][WIDEST];
#endif
  const int lane = lane_id(), warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int groups = kv_heads * GROUPS;
#if MODE == 4
  fill_levels((u32*)dynamic_shared());
#endif
  wait_for_earlier();
  const int total = total_pieces(cache_lens, batch) * groups;
  const int workers = smaller(gridDim.x, (total + least_pieces - 1) / least_pieces);
  if ((int)blockIdx.x >= workers) {
    let_next_start();
    return;
  }
  Shares shares{total / workers, total % workers};
  if (threadIdx.x == 0) shared_shares = shares;

  for (int at = start_of(shares, blockIdx.x); at < start_of(shares, blockIdx.x + 1);) {
    Segment segment = find_segment(cache_lens, batch, groups, at, start_of(shares, blockIdx.x + 1));
    if (threadIdx.x == 0) shared_segment = segment;
    const int length = cache_lens[segment.request] + 1;
    const int kv_head = segment.group / GROUPS, first_query = segment.group % GROUPS * QUERIES;
    const int first_head = kv_head * RATIO + first_query;
    const int* table = tables + (i64)segment.request * columns;

    // Pages of the warp's tiles, 32 of them a lane each; the next 32 are asked for in good time.
    const int offset = warp * TILES * 16;
    auto page_of = [&](int n) {
      int token = (segment.begin + n / TILES) * STEP + offset + n % TILES * 16;
      return token < length && segment.begin + n / TILES < segment.end ? table[token / BLOCK] : 0;
    };
    int pages = page_of(lane), pages_ahead = page_of(32 + lane);

#if CENTRE
    for (int query = warp; query < QUERIES; query += WARPS) {
      const int real = smaller(query, RATIO - first_query - 1);  // what is beyond is computed and not used
      turn_query(shared_turns[query / 8], query % 8, q, segment.request * q_stride + (i64)(first_head + real) * DK,
                 centre + kv_head * DK, turn_pairs + kv_head * 4 * turn_steps, turn_steps, rotary);
    }
    block_sync();
#endif
#if MODE == 4
    for (int i = threadIdx.x; i < QUERIES * DK; i += THREADS) {
      const bool real = i / DK < smaller(QUERIES, RATIO - first_query);
      const i64 row = segment.request * q_stride + (i64)first_head * DK;
      shared_rows[i / DK][i % DK] = real ? query_at(q, row + i) * K_TURN : 0.0f;
    }
    rotate_rows<DK>(shared_rows);
#endif
    // The queries as operands. Half precision needs them near 1, so each is scaled by a power of two.
    u32 operand[NT][K_STEPS][2];
    float factor[NT][2], query_sum[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const bool real = 8 * n + g < smaller(QUERIES, RATIO - first_query);
      const i64 row = segment.request * q_stride + (i64)(first_head + 8 * n + g) * DK;
      float x[K_STEPS][4], magnitude = 0.0f, sum = 0.0f, shrink = 1.0f, grow = 1.0f;
#pragma unroll
      for (int step = 0; step < K_STEPS; step++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
#if MODE == 4
          x[step][i] = shared_rows[8 * n + g][query_element(step, i)];
#else
          x[step][i] = real ? query_at(q, row + query_element(step, i)) : 0.0f;
#endif
          magnitude = fmaxf(magnitude, fabsf(x[step][i]));
        }
      }
      if (AS_HALVES) {
        magnitude = fmaxf(magnitude, shuffle_xor(magnitude, 1));
        magnitude = fmaxf(magnitude, shuffle_xor(magnitude, 2));
        shrink = power_below(magnitude);
        grow = 1.0f / shrink;
      }
#pragma unroll
      for (int step = 0; step < K_STEPS; step++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          u32 pair = pack_weights(x[step][2 * i] * shrink, x[step][2 * i + 1] * shrink);
          operand[n][step][i] = pair;
          if (MODE == 2) sum += half_low(pair) + half_high(pair);
        }
      }
      sum += shuffle_xor(sum, 1);
      sum += shuffle_xor(sum, 2);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        factor[n][i] = shuffle(grow, 4 * (2 * t + i)) * (scale * LOG2_E * K_FACTOR);
        query_sum[n][i] = shuffle(sum, 4 * (2 * t + i)) * factor[n][i];
      }
    }

    Running now;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int i = 0; i < 2; i++)
        now.largest[n][i] = now.top[n][i] = -infinity(), now.total[n][i] = now.aside[n][i] = 0.0f;
#pragma unroll
      for (int m = 0; m < V_TILES; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) now.sums[m][n][i] = 0.0f;
    }

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
        const int place = first_place + (token + 16 * j) % BLOCK;
        load_keys(keys[j], k, k_params, next_page[j] * page_bytes, place);
      }
    };
    auto fetch_values = [&](int token) {
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        const int place = first_place + (token + 16 * j) % BLOCK;
        load_values(values[j], v, v_params, next_page[j] * page_bytes, place);
      }
    };
    // A warp leaves when its own tiles end: the last piece may hold fewer.
    int iterations = segment.end - segment.begin;
    if ((segment.end - 1) * STEP + offset >= length) iterations--;
    int token = segment.begin * STEP + offset;
    if (iterations > 0) {
      turn_to(0);
      fetch_keys(token);
      fetch_values(token);
    }
    for (int n = 0; n < iterations; n++, token += STEP) {
      const bool more = n + 1 < iterations;
      if (more) turn_to(n + 1);
      float s[TILES][NT][4], bits[TILES][2], zeros[TILES][2], lift[2];
#pragma unroll
      for (int j = 0; j < TILES; j++) {
#pragma unroll
        for (int m = 0; m < NT; m++) s[j][m][0] = s[j][m][1] = s[j][m][2] = s[j][m][3] = 0.0f;
#if CENTRE
        bool marked[2] = {true, true};
        if (MODE == 4) {
#pragma unroll
          for (int half = 0; half < 2; half++) marked[half] = shuffle(keys[j].params[half], lane & ~3) & 1;
        }
        float off[NT][4] = {};
        for (int step = 0; step < turn_steps; step++) {
          u32 a[4];
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int position = smaller(token + 16 * j + g + 8 * half, length - 1);
            const words2 turn = load_kept8(
                turn_table + ((i64)position * (rotary / 2 + 1) + shared_turns[0].pairs[4 * step + t]) * 8);
            a[half] = turn.x, a[half + 2] = turn.y;
          }
#pragma unroll
          for (int m = 0; m < NT; m++) {
            const u32 high = shared_turns[m].high[step][lane];
            const u32 both[2] = {high, high}, low[2] = {shared_turns[m].low[step][lane], 0};
            mma_half(off[m], a, both);
            mma_half(off[m], a, low);
          }
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
              score *= key_scale * factor[m][i];
              if (MODE == 2) score += query_sum[m][i] * key_zero;
#if CENTRE
              const float more = off[m][2 * half + i] * (shared_turns[m].grow[2 * t + i] * (scale * LOG2_E));
              if (marked[half]) score += more;
#endif
            }
        }
      }
      if (more) fetch_keys(token + STEP);
      const bool cut = token + 16 * TILES > length;
#pragma unroll
      for (int j = 0; j < TILES; j++) {
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
#pragma unroll
        for (int tile = 0; tile < V_TILES; tile++) {
          u32 a[4];
          value_operand(a, values[j], tile);
#pragma unroll
          for (int m = 0; m < NT; m++) mma_pages(now.sums[tile][m], a, weights[m]);
        }
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
        if (g == 0) shared_largest[warp][query] = now.largest[m][i], shared_total[warp][query] = sum;
#pragma unroll
        for (int tile = 0; tile < V_TILES; tile++)
#pragma unroll
          for (int half = 0; half < 2; half++)
            shared_sums[warp][query][value_element(tile, half)] = now.sums[tile][m][i + 2 * half] * size + aside;
      }
    block_sync();
    segment = shared_segment, shares = shared_shares;
    at = segment.first + segment.end;
    const int query_part = segment.group % GROUPS * QUERIES, queries = smaller(QUERIES, RATIO - query_part);
    const bool whole = segment.begin == 0 && segment.end == segment.pieces;
    float* part = parts + (i64)(2 * blockIdx.x + (segment.begin == 0)) * PART_FLOATS;
    const i64 out_row = (((i64)segment.request * kv_heads + segment.group / GROUPS) * RATIO + query_part) * DV;
    for (int i = threadIdx.x; i < queries * DV; i += THREADS) {
      const int query = i / DV, d = i % DV;
      float largest = -infinity(), sum = 0.0f, amount = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, shared_largest[w][query]);
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        float weight = exp2_near(shared_largest[w][query] - guarded(largest));
        sum += weight * shared_sums[w][query][d];
        amount += weight * shared_total[w][query];
      }
      if (whole) {
#if MODE == 4
        shared_rows[query][d] = sum / amount * V_FACTOR;
#else
        store_out(out, out_row + i, sum / amount);
#endif
      } else {
        part[i] = sum;
        if (d == 0) part[QUERIES * DV + query] = largest, part[QUERIES * DV + QUERIES + query] = amount;
      }
    }
    if (!whole) {
      memory_fence();
      block_sync();
      const int first = owner_of(shares, segment.first), last = owner_of(shares, segment.first + segment.pieces - 1);
      int* counter = arrived + segment.request * groups + segment.group;
      if (threadIdx.x == 0) {
        shared_last = atomic_add(counter, 1) == last - first;
        if (shared_last) *counter = 0;
      }
      block_sync();
      if (shared_last) {
        memory_fence();
        for (int i = threadIdx.x; i < queries * DV / 4; i += THREADS) {
          const int query = i * 4 / DV;
          float largest = -infinity(), amount = 0.0f, sum[4] = {};
#pragma unroll 8
          for (int w = first; w <= last; w++) {
            const float* other = parts + (i64)(2 * w + (w == first)) * PART_FLOATS;
            largest = fmaxf(largest, load_fresh_float(other + QUERIES * DV + query));
          }
#pragma unroll 8
          for (int w = first; w <= last; w++) {
            const float* other = parts + (i64)(2 * w + (w == first)) * PART_FLOATS;
            float weight = exp2_near(load_fresh_float(other + QUERIES * DV + query) - guarded(largest));
            amount += weight * load_fresh_float(other + QUERIES * DV + QUERIES + query);
            words4 x = load_fresh(other + 4 * i);
            sum[0] += weight * bits_float(x.x);
            sum[1] += weight * bits_float(x.y);
            sum[2] += weight * bits_float(x.z);
            sum[3] += weight * bits_float(x.w);
          }
#pragma unroll
          for (int j = 0; j < 4; j++) {
#if MODE == 4
            shared_rows[query][4 * i % DV + j] = sum[j] / amount * V_FACTOR;
#else
            store_out(out, out_row + 4 * i + j, sum[j] / amount);
#endif
          }
        }
      }
    }
#if MODE == 4
    if (whole || shared_last) {
      rotate_rows<DV>(shared_rows);
      for (int i = threadIdx.x; i < queries * DV; i += THREADS) store_out(out, out_row + i, shared_rows[i / DV][i % DV]);
    }
#endif
    block_sync();
  }
  let_next_start();
}
EXPORT(paged_decode)
