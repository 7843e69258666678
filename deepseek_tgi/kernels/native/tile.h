// Small float32 products whose bits do not depend on how they are cut: every element is one running sum, k ascending.
#pragma once

#include "simd.h"

namespace dstgi {

using namespace simd;

// The left factor: element (i, k) is at[i * row + k * step].
struct Left {
  const float* at;
  int64_t row, step;
};

DSTGI_INLINE F32 load_right(const float* p) { return load(p); }
DSTGI_INLINE F32 load_right(const uint16_t* p) { return load_bf16(p); }

// c[R][V * 16] = (keep == null ? 0 : c * keep[row]) + a times b, b's rows `b_row` apart.
template <int R, int V, class B>
DSTGI_INLINE void product_tile(const Left& a, const B* b, int64_t b_row, int64_t depth, float* c, int64_t c_row,
                               const float* keep) {
  F32 acc[R * V];
  DSTGI_UNROLL
  for (int i = 0; i < R * V; ++i)
    acc[i] = keep == nullptr ? zero() : mul(load(c + i / V * c_row + i % V * LANES), set1(keep[i / V]));
  const float* x = a.at;
  for (int64_t k = 0; k < depth; ++k, x += a.step, b += b_row) {
    F32 y[V];
    DSTGI_UNROLL
    for (int v = 0; v < V; ++v) y[v] = load_right(b + v * LANES);
    DSTGI_UNROLL
    for (int r = 0; r < R; ++r) {
      const F32 factor = set1(x[r * a.row]);
      DSTGI_UNROLL
      for (int v = 0; v < V; ++v) acc[r * V + v] = fma(factor, y[v], acc[r * V + v]);
    }
  }
  DSTGI_UNROLL
  for (int i = 0; i < R * V; ++i) store(c + i / V * c_row + i % V * LANES, acc[i]);
}

// Rows [at, m) in tiles of at most R, R / 2, .. 1.
template <int R, int V, class B>
inline void product_rows(const Left& a, int64_t m, const B* b, int64_t b_row, int64_t depth, float* c, int64_t c_row,
                         const float* keep) {
  int64_t at = 0;
  for (; at + R <= m; at += R)
    product_tile<R, V>(Left{a.at + at * a.row, a.row, a.step}, b, b_row, depth, c + at * c_row, c_row,
                       keep == nullptr ? nullptr : keep + at);
  if constexpr (R > 1)
    if (at < m)
      product_rows<R == 6 ? 3 : R / 2, V>(Left{a.at + at * a.row, a.row, a.step}, m - at, b, b_row, depth,
                                          c + at * c_row, c_row, keep == nullptr ? nullptr : keep + at);
}

// c[m][n] from a[m][depth] and b[depth][n], n a multiple of 16. With `keep` [m], what c holds is scaled by it and added to.
template <class B>
inline void product(const Left& a, int64_t m, const B* b, int64_t b_row, int64_t n, int64_t depth, float* c,
                    int64_t c_row, const float* keep = nullptr) {
  int64_t at = 0;
  for (; at + 4 * LANES <= n; at += 4 * LANES) product_rows<6, 4>(a, m, b + at, b_row, depth, c + at, c_row, keep);
  for (; at + 2 * LANES <= n; at += 2 * LANES) product_rows<8, 2>(a, m, b + at, b_row, depth, c + at, c_row, keep);
  for (; at < n; at += LANES) product_rows<16, 1>(a, m, b + at, b_row, depth, c + at, c_row, keep);
}

}  // namespace dstgi
