// The register tiles of attention and its softmax by segments, for keys and values that lie ready as float32 panels.
//
// Every score is one running sum over d, every output one running sum over positions: the tile a row falls into does not
// show in its bits.
#pragma once

#include <cmath>

#include "rows.h"

namespace dstgi {

constexpr int64_t SEGMENT = 256;  // positions whose softmax stands alone
constexpr int64_t PANEL = 64;     // positions of a panel
constexpr int ROWS = 6;           // query rows of a register tile

// A panel of keys [depth][PANEL]. Keys may stand relative to something that turns with their positions: its rows,
// `num_turns` of them, are `turns[i]` [PANEL] and meet the first of a query row's elements; `marks` [PANEL] or null says
// with 0 which keys do without.
struct KeyPanel {
  const float* rows;
  const float* const* turns = nullptr;
  int64_t num_turns = 0;
  const float* marks = nullptr;
};

// Scores of up to ROWS rows against the panel's first n positions. Up to the next multiple of 64 may be written.
void score_rows(int64_t rows, int64_t n, const float* q, int64_t q_stride, const KeyPanel& keys, int64_t depth,
                float* scores);

// Adds weights [rows][n] times the values of n positions to sums [rows][v_pad].
void sum_rows(int64_t rows, const float* weights, const float* const* groups, int64_t v_pad, int64_t n, float* sums);

// Scores [n] become weights e^(s - max); returns their total. Places up to the next multiple of 16 become 0.
DSTGI_INLINE float soften(float* scores, int64_t n, float* max_out) {
  F32 top = set1(-INFINITY);
  for (int64_t i = 0; i < n; i += LANES)
    top = max(top, keep_below(load(scores + i), static_cast<int>(n - i), set1(-INFINITY)));
  const float highest = max_lanes(top);
  F32 total = zero();
  for (int64_t i = 0; i < n; i += LANES) {
    const F32 w = keep_below(exp(sub(load(scores + i), set1(highest))), static_cast<int>(n - i), zero());
    store(scores + i, w);
    total = add(total, w);
  }
  *max_out = highest;
  return sum_lanes(total);
}

// Adds a segment (its max, total and weighted sum) to a row's running ones.
DSTGI_INLINE void merge(float* out, float* out_max, float* out_total, const float* part, float part_max,
                        float part_total, int64_t v_pad) {
  const float highest = *out_max > part_max ? *out_max : part_max;
  float both[LANES] = {*out_max - highest, part_max - highest};
  store(both, exp(load(both)));
  const F32 old_scale = set1(both[0]), new_scale = set1(both[1]);
  for (int64_t d = 0; d < v_pad; d += LANES)
    store(out + d, fma(load(part + d), new_scale, mul(load(out + d), old_scale)));
  *out_total = std::fma(part_total, both[1], *out_total * both[0]);
  *out_max = highest;
}

DSTGI_INLINE void start_row(float* out, float* max, float* total, int64_t v_pad) {
  for (int64_t d = 0; d < v_pad; d += LANES) store(out + d, zero());
  *max = -INFINITY;
  *total = 0.0f;
}

// Memory of a unit's rows: q [rows][q_stride], scaled; scores [rows][SEGMENT]; sums, out [rows][v_pad]; max, total
// [2][rows], those of all segments so far, then of the one at hand.
struct Rows {
  float *q, *scores, *sums, *out, *max, *total;
};

// `ratio` rows share a token. Row 0 sees `first_limit` positions from the segment's start (none if negative).
struct RowShape {
  int64_t rows, ratio, first_limit, k_dim, q_stride, v_pad;
};

// One segment for all rows, merged into w.out. `keys(at, n)` gives the panel, of depth k_dim, of positions at .. at + n of
// the segment; `values(at, n, groups)` says where each sixteen rows of values, v_pad apart, begin.
template <class Keys, class Values>
inline void attend_rows(const RowShape& s, const Rows& w, Keys&& keys, Values&& values) {
  const auto limit = [&](int64_t row) {
    const int64_t n = s.first_limit + row / s.ratio;
    return n < 0 ? int64_t{0} : n > SEGMENT ? SEGMENT : n;
  };
  const int64_t rows = s.rows, longest = limit(rows - 1);
  for (int64_t at = 0; at < longest; at += PANEL) {
    const int64_t n = longest - at < PANEL ? longest - at : PANEL;
    const KeyPanel panel = keys(at, n);
    for (int64_t r = 0; r < rows; r += ROWS) {
      const int64_t count = rows - r < ROWS ? rows - r : ROWS, seen = limit(r + count - 1) - at;
      if (seen > 0)
        score_rows(count, seen < n ? seen : n, w.q + r * s.q_stride, s.q_stride, panel, s.k_dim,
                   w.scores + r * SEGMENT + at);
    }
  }
  float* tops = w.max + rows;  // this segment's, after the running ones
  float* totals = w.total + rows;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t n = limit(r), end = limit(r - r % ROWS + ROWS - 1 < rows ? r - r % ROWS + ROWS - 1 : rows - 1);
    float* scores = w.scores + r * SEGMENT;
    if (n > 0) totals[r] = soften(scores, n, tops + r);
    for (int64_t i = n; i < end; ++i) scores[i] = 0.0f;
    for (int64_t d = 0; d < s.v_pad; d += LANES) store(w.sums + r * s.v_pad + d, zero());
  }
  for (int64_t at = 0; at < longest; at += PANEL) {
    const int64_t n = longest - at < PANEL ? longest - at : PANEL;
    const float* groups[PANEL / LANES];
    values(at, n, groups);
    for (int64_t r = 0; r < rows; r += ROWS) {
      const int64_t count = rows - r < ROWS ? rows - r : ROWS, seen = limit(r + count - 1) - at;
      if (seen > 0)
        sum_rows(count, w.scores + r * SEGMENT + at, groups, s.v_pad, seen < n ? seen : n,
                 w.sums + r * s.v_pad);
    }
  }
  for (int64_t r = 0; r < rows; ++r)
    if (limit(r) > 0)
      merge(w.out + r * s.v_pad, w.max + r, w.total + r, w.sums + r * s.v_pad, tops[r], totals[r], s.v_pad);
}

}  // namespace dstgi
