// The lanes of simd.h as two AVX2 registers (FMA, F16C). Included by simd.h alone, inside its namespace.
#pragma once

constexpr int REGISTERS = 8;

struct F32 {
  __m256 low, high;
};
struct I32 {
  __m256i low, high;
};

// All bits of the lanes below n.
DSTGI_INLINE I32 first(int n) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes), _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lanes)};
}

DSTGI_INLINE F32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
DSTGI_INLINE F32 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
DSTGI_INLINE F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
// x, in registers: left alone, GCC 12 reads a right factor from memory once for each row of a tile.
DSTGI_INLINE F32 held(F32 x) {
  asm("" : "+x"(x.low), "+x"(x.high));
  return x;
}
DSTGI_INLINE F32 load_n(const float* p, int n) {
  if (n >= LANES) return load(p);
  const I32 wanted = first(n);
  return {_mm256_maskload_ps(p, wanted.low), _mm256_maskload_ps(p + 8, wanted.high)};
}
DSTGI_INLINE void store(float* p, F32 x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
DSTGI_INLINE void store_n(float* p, F32 x, int n) {
  if (n >= LANES) return store(p, x);
  const I32 wanted = first(n);
  _mm256_maskstore_ps(p, wanted.low, x.low);
  _mm256_maskstore_ps(p + 8, wanted.high, x.high);
}
DSTGI_INLINE F32 add(F32 a, F32 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
DSTGI_INLINE F32 sub(F32 a, F32 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
DSTGI_INLINE F32 mul(F32 a, F32 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
DSTGI_INLINE F32 div(F32 a, F32 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
DSTGI_INLINE F32 fma(F32 a, F32 b, F32 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
// A NaN in `b` wins in both: callers put the data there.
DSTGI_INLINE F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
DSTGI_INLINE F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
DSTGI_INLINE F32 to_float(I32 x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
DSTGI_INLINE I32 to_int(F32 x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }
DSTGI_INLINE F32 as_float(I32 x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }
DSTGI_INLINE I32 as_int(F32 x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }

DSTGI_INLINE I32 izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
DSTGI_INLINE I32 iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
DSTGI_INLINE I32 iload(const void* p) {
  const __m256i* at = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
DSTGI_INLINE void istore(void* p, I32 x) {
  __m256i* at = static_cast<__m256i*>(p);
  _mm256_storeu_si256(at, x.low);
  _mm256_storeu_si256(at + 1, x.high);
}
DSTGI_INLINE I32 iadd(I32 a, I32 b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
DSTGI_INLINE I32 imul(I32 a, I32 b) { return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)}; }
DSTGI_INLINE I32 iand(I32 a, I32 b) { return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)}; }
DSTGI_INLINE I32 ior(I32 a, I32 b) { return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)}; }
DSTGI_INLINE I32 imax(I32 a, I32 b) { return {_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)}; }
DSTGI_INLINE I32 imin(I32 a, I32 b) { return {_mm256_min_epi32(a.low, b.low), _mm256_min_epi32(a.high, b.high)}; }
DSTGI_INLINE I32 shl32(I32 x, int n) { return {_mm256_slli_epi32(x.low, n), _mm256_slli_epi32(x.high, n)}; }
DSTGI_INLINE I32 shr32(I32 x, int n) { return {_mm256_srli_epi32(x.low, n), _mm256_srli_epi32(x.high, n)}; }
DSTGI_INLINE I32 shl16(I32 x, int n) { return {_mm256_slli_epi16(x.low, n), _mm256_slli_epi16(x.high, n)}; }
DSTGI_INLINE I32 shr16(I32 x, int n) { return {_mm256_srli_epi16(x.low, n), _mm256_srli_epi16(x.high, n)}; }
DSTGI_INLINE I32 sar16(I32 x, int n) { return {_mm256_srai_epi16(x.low, n), _mm256_srai_epi16(x.high, n)}; }
DSTGI_INLINE I32 sub16(I32 a, I32 b) { return {_mm256_sub_epi16(a.low, b.low), _mm256_sub_epi16(a.high, b.high)}; }

DSTGI_INLINE __m128i load_eight(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
DSTGI_INLINE __m128i load_sixteen(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

DSTGI_INLINE I32 load_u8(const uint8_t* p) {
  return {_mm256_cvtepu8_epi32(load_eight(p)), _mm256_cvtepu8_epi32(load_eight(p + 8))};
}
DSTGI_INLINE I32 load_s8(const int8_t* p) {
  return {_mm256_cvtepi8_epi32(load_eight(p)), _mm256_cvtepi8_epi32(load_eight(p + 8))};
}
// Per lane: acc + a.low * b.low + a.high * b.high, signed 16-bit factors, exact.
DSTGI_INLINE void add_dot(__m256i& acc, __m256i a, __m256i b) {
  // As assembly: around the intrinsics, GCC 12 makes all products of a tile first and keeps its sums on the stack.
  __m256i products;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(acc), "=&x"(products) : "x"(a), "x"(b));
}
DSTGI_INLINE I32 dot_pairs(I32 acc, I32 a, I32 b) {
  add_dot(acc.low, a.low, b.low);
  add_dot(acc.high, a.high, b.high);
  return acc;
}
// Sixteen int32 to int16, saturating.
DSTGI_INLINE __m256i narrow(I32 x) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xd8); }
DSTGI_INLINE void store_i16(int16_t* p, I32 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
DSTGI_INLINE void store_u8(uint8_t* p, I32 x) {
  const __m256i words = narrow(iand(x, iset1(255)));
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
DSTGI_INLINE F32 load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(load_sixteen(p)), _mm256_cvtph_ps(load_sixteen(p + 8))};
}
// Sixteen float8 E4M3 times 2^-8: their bits, moved, are those of a half. NaN is not known here.
DSTGI_INLINE F32 load_e4m3(const uint8_t* p) {
  const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(load_sixteen(p)), 8);
  const __m256i mask = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
  const __m256i halves = _mm256_and_si256(_mm256_srai_epi16(high, 1), mask);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
DSTGI_INLINE void load_e4m3_twice(const uint8_t* p, F32* x) {
  x[0] = load_e4m3(p);
  x[1] = load_e4m3(p + LANES);
}
DSTGI_INLINE F32 load_bf16(const uint16_t* p) {
  return as_float(shl32({_mm256_cvtepu16_epi32(load_sixteen(p)), _mm256_cvtepu16_epi32(load_sixteen(p + 8))}, 16));
}
// table[index], of which the low four bits count.
DSTGI_INLINE __m256 lookup_half(F32 table, __m256i index) {
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, index), _mm256_permutevar8x32_ps(table.high, index),
                          _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}
