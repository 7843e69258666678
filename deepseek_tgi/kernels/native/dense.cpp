// Linear layers with float32, bfloat16, float16 or float8 weights and float32 activations: only sums are rounded.
//
// Layout: tiles of 32 outputs; [k][32], but bfloat16 [k / 2][2][16] with k even in the low half of a word and k odd in the
// high one, so that a shift or a mask makes the float32. Each output has two running sums, even and odd k, added
// at the end: the same order for every M. With float8 the two are summed and scaled at the end of each block.

#include "heads.h"
#include "linear.h"
#include "pool.h"
#include "register_tiles.h"

namespace dstgi {
namespace {

constexpr int64_t RUNS = 8;
constexpr int MAX_ROWS = MANY_REGISTERS ? 6 : 3;  // of a register tile
// Few registers leave small tiles: they take turns at a strip of weights while it is in L1, for so many rows at once.
constexpr int64_t STRIP = MANY_REGISTERS ? INT64_MAX : 64;  // pairs of inputs
constexpr int64_t STRIP_ROWS = MANY_REGISTERS ? MAX_ROWS : 24;

// Vectors of a tile that R rows take at once; each has two sums.
template <int R>
constexpr int BESIDE = MANY_REGISTERS || R == 1 ? 2 : 1;

struct Call {
  const DenseWeight* w;
  const float *x, *bias, *residual;
  float* out;
  int64_t m, x_stride;
};

enum Kind : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT8 = 3 };

// `each(from, to)` for stretches of up to `most` of `count` rows, as even as can be.
template <class F>
DSTGI_INLINE void by_even_parts(int64_t count, int64_t most, F&& each) {
  const int64_t steps = (count + most - 1) / most;
  for (int64_t s = 0; s < steps; ++s) each(count * s / steps, count * (s + 1) / steps);
}

// Vector `v` of a tile's weights for input 2 * pair + parity.
template <Kind KIND>
DSTGI_INLINE F32 load_weights(const void* tile, int64_t pair, int parity, int v) {
  if (KIND == BFLOAT16) {
    const I32 words = iload(static_cast<const uint32_t*>(tile) + pair * TILE + v * LANES);
    return as_float(parity == 0 ? shl32(words, 16) : iand(words, iset1(static_cast<int32_t>(0xffff0000u))));
  }
  const int64_t at = (pair * 2 + parity) * TILE + v * LANES;
  if (KIND == FLOAT16) return load_half(static_cast<const uint16_t*>(tile) + at);
  return held(load(static_cast<const float*>(tile) + at));
}

// Adds to sums [r][v][parity] what inputs of one parity give: x is that of row 0, y the V vectors of weights.
template <int R, int V>
DSTGI_INLINE void add_products(const float* x, int64_t x_stride, const F32* y, int parity, F32* sums) {
  DSTGI_UNROLL
  for (int r = 0; r < R; ++r) {
    const F32 factor = set1(x[r * x_stride]);
    DSTGI_UNROLL
    for (int v = 0; v < V; ++v) {
      F32& sum = sums[(r * V + v) * 2 + parity];
      sum = fma(factor, y[v], sum);
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

// Adds what pairs `from` .. `to` - 1 of the inputs give R rows to their `sums` [r][v][parity][16], 0 at first.
template <Kind KIND, int R>
DSTGI_APART void add_strip(const Call& c, int64_t row, const void* data, int64_t from, int64_t to, float* sums) {
  constexpr int V = BESIDE<R>;
  const int64_t whole = to < c.w->k / 2 ? to : c.w->k / 2;
  for (int v0 = 0; v0 < 2; v0 += V) {
    const auto place = [&](int i) { return sums + ((i / (V * 2) * 2 + v0 + i / 2 % V) * 2 + i % 2) * LANES; };
    F32 acc[R * V * 2];  // [r][v][parity]
    DSTGI_UNROLL
    for (int i = 0; i < R * V * 2; ++i) acc[i] = from == 0 ? zero() : load(place(i));
    const float* x = c.x + row * c.x_stride + from * 2;
    F32 y[V];
    for (int64_t p = from; p < whole; ++p, x += 2) DSTGI_UNROLL
      for (int parity = 0; parity < 2; ++parity) {
        DSTGI_UNROLL
        for (int v = 0; v < V; ++v) y[v] = load_weights<KIND>(data, p, parity, v0 + v);
        add_products<R, V>(x + parity, c.x_stride, y, parity, acc);
      }
    if (whole < to) {
      DSTGI_UNROLL
      for (int v = 0; v < V; ++v) y[v] = load_weights<KIND>(data, whole, 0, v0 + v);
      add_products<R, V>(x, c.x_stride, y, 0, acc);
    }
    DSTGI_UNROLL
    for (int i = 0; i < R * V * 2; ++i) store(place(i), acc[i]);
  }
}

// All rows against one tile.
template <Kind KIND>
void tile_rows(const Call& c, int64_t tile) {
  alignas(64) float sums[STRIP_ROWS * 2 * TILE];
  const DenseWeight& w = *c.w;
  const int64_t pairs = (w.k + 1) / 2;
  const int64_t tile_bytes = TILE * (KIND == BFLOAT16 ? pairs * 4 : KIND == FLOAT16 ? w.k * 2 : w.k * 4);
  const void* data = static_cast<const char*>(w.data) + tile * tile_bytes;
  by_even_parts(c.m, STRIP_ROWS, [&](int64_t begin, int64_t end) {
    for (int64_t p = 0; p < pairs; p += pairs - p < STRIP ? pairs - p : STRIP)
      by_even_parts(end - begin, MAX_ROWS, [&](int64_t from, int64_t to) {
        with_count<MAX_ROWS>(to - from, [&](auto count) {
          add_strip<KIND, decltype(count)::value>(c, begin + from, data, p, pairs - p < STRIP ? pairs : p + STRIP,
                                                  sums + from * 2 * TILE);
        });
      });
    for (int64_t i = 0; i < (end - begin) * 2; ++i) {
      const float* sum = sums + i * 2 * LANES;
      finish(c, begin + i / 2, tile, static_cast<int>(i % 2), add(load(sum), load(sum + LANES)));
    }
  });
}

constexpr float E4M3_FACTOR = 256.0f;  // what `load_e4m3` leaves out

// V vectors, from `v` on, of the float8 weights of one k: from their codes, or from a panel of them decoded before.
template <int V>
DSTGI_INLINE void load_row8(const uint8_t* codes, int64_t k, int v, F32* q) {
  if constexpr (V == 2)
    load_e4m3_twice(codes + k * TILE, q);
  else
    q[0] = load_e4m3(codes + k * TILE + v * LANES);
}
template <int V>
DSTGI_INLINE void load_row8(const float* panel, int64_t k, int v, F32* q) {
  for (int i = 0; i < V; ++i) q[i] = held(load(panel + k * TILE + (v + i) * LANES));
}

// One block of `width` inputs and R rows: even and odd sums, added, scaled and folded into `totals` [r][v][16].
template <int R, class Weights>
DSTGI_APART void float8_block(const Weights* weights, int64_t width, const float* x, int64_t x_stride, const float* scales,
                  float* totals) {
  constexpr int V = BESIDE<R>;
  for (int v0 = 0; v0 < 2; v0 += V) {
    F32 sums[R * V * 2];  // [r][v][parity]
    DSTGI_UNROLL
    for (int i = 0; i < R * V * 2; ++i) sums[i] = zero();
    int64_t k = 0;
    F32 y[V];
    for (; k + 1 < width; k += 2) DSTGI_UNROLL
      for (int parity = 0; parity < 2; ++parity) {
        load_row8<V>(weights, k + parity, v0, y);
        add_products<R, V>(x + k + parity, x_stride, y, parity, sums);
      }
    if (k < width) {
      load_row8<V>(weights, k, v0, y);
      add_products<R, V>(x + k, x_stride, y, 0, sums);
    }
    DSTGI_UNROLL
    for (int i = 0; i < R * V; ++i) {
      const F32 sum = mul(add(sums[i * 2], sums[i * 2 + 1]), set1(E4M3_FACTOR));
      float* total = totals + (i / V * 2 + v0 + i % V) * LANES;
      store(total, fma(sum, load(scales + (v0 + i % V) * LANES), load(total)));
    }
  }
}

template <int R>
void rows_by_float8_tile(const Call& c, int64_t row, int64_t tile) {
  const DenseWeight& w = *c.w;
  const int64_t blocks = (w.k + w.block - 1) / w.block;
  const uint8_t* codes = static_cast<const uint8_t*>(w.data) + tile * w.k * TILE;
  const float *scales = w.scales + tile * blocks * TILE, *x = c.x + row * c.x_stride;
  alignas(64) float totals[R * TILE] = {};
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t from = b * w.block, width = b + 1 < blocks ? w.block : w.k - from;
    float8_block<R>(codes + from * TILE, width, x + from, c.x_stride, scales + b * TILE, totals);
  }
  for (int i = 0; i < R * 2; ++i) finish(c, row + i / 2, tile, i % 2, load(totals + i * LANES));
}

constexpr int64_t PANEL_WIDTH = 128;
constexpr int64_t PANEL_ROWS = 2 * MAX_ROWS;  // up to this many, decoding again costs less than the panel

DSTGI_INLINE void decode_panel(const uint8_t* codes, int64_t width, float* panel) {
  for (int64_t k = 0; k < width; ++k) {
    F32 q[2];
    load_e4m3_twice(codes + k * TILE, q);
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
    std::memset(sums, 0, sizeof(float) * rows * TILE);
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t start = b * w.block, width = b + 1 < blocks ? w.block : w.k - start;
      const float *x = c.x + begin * c.x_stride + start, *scales = w.scales + (tile * blocks + b) * TILE;
      decode_panel(codes + start * TILE, width, panel);
      by_even_parts(rows, MAX_ROWS, [&](int64_t from, int64_t to) {
        with_count<MAX_ROWS>(to - from, [&](auto count) {
          float8_block<decltype(count)::value>(panel, width, x + from * c.x_stride, c.x_stride, scales,
                                               sums + from * TILE);
        });
      });
    }
    for (int64_t i = 0; i < rows * 2; ++i)
      finish(c, begin + i / 2, tile, static_cast<int>(i % 2), load(sums + i * LANES));
  }
}

DSTGI_INLINE void float8_rows(const Call& c, int64_t tile) {
  if (c.m > PANEL_ROWS && c.w->block <= PANEL_WIDTH) return float8_by_panels(c, tile);
  by_even_parts(c.m, MAX_ROWS, [&](int64_t from, int64_t to) {
    with_count<MAX_ROWS>(to - from, [&](auto count) { rows_by_float8_tile<decltype(count)::value>(c, from, tile); });
  });
}

DSTGI_INLINE void some_tiles(const Call& c, int64_t begin, int64_t end) {
  for (int64_t tile = begin; tile < end; ++tile)
    c.w->kind == BFLOAT16  ? tile_rows<BFLOAT16>(c, tile)
    : c.w->kind == FLOAT16 ? tile_rows<FLOAT16>(c, tile)
    : c.w->kind == FLOAT8  ? float8_rows(c, tile)
                           : tile_rows<FLOAT32>(c, tile);
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
