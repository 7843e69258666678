// Attention's register tiles: scores and weighted sums.

#include "attention_tiles.h"

#include "register_tiles.h"

namespace dstgi {
namespace {

// Adds row [V] of keys to the scores of R rows, whose element d stands at q.
template <int R, int V>
DSTGI_INLINE void add_products(const float* q, int64_t q_stride, const float* row, F32* acc) {
  F32 k[V];
  DSTGI_UNROLL
  for (int v = 0; v < V; ++v) k[v] = R > 1 ? held(load(row + v * LANES)) : load(row + v * LANES);
  DSTGI_UNROLL
  for (int r = 0; r < R; ++r) {
    const F32 x = set1(q[r * q_stride]);
    DSTGI_UNROLL
    for (int v = 0; v < V; ++v) acc[r * V + v] = fma(x, k[v], acc[r * V + v]);
  }
}

// Scores of R rows against V vectors of the panel's positions, from position `at` of it.
template <int R, int V>
void score_tile(const float* q, int64_t q_stride, const KeyPanel& keys, int64_t at, int64_t depth, float* scores) {
  F32 acc[R * V];
  DSTGI_UNROLL
  for (int i = 0; i < R * V; ++i) acc[i] = zero();
  for (int64_t i = 0; i < keys.num_turns; ++i) add_products<R, V>(q + i, q_stride, keys.turns[i] + at, acc);
  if (keys.marks != nullptr) {
    DSTGI_UNROLL
    for (int i = 0; i < R * V; ++i) acc[i] = mul(acc[i], load(keys.marks + at + i % V * LANES));
  }
  q += keys.num_turns;
  const float* row = keys.rows + at;
  for (int64_t d = 0; d < depth; ++d, row += PANEL) add_products<R, V>(q + d, q_stride, row, acc);
  DSTGI_UNROLL
  for (int i = 0; i < R * V; ++i) store(scores + i / V * SEGMENT + i % V * LANES, acc[i]);
}

// Adds weights [R][n] times values [n][V * 16 columns, from column d] to sums.
template <int R, int V>
void sum_tile(const float* weights, const float* const* groups, int64_t d, int64_t v_pad, int64_t n, float* sums) {
  F32 acc[R * V];
  DSTGI_UNROLL
  for (int i = 0; i < R * V; ++i) acc[i] = load(sums + i / V * v_pad + i % V * LANES);
  for (int64_t j = 0; j < n; ++j) {
    const float* values = groups[j / LANES] + j % LANES * v_pad + d;
    F32 x[V];
    DSTGI_UNROLL
    for (int v = 0; v < V; ++v) x[v] = R > 1 ? held(load(values + v * LANES)) : load(values + v * LANES);
    DSTGI_UNROLL
    for (int r = 0; r < R; ++r) {
      const F32 w = set1(weights[r * SEGMENT + j]);
      DSTGI_UNROLL
      for (int v = 0; v < V; ++v) acc[r * V + v] = fma(w, x[v], acc[r * V + v]);
    }
  }
  DSTGI_UNROLL
  for (int i = 0; i < R * V; ++i) store(sums + i / V * v_pad + i % V * LANES, acc[i]);
}

}  // namespace

void score_rows(int64_t rows, int64_t n, const float* q, int64_t q_stride, const KeyPanel& keys, int64_t depth,
                float* scores) {
  with_count<ROWS>(rows, [&](auto count) {
    constexpr int R = decltype(count)::value, V = tile_vectors(R);
    int64_t at = 0;
    if (n > 2 * LANES)
      for (; at < n; at += V * LANES) score_tile<R, V>(q, q_stride, keys, at, depth, scores + at);
    for (; at < n; at += LANES) score_tile<R, 1>(q, q_stride, keys, at, depth, scores + at);
  });
}

void sum_rows(int64_t rows, const float* weights, const float* const* groups, int64_t v_pad, int64_t n, float* sums) {
  with_count<ROWS>(rows, [&](auto count) {
    constexpr int R = decltype(count)::value, V = tile_vectors(R);
    int64_t d = 0;
    for (; d + V * LANES <= v_pad; d += V * LANES) sum_tile<R, V>(weights, groups, d, v_pad, n, sums + d);
    for (; d < v_pad; d += LANES) sum_tile<R, 1>(weights, groups, d, v_pad, n, sums + d);
  });
}

}  // namespace dstgi
