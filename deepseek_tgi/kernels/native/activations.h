// Activations as block-scaled integers, the left operand of the integer products.
//
// Choice: each block of x (as wide as the weight's) becomes int16 digits of a power of two, x = 2^e * (d0 + d1 / 65536),
// so that products and sums inside a block are exact integers, whatever order a kernel takes them in. One digit keeps 15
// bits of the block's largest element, which is never worse than rounding every element to bfloat16 (8 bits each); two
// digits keep 31, which is float32 in all but name. Prevents: results that depend on tile sizes, and the 2% error of
// 8-bit activations. Rejected: bfloat16 products, at the same speed: less exact, and their sums depend on the order.
#pragma once

#include "api.h"
#include "rows.h"
#include "scratch.h"

namespace dstgi {

constexpr int CHUNK_ROWS = 96;  // rows whose sums stay in L1 while a block of weights is used

// What the products read. Rows come in chunks of `chunk` (the last may be shorter); `pairs` hold two neighbouring digits
// of one row, [chunk][block][width / 2][row in chunk], so that the rows of a tile lie side by side. Each block and row
// has a scale (NaN if the block holds a NaN or an infinity: the whole row becomes NaN) and a sum of its digits.
struct Activations {
  int32_t* pairs[2];
  float* scale;     // [chunk][block][row in chunk]
  int32_t* sum[2];  // the same
  int64_t chunk;
};

constexpr int32_t MIN_EXPONENT = 31;  // smallest biased exponent whose scales are still normal numbers

// Sixteen digits of one row into its place: eight pairs, `chunk` apart.
DSTGI_INLINE void store_digits(int32_t* pairs, int64_t chunk, I32 digits) {
  if (chunk == 1) return store_i16(reinterpret_cast<int16_t*>(pairs), digits);
  int32_t together[LANES / 2];
  store_i16(reinterpret_cast<int16_t*>(together), digits);
  for (int i = 0; i < LANES / 2; ++i) pairs[i * chunk] = together[i];
}

// One block of one row: `valid` elements of x, `width` digits (the rest 0). `at` counts [chunk][block], `row` inside.
template <int DIGITS>
DSTGI_INLINE void quantise_block(const float* x, int valid, int width, const Activations& a, int64_t at, int64_t row) {
  I32 largest = izero();
  const I32 magnitude = iset1(0x7fffffff);
  for (int i = 0; i < valid; i += LANES) largest = imax(largest, iand(as_int(load_n(x + i, valid - i)), magnitude));
  const int32_t bits = max_lanes(largest);
  const bool finite = bits < 0x7f800000;
  // The added 2^9 leaves room for rounding up: the largest digit is at most 32766.
  int32_t exponent = (finite ? bits + 512 : 0) >> 23;
  exponent = exponent < MIN_EXPONENT ? MIN_EXPONENT : exponent;
  const F32 inverse = as_float(iset1((268 - exponent) << 23));
  const F32 step = as_float(iset1((exponent - 14) << 23));
  const int64_t place = at * (width / 2) * a.chunk + row;
  I32 sum[2] = {izero(), izero()};
  for (int i = 0; i < width; i += LANES) {
    const F32 v = finite && i < valid ? load_n(x + i, valid - i) : zero();
    const I32 high = to_int(mul(v, inverse));
    store_digits(a.pairs[0] + place + i / 2 * a.chunk, a.chunk, high);
    sum[0] = iadd(sum[0], high);
    if (DIGITS == 2) {
      const F32 left = fma(sub(zero(), to_float(high)), step, v);  // exact: both are multiples of x's last bit
      // Half a step would be 32768, one more than a digit holds.
      const I32 low = imin(to_int(mul(mul(left, inverse), set1(65536.0f))), iset1(32767));
      store_digits(a.pairs[1] + place + i / 2 * a.chunk, a.chunk, low);
      sum[1] = iadd(sum[1], low);
    }
  }
  const int32_t scale_bits = finite ? (exponent - 14 - (DIGITS == 2 ? 16 : 0)) << 23 : 0x7fc00000;
  std::memcpy(a.scale + at * a.chunk + row, &scale_bits, sizeof scale_bits);
  for (int d = 0; d < DIGITS; ++d) a.sum[d][at * a.chunk + row] = sum_lanes(sum[d]);
}

// Row `row` of x, [k], into its place.
template <int DIGITS>
DSTGI_INLINE void quantise_row(const QuantWeight& w, const float* x, const Activations& a, int64_t row) {
  for (int64_t block = 0; block < w.blocks; ++block) {
    const int64_t group = block / w.blocks_per_group, begin = block % w.blocks_per_group * w.width;
    int64_t valid = w.group_size - begin;
    valid = valid < 0 ? 0 : valid > w.width ? w.width : valid;
    quantise_block<DIGITS>(x + group * w.group_size + begin, static_cast<int>(valid), static_cast<int>(w.width), a,
                           row / a.chunk * w.blocks + block, row % a.chunk);
  }
}

// Rows of a chunk when there are `rows`: as few chunks as can be, as even as can be.
DSTGI_INLINE int64_t even_chunk(int64_t rows) {
  const int64_t chunks = (rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
  return (rows + chunks - 1) / chunks;
}

// Bytes of `each` words for every block of `rows` rows, in whole chunks.
DSTGI_INLINE size_t block_bytes(const QuantWeight& w, int64_t rows, int64_t chunk, int64_t each) {
  return align64(static_cast<size_t>(w.blocks * ((rows + chunk - 1) / chunk * chunk) * each) * sizeof(int32_t));
}

// Bytes that `rows` rows for `w` take, and their places in so much memory.
DSTGI_INLINE size_t digit_bytes(const QuantWeight& w, int64_t rows, int64_t chunk) {
  return block_bytes(w, rows, chunk, w.width / 2) * w.digits + block_bytes(w, rows, chunk, 1) * (w.digits + 1);
}

DSTGI_INLINE Activations lay_out(const QuantWeight& w, int64_t rows, int64_t chunk, char* memory) {
  const size_t words = block_bytes(w, rows, chunk, 1), pairs = block_bytes(w, rows, chunk, w.width / 2);
  Activations a{};
  a.chunk = chunk;
  for (int64_t d = 0; d < w.digits; ++d, memory += pairs) a.pairs[d] = reinterpret_cast<int32_t*>(memory);
  for (int64_t d = 0; d < w.digits; ++d, memory += words) a.sum[d] = reinterpret_cast<int32_t*>(memory);
  a.scale = reinterpret_cast<float*>(memory);
  if (w.digits == 1) a.pairs[1] = a.pairs[0];  // never read, but offset
  return a;
}

}  // namespace dstgi