DSTGI_INLINE F32 lookup(F32 table, I32 index) { return {lookup_half(table, index.low), lookup_half(table, index.high)}; }

// x where the lane's highest bit is set in `wanted`, else `other`.
DSTGI_INLINE F32 choose(F32 wanted, F32 x, F32 other) {
  return {_mm256_blendv_ps(other.low, x.low, wanted.low), _mm256_blendv_ps(other.high, x.high, wanted.high)};
}
DSTGI_INLINE F32 above(F32 a, F32 b) {
  return {_mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ)};
}
// `x` where a > b, else `other`.
DSTGI_INLINE F32 if_above(F32 a, F32 b, F32 x, F32 other) { return choose(above(a, b), x, other); }
DSTGI_INLINE I32 count_above(I32 count, F32 a, F32 b) {
  const I32 ones = as_int(above(a, b));  // -1 where it is
  return {_mm256_sub_epi32(count.low, ones.low), _mm256_sub_epi32(count.high, ones.high)};
}
DSTGI_INLINE F32 round_even(F32 x) {
  constexpr int MODE = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, MODE), _mm256_round_ps(x.high, MODE)};
}
// 2 to the n, n whole and within float32's exponents (or far below: 0).
DSTGI_INLINE F32 scale_by_power(F32 x, F32 n) {
  // In two halves, so that results near the ends of the exponent range stay right.
  const I32 whole = to_int(n);
  const I32 half = {_mm256_srai_epi32(whole.low, 1), _mm256_srai_epi32(whole.high, 1)};
  const I32 rest = {_mm256_sub_epi32(whole.low, half.low), _mm256_sub_epi32(whole.high, half.high)};
  const F32 first_factor = as_float(shl32(iadd(half, iset1(127)), 23));
  return mul(mul(x, first_factor), as_float(shl32(iadd(rest, iset1(127)), 23)));
}
// x where limit[lane] > index + lane, else `other`; used for causal masks.
DSTGI_INLINE F32 keep_below(F32 x, int n, F32 other) { return choose(as_float(first(n)), x, other); }

// Lane sums and maxima in simd.h's tree.
DSTGI_INLINE float sum_lanes(F32 x) {
  const __m256 eight = _mm256_add_ps(x.low, x.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
DSTGI_INLINE float max_lanes(F32 x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
DSTGI_INLINE int32_t sum_lanes(I32 x) {
  const __m256i eight = _mm256_add_epi32(x.low, x.high);
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
DSTGI_INLINE int32_t max_lanes(I32 x) {
  const __m256i eight = _mm256_max_epi32(x.low, x.high);
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
