// Linear layers with float32, bfloat16, float16 or float8 weights and float32 activations: only sums are rounded.
//
// Layout: tiles of 32 outputs; [k][32], but bfloat16 [k / 2][2][16] with k even in the low half of a word and k odd in the
// high one, so that a shift or a mask makes the float32. Each output has two running sums, even and odd k, added
// at the end: the same order for every M. With float8 the two are summed and scaled at the end of each block.

#include "heads.h"
#include "linear.h"
#include "pool.h"

namespace dstgi {
namespace {

constexpr int MAX_ROWS = 6;
constexpr int64_t RUNS = 8;

struct Call {
  const DenseWeight* w;
  const float *x, *bias, *residual;
  float* out;
  int64_t m, x_stride;
};

enum Kind : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT8 = 3 };

template <Kind KIND>
DSTGI_INLINE F32 load_row(const void* tile, int64_t k, int v) {
  const int64_t at = k * TILE + v * LANES;
  if (KIND == FLOAT16) return load_half(static_cast<const uint16_t*>(tile) + at);
  return load(static_cast<const float*>(tile) + at);
}

// The weights of k and k + 1 (or of k alone, then `odd` is zero) for one tile.
template <Kind KIND>
DSTGI_INLINE void load_weights(const void* tile, int64_t pair, bool both, F32* even, F32* odd) {
  for (int v = 0; v < 2; ++v) {
    if (KIND == BFLOAT16) {
      const I32 words = iload(static_cast<const uint32_t*>(tile) + pair * TILE + v * LANES);
      even[v] = as_float(shl32(words, 16));
      odd[v] = as_float(iand(words, iset1(static_cast<int32_t>(0xffff0000u))));
    } else {
      even[v] = load_row<KIND>(tile, pair * 2, v);
      odd[v] = both ? load_row<KIND>(tile, pair * 2 + 1, v) : zero();
    }
  }
}

// Sum of half `v` of a tile, with what is added to it, into its place.
DSTGI_INLINE void finish(const Call& c, int64_t row, int64_t tile, int v, F32 y) {
  const int64_t n = tile * TILE + v * LANES, at = row * c.w->n + n;
  const int left = static_cast<int>(c.w->n - n);
  if (left <= 0) return;
  if (c.bias != nullptr) y = add(y, load_n(c.bias + n, left));
  if (c.residual != nullptr) y = add(y, load_n(c.residual + at, left));
  store_n(c.out + at, y, left);
}

template <Kind KIND, int R>
void rows_by_tile(const Call& c, int64_t row, int64_t tile) {
  const DenseWeight& w = *c.w;
  const int64_t pairs = (w.k + 1) / 2, whole = w.k / 2;
  const int64_t tile_bytes = TILE * (KIND == BFLOAT16 ? pairs * 4 : KIND == FLOAT16 ? w.k * 2 : w.k * 4);
  const void* data = static_cast<const char*>(w.data) + tile * tile_bytes;
  F32 sums[R * 4];  // [r][v][parity]
  DSTGI_UNROLL
  for (int i = 0; i < R * 4; ++i) sums[i] = zero();
  const float* x = c.x + row * c.x_stride;
  F32 even[2], odd[2];
  for (int64_t p = 0; p < whole; ++p, x += 2) {
    load_weights<KIND>(data, p, true, even, odd);
    DSTGI_UNROLL
    for (int r = 0; r < R; ++r) {
      const F32 x0 = set1(x[r * c.x_stride]), x1 = set1(x[r * c.x_stride + 1]);
      DSTGI_UNROLL
      for (int v = 0; v < 2; ++v) {
        sums[(r * 2 + v) * 2] = fma(x0, even[v], sums[(r * 2 + v) * 2]);
        sums[(r * 2 + v) * 2 + 1] = fma(x1, odd[v], sums[(r * 2 + v) * 2 + 1]);
      }
    }
  }
  if (whole < pairs) {
    load_weights<KIND>(data, whole, false, even, odd);
    DSTGI_UNROLL
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < 2; ++v)
        sums[(r * 2 + v) * 2] = fma(set1(x[r * c.x_stride]), even[v], sums[(r * 2 + v) * 2]);
  }
  DSTGI_UNROLL
  for (int i = 0; i < R * 2; ++i) finish(c, row + i / 2, tile, i % 2, add(sums[i * 2], sums[i * 2 + 1]));
}

constexpr float E4M3_FACTOR = 256.0f;  // what `load_e4m3` leaves out

// The float8 weights of one k come from their codes, or from a panel of them decoded before.
DSTGI_INLINE void load_row8(const uint8_t* codes, int64_t k, F32* q) { load_e4m3_twice(codes + k * TILE, q); }
DSTGI_INLINE void load_row8(const float* panel, int64_t k, F32* q) {
  for (int v = 0; v < 2; ++v) q[v] = load(panel + k * TILE + v * LANES);
}

