// What a warp of paged_decode.cu adds up, and how the sums of warps and blocks become results.
#pragma once
#include "heads.cuh"

DEVICE void store_out(void* out, i64 at, float x) {
  if (OUT_BF16) {
    ((u16*)out)[at] = float_bf16(x);
  } else {
    ((float*)out)[at] = x;
  }
}

// A head times the Hadamard matrix, by one warp.
template <int width, int held>
DEVICE void rotate_head(float (&x)[held]) {
#pragma unroll
  for (int half = width / 64; half; half /= 2)
#pragma unroll
    for (int j = 0; j < width / 32; j++)
      if (!(j & half)) {
        const float a = x[j], b = x[j + half];
        x[j] = a + b, x[j + half] = a - b;
      }
#pragma unroll
  for (int half = 16; half; half /= 2)
#pragma unroll
    for (int j = 0; j < width / 32; j++) {
      const float other = shuffle_xor(x[j], half);
      x[j] = lane_id() & half ? other - x[j] : x[j] + other;
    }
}

struct Running {
  float sums[V_TILES][V_SETS][4];                          // element, query as the matrix instruction has them
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

// INT4: of a factor for each of queries 2t, 2t + 1, that of query 4 set + t, whose sums the lane has.
DEVICE float of_set(const float (&x)[NT][2], int set) {
  const int from = lane_id() & ~3 | set % 2 * 2 + lane_id() % 4 / 2;
  const float even = shuffle(x[set / 2][0], from), odd = shuffle(x[set / 2][1], from);
  return lane_id() % 2 ? odd : even;
}
// Raises what scores and weighted scores are measured against to those of these tiles; once in a while.
DEVICE void raise(Running& now, const float (&s)[TILES][NT][4], const float (&bits)[TILES][2]) {
  float of_sums[NT][2];
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
      of_sums[n][i] = factor;
    }
#pragma unroll
  for (int n = 0; n < V_SETS; n++) {
    const float even = MODE == 4 ? of_set(of_sums, n) : of_sums[n % NT][0];
    const float odd = MODE == 4 ? even : of_sums[n % NT][1];
#pragma unroll
    for (int m = 0; m < V_TILES; m++) {
      now.sums[m][n][0] *= even, now.sums[m][n][2] *= even;
      now.sums[m][n][1] *= odd, now.sums[m][n][3] *= odd;
    }
  }
}

// A result in full: `x` is the sum of weighted values and `amount` that of the weights.
DEVICE void give(void* out, i64 row, float (&x)[OUT_HELD], float amount) {
#pragma unroll
  for (int j = 0; j < OUT_HELD; j++) x[j] /= amount;
  if (MODE == 4) rotate_head<DV>(x);
#pragma unroll
  for (int j = 0; j < OUT_HELD; j++) store_out(out, row + lane_id() + 32 * j, MODE == 4 ? x[j] * V_FACTOR : x[j]);
}
// The parts of `count` places put together, in order: `score(i)`, `amount_of(i)` and `value(i, j)` read those of one.
template <class Score, class Amount, class Value>
DEVICE void join(int count, float (&x)[OUT_HELD], float& largest, float& amount, Score score, Amount amount_of,
                 Value value) {
  largest = -infinity(), amount = 0.0f;
#pragma unroll 8
  for (int i = 0; i < count; i++) largest = fmaxf(largest, score(i));
#pragma unroll
  for (int j = 0; j < OUT_HELD; j++) x[j] = 0.0f;
#pragma unroll 8
  for (int i = 0; i < count; i++) {
    const float weight = exp2_near(score(i) - guarded(largest));
    amount += weight * amount_of(i);
#pragma unroll
    for (int j = 0; j < OUT_HELD; j++) x[j] += weight * value(i, j);
  }
}

// What the block's warps found in a segment goes to `out`, alone or with what other blocks found. A warp a query.
DEVICE void finish(Shared& shared, const Segment& segment, const Shares& shares, int kv_heads, void* out, float* parts,
                   int* arrived) {
  const bool together = CLUSTER > 1 && !shares.base;
  const int lane = lane_id(), warp = threadIdx.x / 32, groups = kv_heads * GROUPS;
  const int first_query = segment.group % GROUPS * QUERIES, queries = smaller(QUERIES, RATIO - first_query);
  const i64 out_row = (((i64)segment.request * kv_heads + segment.group / GROUPS) * RATIO + first_query) * DV;
  const bool whole = !together && segment.begin == 0 && segment.end == segment.pieces;
  float x[OUT_HELD], largest, amount;
  for (int query = warp; query < queries; query += WARPS) {
    join(
        WARPS, x, largest, amount, [&](int w) { return shared.largest[w][query]; },
        [&](int w) { return shared.total[w][query]; },
        [&](int w, int j) { return shared.sums[w][query][lane + 32 * j]; });
    if (whole) {
      give(out, out_row + query * DV, x, amount);
    } else if (together) {  // over the first warp's: each lane has read what it writes over, but scores are all lanes'
      warp_sync();
#pragma unroll
      for (int j = 0; j < OUT_HELD; j++) shared.sums[0][query][lane + 32 * j] = x[j];
      if (lane == 0) shared.largest[0][query] = largest, shared.total[0][query] = amount;
    } else {
      float* part = parts + (i64)(2 * (blockIdx.x * CLUSTER + blockIdx.y) + (segment.begin == 0)) * PART_FLOATS;
#pragma unroll
      for (int j = 0; j < OUT_HELD; j++) part[query * DV + lane + 32 * j] = x[j];
      if (lane == 0) part[QUERIES * DV + query] = largest, part[QUERIES * DV + QUERIES + query] = amount;
    }
  }
  if (whole) return;
  if (together) {
#if CLUSTER > 1
    cluster_sync();
    for (int query = CLUSTER * warp + blockIdx.y; query < queries; query += CLUSTER * WARPS) {
      join(
          CLUSTER, x, largest, amount, [&](int r) { return cluster_load(&shared.largest[0][query], r); },
          [&](int r) { return cluster_load(&shared.total[0][query], r); },
          [&](int r, int j) { return cluster_load(&shared.sums[0][query][lane + 32 * j], r); });
      give(out, out_row + query * DV, x, amount);
    }
    cluster_sync();  // no block leaves while others read
#endif
    return;
  }
  memory_fence();
  block_sync();
  const int first = owner_of(shares, segment.first), last = owner_of(shares, segment.first + segment.pieces - 1);
  int* counter = arrived + segment.request * groups + segment.group;
  if (threadIdx.x == 0) {
    shared.last = atomic_add(counter, 1) == last - first;
    if (shared.last) *counter = 0;
  }
  block_sync();
  if (!shared.last) return;
  memory_fence();
  for (int query = warp; query < queries; query += WARPS) {
    auto part = [&](int i) { return parts + (i64)(2 * (first + i) + (i == 0)) * PART_FLOATS; };
    join(
        last - first + 1, x, largest, amount,
        [&](int i) { return load_fresh_float(part(i) + QUERIES * DV + query); },
        [&](int i) { return load_fresh_float(part(i) + QUERIES * DV + QUERIES + query); },
        [&](int i, int j) { return load_fresh_float(part(i) + query * DV + lane + 32 * j); });
    give(out, out_row + query * DV, x, amount);
  }
}
