// Linear layers with INT4 or INT8 weights: exact integer products inside a block, one float32 fold a block.
//
//   out[m, n] = sum over blocks of (xscale[m, b] * sum_k digit[m, k] * (code[n, k] - zero[n, b])) * wscale[n, b]
//
// Blocks are folded in ascending order by one fused multiply-add each, so an element's bits depend neither on M nor on
// the path. Few rows: codes are unpacked in registers as they stream from memory, once for all rows. Many rows: a block
// of 32 outputs is unpacked once into an L1 panel of int16 pairs and used by every row.
//
// Code layout, one uint32 lane an output. int4: nibble j holds k = 2j in the low half-word and k = 2j + 1 in the high
// one, so that a shift by 4j and a mask give a pair. int8: bytes k0 k2 k1 k3, so that two arithmetic shifts do.

#include "heads.h"
#include "linear.h"
#include "pool.h"
#include "register_tiles.h"
#include "scratch.h"

namespace dstgi {
namespace {

constexpr int DIRECT_ROWS = 4;  // up to this many rows: unpack in registers
constexpr int BESIDE = MANY_REGISTERS ? 2 : 1;  // vectors of a tile that are summed at once
constexpr int MAX_SUMS = MANY_REGISTERS ? 12 : 6;  // rows times digits of a register tile over a panel
constexpr int MAX_WIDTH = 128;
constexpr int64_t RUNS = 4;  // tasks a thread gets of small work

struct Int4 {
  static constexpr int K = 8, PAIRS = 4;
  static constexpr bool ZEROS = true;
  DSTGI_INLINE I32 pair(I32 c, int p) {
    const I32 moved = p == 0 ? c : shr16(c, 4 * p);
    return p == 3 ? moved : iand(moved, iset1(0x000f000f));
  }
};

struct Int8 {
  static constexpr int K = 4, PAIRS = 2;
  static constexpr bool ZEROS = false;
  DSTGI_INLINE I32 pair(I32 c, int p) { return sar16(p == 0 ? shl16(c, 8) : c, 8); }
};

struct Call {
  const QuantWeight* w;
  const float *x, *norm_weight, *bias, *residual;
  float* out;
  int64_t m, x_stride;
  Prologue prologue;
  float eps;
};

DSTGI_INLINE F32 load_scales(const QuantWeight& w, int64_t at) {
  if (w.scale_kind == 1) return load_half(static_cast<const uint16_t*>(w.scales) + at);
  if (w.scale_kind == 2) return load_bf16(static_cast<const uint16_t*>(w.scales) + at);
  return load(static_cast<const float*>(w.scales) + at);
}

// The one place where integers become float: exact scaling by a power of two, one rounding in the multiply-add.
template <int DIGITS>
DSTGI_INLINE F32 fold(const I32* acc, float xscale, F32 wscale, F32 sum) {
  F32 value = to_float(acc[0]);
  if (DIGITS == 2) value = fma(value, set1(65536.0f), to_float(acc[1]));
  return fma(mul(value, set1(xscale)), wscale, sum);
}

DSTGI_INLINE void finish(const Call& c, int64_t row, int64_t tile, const F32* sums) {
  for (int v = 0; v < 2; ++v) {
    const int64_t n = tile * TILE + v * LANES;
    const int left = static_cast<int>(c.w->n - n);
    if (left <= 0) return;
    F32 y = sums[v];
    const int64_t at = row * c.w->n + n;
    if (c.bias != nullptr) y = add(y, load_n(c.bias + n, left));
    if (c.residual != nullptr) y = add(y, load_n(c.residual + at, left));
    store_n(c.out + at, y, left);
  }
}

// Rows `row` .. `row` + R - 1 against one tile of outputs, unpacking in registers. With many of those, SPLIT independent
// sums hide the multiplier's latency.
template <class Format, int R, int DIGITS>
void direct_tile(const Call& c, const Activations& a, int64_t row, int64_t tile) {
  constexpr int V = BESIDE, P = Format::PAIRS;
  constexpr int SPLIT = !MANY_REGISTERS ? 1 : R == 1 && DIGITS == 1 ? P : R * DIGITS <= 2 ? 2 : 1;
  const QuantWeight& w = *c.w;
  const int64_t loads = w.width / Format::K, rows = MANY_REGISTERS ? R : a.chunk;
  const uint32_t* codes = w.codes + tile * w.blocks * loads * TILE;
  F32 sums[R][2];
  DSTGI_UNROLL
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = zero();
  for (int64_t b = 0; b < w.blocks; ++b, codes += loads * TILE) {
    const int64_t column = (tile * w.blocks + b) * TILE, at = b * rows + row, place = b * (w.width / 2) * rows + row;
    DSTGI_UNROLL
    for (int v0 = 0; v0 < 2; v0 += V) {
      I32 acc[R * V * SPLIT * DIGITS];  // [r][v][split][digit]
      DSTGI_UNROLL
      for (int i = 0; i < R * V * SPLIT * DIGITS; ++i) acc[i] = izero();
      const int32_t* x[2] = {a.pairs[0] + place, a.pairs[1] + place};
      const uint32_t* from = codes + v0 * LANES;
      for (int64_t i = 0; i < loads; ++i, from += TILE, x[0] += P * rows, x[1] += P * rows) {
        I32 q[V][P];
        DSTGI_UNROLL
        for (int j = 0; MANY_REGISTERS && j < V * P; ++j) q[j / P][j % P] = Format::pair(iload(from + j / P * LANES), j % P);
        DSTGI_UNROLL
        for (int p = 0; p < P; ++p) {
          if (!MANY_REGISTERS) q[0][p] = Format::pair(iload(from), p);  // when its turn comes
          DSTGI_UNROLL
          for (int r = 0; r < R; ++r) DSTGI_UNROLL
            for (int d = 0; d < DIGITS; ++d) {
              const I32 pair = iset1(x[d][p * rows + r]);
              DSTGI_UNROLL
              for (int v = 0; v < V; ++v) {
                I32& sum = acc[((r * V + v) * SPLIT + p % SPLIT) * DIGITS + d];
                sum = dot_pairs(sum, q[v][p], pair);
              }
            }
        }
      }
      DSTGI_UNROLL
      for (int v = 0; v < V; ++v) {
        const F32 wscale = load_scales(w, column + (v0 + v) * LANES);
        const I32 zeros = Format::ZEROS ? load_u8(w.zeros + column + (v0 + v) * LANES) : izero();
        DSTGI_UNROLL
        for (int r = 0; r < R; ++r) {
          I32 total[DIGITS];
          DSTGI_UNROLL
          for (int d = 0; d < DIGITS; ++d) {
            total[d] = Format::ZEROS ? imul(zeros, iset1(-a.sum[d][at + r])) : izero();
            DSTGI_UNROLL
            for (int s = 0; s < SPLIT; ++s) total[d] = iadd(total[d], acc[((r * V + v) * SPLIT + s) * DIGITS + d]);
          }
          sums[r][v0 + v] = fold<DIGITS>(total, a.scale[at + r], wscale, sums[r][v0 + v]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r) finish(c, row + r, tile, sums[r]);
}

// Unpacks one block of a tile into `panel` [width / 2][2][16] pairs, zeros taken away.
template <class Format>
DSTGI_INLINE void unpack_panel(const QuantWeight& w, int64_t tile, int64_t b, uint32_t* panel) {
  const int64_t loads = w.width / Format::K;
  const uint32_t* codes = w.codes + (tile * w.blocks + b) * loads * TILE;
  for (int v = 0; v < 2; ++v) {
    I32 zeros = izero();
    if (Format::ZEROS) {
      zeros = load_u8(w.zeros + (tile * w.blocks + b) * TILE + v * LANES);
      zeros = ior(zeros, shl32(zeros, 16));
    }
    for (int64_t i = 0; i < loads; ++i) {
      const I32 eight = iload(codes + i * TILE + v * LANES);
      DSTGI_UNROLL
      for (int p = 0; p < Format::PAIRS; ++p) {
        const I32 q = Format::pair(eight, p);
        istore(panel + (i * Format::PAIRS + p) * TILE + v * LANES, Format::ZEROS ? sub16(q, zeros) : q);
      }
    }
  }
}

// R rows against one block's panel; `sums` [R][2][16] is read, folded into and written back. `x` points at the rows'
// first pairs, `at` at their scales.
template <int R, int DIGITS>
void panel_rows(const uint32_t* panel, int64_t pairs, const Activations& a, const int32_t* const* x, int64_t at,
                const F32* wscale, float* sums) {
  constexpr int V = BESIDE;
  const float* xscale = a.scale + at;
  for (int v0 = 0; v0 < 2; v0 += V) {
    I32 acc[R * V * DIGITS];  // [r][v][digit]
    DSTGI_UNROLL
    for (int i = 0; i < R * V * DIGITS; ++i) acc[i] = izero();
    const int32_t *x0 = x[0], *x1 = x[1];
    const uint32_t* from = panel + v0 * LANES;
    for (int64_t p = 0; p < pairs; ++p, from += TILE, x0 += a.chunk, x1 += a.chunk) {
      I32 q[V];
      DSTGI_UNROLL
      for (int v = 0; v < V; ++v) q[v] = iload(from + v * LANES);
      DSTGI_UNROLL
      for (int r = 0; r < R; ++r) DSTGI_UNROLL
        for (int d = 0; d < DIGITS; ++d) {
          const I32 pair = iset1((d == 0 ? x0 : x1)[r]);
          DSTGI_UNROLL
          for (int v = 0; v < V; ++v)
            acc[(r * V + v) * DIGITS + d] = dot_pairs(acc[(r * V + v) * DIGITS + d], q[v], pair);
        }
    }
    DSTGI_UNROLL
    for (int i = 0; i < R * V; ++i) {
      float* sum = sums + (i / V * 2 + v0 + i % V) * LANES;
      store(sum, fold<DIGITS>(acc + i * DIGITS, xscale[i / V], wscale[v0 + i % V], load(sum)));
    }
  }
}

// All rows against one tile of outputs, by way of panels.
template <class Format, int DIGITS>
void panel_tile(const Call& c, const Activations& a, int64_t tile) {
  constexpr int MAX_ROWS = MAX_SUMS / DIGITS;
  alignas(64) uint32_t panel[MAX_WIDTH / 2 * TILE];
  alignas(64) float sums[CHUNK_ROWS * TILE];
  const QuantWeight& w = *c.w;
  for (int64_t begin = 0; begin < c.m; begin += a.chunk) {
    const int64_t rows = c.m - begin < a.chunk ? c.m - begin : a.chunk;
    const int64_t steps = (rows + MAX_ROWS - 1) / MAX_ROWS;  // as even as can be
    std::memset(sums, 0, sizeof(float) * rows * TILE);
    for (int64_t b = 0; b < w.blocks; ++b) {
      unpack_panel<Format>(w, tile, b, panel);
      const int64_t column = (tile * w.blocks + b) * TILE;
      const F32 wscale[2] = {load_scales(w, column), load_scales(w, column + LANES)};
      for (int64_t s = 0; s < steps; ++s) {
        const int64_t from = rows * s / steps, to = rows * (s + 1) / steps;
        const int64_t at = begin / a.chunk * w.blocks + b, place = at * (w.width / 2) * a.chunk + from;
        const int32_t* x[2] = {a.pairs[0] + place, a.pairs[1] + place};
        with_count<MAX_ROWS>(to - from, [&](auto count) {
          panel_rows<decltype(count)::value, DIGITS>(panel, w.width / 2, a, x, at * a.chunk + from, wscale,
                                                     sums + from * TILE);
        });
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      const F32 row[2] = {load(sums + r * TILE), load(sums + r * TILE + LANES)};
      finish(c, begin + r, tile, row);
    }
  }
}

thread_local Scratch shared_scratch, own_scratch;

float* row_buffer(const Call& c) {
  return reinterpret_cast<float*>(own_scratch.get(align64(static_cast<size_t>(c.w->k) * sizeof(float))));
}

Activations place_digits(const Call& c) {
  const int64_t chunk = even_chunk(c.m);
  return lay_out(*c.w, c.m, chunk, shared_scratch.get(digit_bytes(*c.w, c.m, chunk)));
}

void prepare_row(const Call& c, int64_t row, const Activations& a, float* buffer) {
  const float* x = c.x + row * c.x_stride;
  if (c.prologue == NORM) {
    norm_row(x, c.norm_weight, c.w->k, c.eps, buffer);
    x = buffer;
  } else if (c.prologue == SILU) {
    silu_row(x, x + c.w->k, c.w->k, buffer);
    x = buffer;
  }
  quant_row(*c.w, x, a, row);
}

template <class Format, int DIGITS>
DSTGI_INLINE void direct_rows(const Call& c, const Activations& a, int64_t tile) {
  constexpr int MOST = MANY_REGISTERS ? DIRECT_ROWS : 4 / DIGITS;
  for (int64_t row = 0; row < c.m; row += MOST)
    with_count<MOST>(c.m - row, [&](auto count) { direct_tile<Format, decltype(count)::value, DIGITS>(c, a, row, tile); });
}

template <class Format, int DIGITS>
void direct(const Call& c, int64_t tiles) {
  const Activations a = place_digits(c);
  float* buffer = row_buffer(c);
  for (int64_t row = 0; row < c.m; ++row) prepare_row(c, row, a, buffer);
  // Runs of tiles, so that a thread streams through memory; a few a thread, so that one held up delays little.
  const int64_t runs = tiles < RUNS * c.w->num_threads ? tiles : RUNS * c.w->num_threads;
  parallel(c.w->num_threads, runs, [&](int64_t i) {
    for (int64_t tile = tiles * i / runs; tile < tiles * (i + 1) / runs; ++tile) direct_rows<Format, DIGITS>(c, a, tile);
  });
}

template <class Format, int DIGITS>
void panels(const Call& c, int64_t tiles) {
  const Activations a = place_digits(c);
  parallel(c.w->num_threads, (c.m + RUNS - 1) / RUNS, [&](int64_t i) {
    float* buffer = row_buffer(c);
    for (int64_t row = i * RUNS; row < (i + 1) * RUNS && row < c.m; ++row) prepare_row(c, row, a, buffer);
  });
  parallel(c.w->num_threads, tiles, [&](int64_t tile) { panel_tile<Format, DIGITS>(c, a, tile); });
}

template <class Format, int DIGITS>
void run(const Call& c) {
  const int64_t tiles = (c.w->n + TILE - 1) / TILE;
  if (c.m <= DIRECT_ROWS) return direct<Format, DIGITS>(c, tiles);
  panels<Format, DIGITS>(c, tiles);
}

template <class Format, int DIGITS>
void some_tiles(const Call& c, const Activations& a, int64_t begin, int64_t end) {
  for (int64_t tile = begin; tile < end; ++tile)
    c.m <= DIRECT_ROWS ? direct_rows<Format, DIGITS>(c, a, tile) : panel_tile<Format, DIGITS>(c, a, tile);
}

}  // namespace

void quant_tiles(const QuantWeight& w, const Activations& a, int64_t rows, int64_t begin, int64_t end, float* out) {
  const Call c{&w, nullptr, nullptr, nullptr, nullptr, out, rows, 0, PLAIN, 0.0f};
  if (w.bits == 4) {
    w.digits == 1 ? some_tiles<Int4, 1>(c, a, begin, end) : some_tiles<Int4, 2>(c, a, begin, end);
  } else {
    w.digits == 1 ? some_tiles<Int8, 1>(c, a, begin, end) : some_tiles<Int8, 2>(c, a, begin, end);
  }
}

void quant_row(const QuantWeight& w, const float* x, const Activations& a, int64_t row) {
  w.digits == 1 ? quantise_row<1>(w, x, a, row) : quantise_row<2>(w, x, a, row);
}

}  // namespace dstgi

// out[m, n] (dense rows) = prologue(x)[m, k] @ w.T + bias + residual. x rows lie `x_stride` floats apart; for SILU a row
// is gate [k] then up [k].
DSTGI_API void dstgi_quant_linear(const QuantWeight* w, const float* x, int64_t x_stride, int64_t m, float* out,
                                  const float* bias, const float* residual, int64_t prologue, const float* norm_weight,
                                  float eps) {
  using namespace dstgi;
  if (m <= 0) return;
  const Call c{w, x, norm_weight, bias, residual, out, m, x_stride, static_cast<Prologue>(prologue), eps};
  if (w->bits == 4) {
    w->digits == 1 ? run<Int4, 1>(c) : run<Int4, 2>(c);
  } else {
    w->digits == 1 ? run<Int8, 1>(c) : run<Int8, 2>(c);
  }
}

// codes [n, k] (0..15, or int8 as two's complement bytes) into the layout of `w`; `w->codes` is written.
DSTGI_API void dstgi_pack_codes(const QuantWeight* w, const uint8_t* codes) {
  const int64_t tiles = (w->n + 31) / 32, per_lane = w->bits == 4 ? 8 : 4, loads = w->width / per_lane;
  uint32_t* packed = const_cast<uint32_t*>(w->codes);
  dstgi::parallel(w->num_threads, tiles, [&](int64_t tile) {
    for (int64_t b = 0; b < w->blocks; ++b) {
      const int64_t group = b / w->blocks_per_group, begin = b % w->blocks_per_group * w->width;
      for (int64_t i = 0; i < loads; ++i)
        for (int64_t lane = 0; lane < 32; ++lane) {
          const int64_t n = tile * 32 + lane;
          uint32_t word = 0;
          for (int64_t j = 0; j < per_lane && n < w->n; ++j) {
            const int64_t inside = begin + i * per_lane + j;
            if (inside >= w->group_size) break;
            const uint32_t code = codes[n * w->k + group * w->group_size + inside];
            const int64_t shift = w->bits == 4 ? j / 2 * 4 + j % 2 * 16 : j / 2 * 8 + j % 2 * 16;
            word |= code << shift;
          }
          packed[((tile * w->blocks + b) * loads + i) * 32 + lane] = word;
        }
    }
  });
}

// Rows `ids` [t] of an int8 weight with float16 scales as float32 [t, k]: an embedding that shares the head's storage.
DSTGI_API void dstgi_quant_rows(const QuantWeight* w, const int64_t* ids, int64_t t, float* out) {
  using namespace dstgi;
  const int64_t loads = w->width / Int8::K;
  for (int64_t i = 0; i < t; ++i) {
    const int64_t tile = ids[i] / TILE, lane = ids[i] % TILE;
    for (int64_t k = 0; k < w->k; ++k) {
      const int64_t group = k / w->group_size, inside = k % w->group_size;
      const int64_t b = group * w->blocks_per_group + inside / w->width, j = inside % w->width;
      const uint32_t word = w->codes[((tile * w->blocks + b) * loads + j / 4) * TILE + lane];
      const int shift = static_cast<int>(j % 4 / 2 * 8 + j % 2 * 16);
      const int8_t code = static_cast<int8_t>(word >> shift & 0xff);
      out[i * w->k + k] = code * from_half(static_cast<const uint16_t*>(w->scales)[(tile * w->blocks + b) * TILE + lane]);
    }
  }
}