// One block of `width` inputs and R rows: even and odd sums, added, scaled and folded into `totals` [r][v].
template <int R, class Weights>
DSTGI_INLINE void float8_block(const Weights* weights, int64_t width, const float* x, int64_t x_stride,
                               const float* scales, F32* totals) {
  F32 sums[R * 4];  // [r][v][parity]
  DSTGI_UNROLL
  for (int i = 0; i < R * 4; ++i) sums[i] = zero();
  int64_t k = 0;
  for (; k + 1 < width; k += 2) {
    F32 q[4];
    load_row8(weights, k, q);
    load_row8(weights, k + 1, q + 2);
    DSTGI_UNROLL
    for (int r = 0; r < R; ++r) {
      const F32 x0 = set1(x[r * x_stride + k]), x1 = set1(x[r * x_stride + k + 1]);
      DSTGI_UNROLL
      for (int v = 0; v < 2; ++v) {
        sums[(r * 2 + v) * 2] = fma(x0, q[v], sums[(r * 2 + v) * 2]);
        sums[(r * 2 + v) * 2 + 1] = fma(x1, q[2 + v], sums[(r * 2 + v) * 2 + 1]);
      }
    }
  }
  if (k < width) {
    F32 q[2];
    load_row8(weights, k, q);
    DSTGI_UNROLL
    for (int i = 0; i < R * 2; ++i) sums[i * 2] = fma(set1(x[i / 2 * x_stride + k]), q[i % 2], sums[i * 2]);
  }
  DSTGI_UNROLL
  for (int i = 0; i < R * 2; ++i) {
    const F32 sum = mul(add(sums[i * 2], sums[i * 2 + 1]), set1(E4M3_FACTOR));
    totals[i] = fma(sum, load(scales + i % 2 * LANES), totals[i]);
  }
}

template <int R>
void rows_by_float8_tile(const Call& c, int64_t row, int64_t tile) {
  const DenseWeight& w = *c.w;
  const int64_t blocks = (w.k + w.block - 1) / w.block;
  const uint8_t* codes = static_cast<const uint8_t*>(w.data) + tile * w.k * TILE;
  const float *scales = w.scales + tile * blocks * TILE, *x = c.x + row * c.x_stride;
  F32 totals[R * 2];
  DSTGI_UNROLL
  for (int i = 0; i < R * 2; ++i) totals[i] = zero();
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t from = b * w.block, width = b + 1 < blocks ? w.block : w.k - from;
    float8_block<R>(codes + from * TILE, width, x + from, c.x_stride, scales + b * TILE, totals);
  }
  DSTGI_UNROLL
  for (int i = 0; i < R * 2; ++i) finish(c, row + i / 2, tile, i % 2, totals[i]);
}

template <int R>
void float8_panel_rows(const float* panel, int64_t width, const float* x, int64_t x_stride, const float* scales,
                       float* sums) {
  F32 totals[R * 2];
  DSTGI_UNROLL
  for (int i = 0; i < R * 2; ++i) totals[i] = load(sums + i * LANES);
  float8_block<R>(panel, width, x, x_stride, scales, totals);
  DSTGI_UNROLL
  for (int i = 0; i < R * 2; ++i) store(sums + i * LANES, totals[i]);
}

constexpr int64_t PANEL_WIDTH = 128;
constexpr int64_t PANEL_ROWS = 2 * MAX_ROWS;  // up to this many, decoding again costs less than the panel

DSTGI_INLINE void decode_panel(const uint8_t* codes, int64_t width, float* panel) {
  for (int64_t k = 0; k < width; ++k) {
    F32 q[2];
    load_row8(codes, k, q);
    for (int v = 0; v < 2; ++v) store(panel + k * TILE + v * LANES, q[v]);
  }
}

// Many rows: each block of a tile is decoded once, into L1, and used by all of them.
void float8_by_panels(const Call& c, int64_t tile) {
  alignas(64) float panel[PANEL_WIDTH * TILE];
  alignas(64) float sums[CHUNK_ROWS * TILE];
  const DenseWeight& w = *c.w;
  const int64_t blocks = (w.k + w.block - 1) / w.block;
  const uint8_t* codes = static_cast<const uint8_t*>(w.data) + tile * w.k * TILE;
  for (int64_t begin = 0; begin < c.m; begin += CHUNK_ROWS) {
    const int64_t rows = c.m - begin < CHUNK_ROWS ? c.m - begin : CHUNK_ROWS;
    const int64_t steps = (rows + MAX_ROWS - 1) / MAX_ROWS;
    std::memset(sums, 0, sizeof(float) * rows * TILE);
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t start = b * w.block, width = b + 1 < blocks ? w.block : w.k - start;
      const float *x = c.x + begin * c.x_stride + start, *scales = w.scales + (tile * blocks + b) * TILE;
      decode_panel(codes + start * TILE, width, panel);
      for (int64_t s = 0; s < steps; ++s) {
        const int64_t from = rows * s / steps, to = rows * (s + 1) / steps;
        switch (to - from) {
#define DSTGI_ROWS(R)                                                                                  \
  case R:                                                                                              \
    float8_panel_rows<R>(panel, width, x + from * c.x_stride, c.x_stride, scales, sums + from * TILE); \
    break
          DSTGI_ROWS(1);
          DSTGI_ROWS(2);
          DSTGI_ROWS(3);
          DSTGI_ROWS(4);
          DSTGI_ROWS(5);
          DSTGI_ROWS(6);
#undef DSTGI_ROWS
        }
      }
    }
    for (int64_t i = 0; i < rows * 2; ++i)
      finish(c, begin + i / 2, tile, static_cast<int>(i % 2), load(sums + i * LANES));
  }
}

