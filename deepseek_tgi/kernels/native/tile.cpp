// The register tiles of products.

#include "tile.h"

#include "register_tiles.h"

namespace dstgi {
namespace {

// Steps of k at a time: the addresses of many rows do not fit in registers, and are fetched once for all of them. The
// small tiles of few registers do not need it.
constexpr int UNROLLED = MANY_REGISTERS ? 4 : 1;

DSTGI_INLINE F32 load_right(const float* p) { return load(p); }
DSTGI_INLINE F32 load_right(const uint16_t* p) { return load_bf16(p); }

template <int R, int V, class B>
DSTGI_INLINE void product_step(const float* x, int64_t x_step, const B* b, F32* acc) {
  F32 y[V];
  DSTGI_UNROLL
  for (int v = 0; v < V; ++v) y[v] = R > 1 ? held(load_right(b + v * LANES)) : load_right(b + v * LANES);
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

// Rows [0, m) of V vectors in tiles of R rows, then of R / 2, .. 1.
template <int R, int V, class A, class B>
inline void product_rows(A a, int64_t m, const B* b, int64_t b_row, int64_t depth, float* c, int64_t c_row,
                         const float* keep, Ahead& ahead) {
  constexpr int BESIDE = tile_vectors(R, V);
  int64_t at = 0;
  for (; at + R <= m; at += R)
    for (int v = 0; v < V; v += BESIDE)
      product_tile<R, BESIDE>(a.from(at), b + v * LANES, b_row, depth, c + at * c_row + v * LANES, c_row,
                              keep == nullptr ? nullptr : keep + at, ahead);
  if constexpr (R > 1)
    if (at < m)
      product_rows<R == 6 ? 3 : R / 2, V>(a.from(at), m - at, b, b_row, depth, c + at * c_row, c_row,
                                          keep == nullptr ? nullptr : keep + at, ahead);
}

}  // namespace

template <class A, class B>
void product(A a, int64_t m, const B* b, int64_t b_row, int64_t n, int64_t depth, float* c, int64_t c_row,
                    const float* keep, Ahead ahead) {
  constexpr int R1 = MANY_REGISTERS ? 16 : 6, R2 = MANY_REGISTERS ? 8 : 6, R4 = 6;
  int64_t at = 0;
  for (; at + 4 * LANES <= n; at += 4 * LANES) product_rows<R4, 4>(a, m, b + at, b_row, depth, c + at, c_row, keep, ahead);
  for (; at + 2 * LANES <= n; at += 2 * LANES) product_rows<R2, 2>(a, m, b + at, b_row, depth, c + at, c_row, keep, ahead);
  for (; at < n; at += LANES) product_rows<R1, 1>(a, m, b + at, b_row, depth, c + at, c_row, keep, ahead);
}

template void product(RowMajor, int64_t, const float*, int64_t, int64_t, int64_t, float*, int64_t, const float*, Ahead);
template void product(RowMajor, int64_t, const uint16_t*, int64_t, int64_t, int64_t, float*, int64_t, const float*, Ahead);
template void product(ColumnMajor, int64_t, const float*, int64_t, int64_t, int64_t, float*, int64_t, const float*, Ahead);
template void product(ColumnMajor, int64_t, const uint16_t*, int64_t, int64_t, int64_t, float*, int64_t, const float*, Ahead);

}  // namespace dstgi
