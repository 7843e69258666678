// Small float32 products whose bits do not depend on how they are cut: every element is one running sum, k ascending.
#pragma once

#include "simd.h"

namespace dstgi {

using namespace simd;

// Steps of k at a time: the addresses of many rows do not fit in registers, and are fetched once for all of them. The
// portable vectors are several registers each; there it would only cost minutes of compiling.
#ifdef DSTGI_AVX512
constexpr int UNROLLED = 4;
#else
constexpr int UNROLLED = 1;
#endif

// The left factor a[m][depth], one of whose axes is dense; the other one's stride is known at run time only.
struct RowMajor {
  const float* at;
  int64_t row;

  RowMajor from(int64_t r) const { return {at + r * row, row}; }
  const float* column(int64_t k) const { return at + k; }
  int64_t step() const { return row; }
};
struct ColumnMajor {
  const float* at;
  int64_t stride;

  ColumnMajor from(int64_t r) const { return {at + r, stride}; }
  const float* column(int64_t k) const { return at + k * stride; }
  int64_t step() const { return 1; }
};

DSTGI_INLINE F32 load_right(const float* p) { return load(p); }
DSTGI_INLINE F32 load_right(const uint16_t* p) { return load_bf16(p); }

// Memory that will be read soon: a product asks for it line by line on its way, so that arithmetic covers the wait.
struct Ahead {
  const char *at = nullptr, *end = nullptr;

  void ask() {
    if (at >= end) return;
    __builtin_prefetch(at);
    __builtin_prefetch(at + 64);
    at += 128;
  }
};

template <int R, int V, class B>
DSTGI_INLINE void product_step(const float* x, int64_t x_step, const B* b, F32* acc) {
  F32 y[V];
  DSTGI_UNROLL
  for (int v = 0; v < V; ++v) y[v] = load_right(b + v * LANES);
  DSTGI_UNROLL
  for (int r = 0; r < R; ++r) {
    const F32 factor = set1(x[r * x_step]);
    DSTGI_UNROLL
    for (int v = 0; v < V; ++v) acc[r * V + v] = fma(factor, y[v], acc[r * V + v]);
  }
}

// c[R][V * 16] = (keep == null ? 0 : c * keep[row]) + a times b, b's rows `b_row` apart.
template <int R, int V, class A, class B>
DSTGI_INLINE void product_tile(A a, const B* b, int64_t b_row, int64_t depth, float* c, int64_t c_row,
                               const float* keep, Ahead& ahead) {
  Ahead next = ahead;
  F32 acc[R * V];
  DSTGI_UNROLL
  for (int i = 0; i < R * V; ++i)
    acc[i] = keep == nullptr ? zero() : mul(load(c + i / V * c_row + i % V * LANES), set1(keep[i / V]));
  int64_t k = 0;
  for (; k + UNROLLED <= depth; k += UNROLLED, b += UNROLLED * b_row) {
    next.ask();
    DSTGI_UNROLL
    for (int i = 0; i < UNROLLED; ++i) product_step<R, V>(a.column(k + i), a.step(), b + i * b_row, acc);
  }
  for (; k < depth; ++k, b += b_row) product_step<R, V>(a.column(k), a.step(), b, acc);
  ahead = next;
  DSTGI_UNROLL
  for (int i = 0; i < R * V; ++i) store(c + i / V * c_row + i % V * LANES, acc[i]);
}

// Rows [0, m) in tiles of R, then of R / 2, .. 1.
template <int R, int V, class A, class B>
inline void product_rows(A a, int64_t m, const B* b, int64_t b_row, int64_t depth, float* c, int64_t c_row,
                         const float* keep, Ahead& ahead) {
  int64_t at = 0;
  for (; at + R <= m; at += R)
    product_tile<R, V>(a.from(at), b, b_row, depth, c + at * c_row, c_row, keep == nullptr ? nullptr : keep + at,
                       ahead);
  if constexpr (R > 1)
    if (at < m)
      product_rows<R == 6 ? 3 : R / 2, V>(a.from(at), m - at, b, b_row, depth, c + at * c_row, c_row,
                                          keep == nullptr ? nullptr : keep + at, ahead);
}

// c[m][n] from a[m][depth] and b[depth][n], n a multiple of 16. With `keep` [m], what c holds is scaled by it and added to.
template <class A, class B>
inline void product(A a, int64_t m, const B* b, int64_t b_row, int64_t n, int64_t depth, float* c, int64_t c_row,
                    const float* keep = nullptr, Ahead ahead = {}) {
  int64_t at = 0;
  for (; at + 4 * LANES <= n; at += 4 * LANES) product_rows<6, 4>(a, m, b + at, b_row, depth, c + at, c_row, keep, ahead);
  for (; at + 2 * LANES <= n; at += 2 * LANES) product_rows<8, 2>(a, m, b + at, b_row, depth, c + at, c_row, keep, ahead);
  for (; at < n; at += LANES) product_rows<16, 1>(a, m, b + at, b_row, depth, c + at, c_row, keep, ahead);
}

}  // namespace dstgi