template <Kind KIND, int R>
DSTGI_INLINE void some_rows(const Call& c, int64_t row, int64_t tile) {
  if (KIND == FLOAT8)
    rows_by_float8_tile<R>(c, row, tile);
  else
    rows_by_tile<KIND, R>(c, row, tile);
}

template <Kind KIND>
void all_rows(const Call& c, int64_t tile) {
  const int64_t steps = (c.m + MAX_ROWS - 1) / MAX_ROWS;
  for (int64_t s = 0; s < steps; ++s) {
    const int64_t from = c.m * s / steps, to = c.m * (s + 1) / steps;
    switch (to - from) {
      case 1:
        some_rows<KIND, 1>(c, from, tile);
        break;
      case 2:
        some_rows<KIND, 2>(c, from, tile);
        break;
      case 3:
        some_rows<KIND, 3>(c, from, tile);
        break;
      case 4:
        some_rows<KIND, 4>(c, from, tile);
        break;
      case 5:
        some_rows<KIND, 5>(c, from, tile);
        break;
      default:
        some_rows<KIND, 6>(c, from, tile);
    }
  }
}

DSTGI_INLINE void float8_rows(const Call& c, int64_t tile) {
  c.m > PANEL_ROWS && c.w->block <= PANEL_WIDTH ? float8_by_panels(c, tile) : all_rows<FLOAT8>(c, tile);
}

DSTGI_INLINE void some_tiles(const Call& c, int64_t begin, int64_t end) {
  for (int64_t tile = begin; tile < end; ++tile)
    c.w->kind == BFLOAT16  ? all_rows<BFLOAT16>(c, tile)
    : c.w->kind == FLOAT16 ? all_rows<FLOAT16>(c, tile)
    : c.w->kind == FLOAT8  ? float8_rows(c, tile)
                           : all_rows<FLOAT32>(c, tile);
}

}  // namespace

void dense_tiles(const DenseWeight& w, const float* x, int64_t rows, int64_t begin, int64_t end, float* out) {
  some_tiles({&w, x, nullptr, nullptr, out, rows, w.k}, begin, end);
}

}  // namespace dstgi

// out[m, n] = x[m, k] @ w.T + bias + residual; x rows lie `x_stride` floats apart, the others are dense.
DSTGI_API void dstgi_dense_linear(const DenseWeight* w, const float* x, int64_t x_stride, int64_t m, float* out,
                                  const float* bias, const float* residual) {
  using namespace dstgi;
  if (m <= 0) return;
  const Call c{w, x, bias, residual, out, m, x_stride};
  const int64_t tiles = (w->n + TILE - 1) / TILE;
  // Runs of tiles, so that a thread streams through memory; several a thread, so that one held up delays little.
  const int64_t runs = tiles < RUNS * w->num_threads ? tiles : RUNS * w->num_threads;
  parallel(w->num_threads, runs, [&](int64_t i) {
    some_tiles(c, tiles * i / runs, tiles * (i + 1) / runs);
  });
}

// Rows `ids` [t] of the packed weight as float32 [t, k].
DSTGI_API void dstgi_dense_rows(const DenseWeight* w, const int64_t* ids, int64_t t, float* out) {
  using namespace dstgi;
  const int64_t pairs = (w->k + 1) / 2;
  for (int64_t i = 0; i < t; ++i) {
    const int64_t tile = ids[i] / TILE, lane = ids[i] % TILE;
    const uint16_t* words = static_cast<const uint16_t*>(w->data);
    for (int64_t k = 0; k < w->k; ++k) {
      float& to = out[i * w->k + k];
      if (w->kind == BFLOAT16) {
        const uint32_t bits = static_cast<uint32_t>(words[((tile * pairs + k / 2) * TILE + lane) * 2 + k % 2]) << 16;
        std::memcpy(&to, &bits, sizeof bits);
      } else if (w->kind == FLOAT16) {
        to = from_half(words[(tile * w->k + k) * TILE + lane]);
      } else if (w->kind == FLOAT8) {
        const uint8_t code = static_cast<const uint8_t*>(w->data)[(tile * w->k + k) * TILE + lane];
        const uint16_t half = static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7);
        const int64_t blocks = (w->k + w->block - 1) / w->block;
        to = from_half(half) * E4M3_FACTOR * w->scales[(tile * blocks + k / w->block) * TILE + lane];
      } else {
        to = static_cast<const float*>(w->data)[(tile * w->k + k) * TILE + lane];
      }
    }
  }
}
