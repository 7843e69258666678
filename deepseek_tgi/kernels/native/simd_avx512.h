// The lanes of simd.h as one AVX-512 register (BW, DQ, VL; VNNI if there). Included by simd.h alone, inside its namespace.
#pragma once

constexpr int REGISTERS = 32;

using F32 = __m512;
using I32 = __m512i;

DSTGI_INLINE __mmask16 first(int n) { return n >= LANES ? 0xffff : static_cast<__mmask16>((1u << n) - 1); }

DSTGI_INLINE F32 zero() { return _mm512_setzero_ps(); }
DSTGI_INLINE F32 set1(float x) { return _mm512_set1_ps(x); }
DSTGI_INLINE F32 load(const float* p) { return _mm512_loadu_ps(p); }
DSTGI_INLINE F32 load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
DSTGI_INLINE void store(float* p, F32 x) { _mm512_storeu_ps(p, x); }
DSTGI_INLINE void store_n(float* p, F32 x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
DSTGI_INLINE F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
DSTGI_INLINE F32 sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
DSTGI_INLINE F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
DSTGI_INLINE F32 div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
DSTGI_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
// A NaN in `b` wins in both: callers put the data there.
DSTGI_INLINE F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
DSTGI_INLINE F32 min(F32 a, F32 b) { return _mm512_min_ps(a, b); }
DSTGI_INLINE F32 to_float(I32 x) { return _mm512_cvtepi32_ps(x); }
DSTGI_INLINE I32 to_int(F32 x) { return _mm512_cvtps_epi32(x); }
DSTGI_INLINE F32 as_float(I32 x) { return _mm512_castsi512_ps(x); }
DSTGI_INLINE I32 as_int(F32 x) { return _mm512_castps_si512(x); }

DSTGI_INLINE I32 izero() { return _mm512_setzero_si512(); }
DSTGI_INLINE I32 iset1(int32_t x) { return _mm512_set1_epi32(x); }
DSTGI_INLINE I32 iload(const void* p) { return _mm512_loadu_si512(p); }
DSTGI_INLINE void istore(void* p, I32 x) { _mm512_storeu_si512(p, x); }
DSTGI_INLINE I32 iadd(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
DSTGI_INLINE I32 imul(I32 a, I32 b) { return _mm512_mullo_epi32(a, b); }
DSTGI_INLINE I32 iand(I32 a, I32 b) { return _mm512_and_si512(a, b); }
DSTGI_INLINE I32 ior(I32 a, I32 b) { return _mm512_or_si512(a, b); }
DSTGI_INLINE I32 imax(I32 a, I32 b) { return _mm512_max_epi32(a, b); }
DSTGI_INLINE I32 imin(I32 a, I32 b) { return _mm512_min_epi32(a, b); }
DSTGI_INLINE I32 shl32(I32 x, int n) { return _mm512_slli_epi32(x, n); }
DSTGI_INLINE I32 shr32(I32 x, int n) { return _mm512_srli_epi32(x, n); }
DSTGI_INLINE I32 shl16(I32 x, int n) { return _mm512_slli_epi16(x, n); }
DSTGI_INLINE I32 shr16(I32 x, int n) { return _mm512_srli_epi16(x, n); }
DSTGI_INLINE I32 sar16(I32 x, int n) { return _mm512_srai_epi16(x, n); }
DSTGI_INLINE I32 sub16(I32 a, I32 b) { return _mm512_sub_epi16(a, b); }
DSTGI_INLINE I32 load_u8(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// Per lane: acc + a.low * b.low + a.high * b.high, signed 16-bit factors, exact.
DSTGI_INLINE I32 dot_pairs(I32 acc, I32 a, I32 b) {
#ifdef __AVX512VNNI__
  // As assembly: around the intrinsic, GCC 12 keeps the sums of a large tile on the stack instead of in registers.
  asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
#else
  return _mm512_add_epi32(acc, _mm512_madd_epi16(a, b));
#endif
}
// Sixteen int32 to int16, saturating.
DSTGI_INLINE void store_i16(int16_t* p, I32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(x));
}
DSTGI_INLINE void store_u8(uint8_t* p, I32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}
DSTGI_INLINE F32 load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// Sixteen float8 E4M3 times 2^-8: their bits, moved, are those of a half. NaN is not known here.
DSTGI_INLINE F32 load_e4m3(const uint8_t* p) {
  const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 8);
  const __m256i mask = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
  return _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(high, 1), mask));
}
// Thirty-two of them, for two thirds of the work.
DSTGI_INLINE void load_e4m3_twice(const uint8_t* p, F32* x) {
  const I32 high = _mm512_slli_epi16(_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 8);
  const I32 halves = iand(_mm512_srai_epi16(high, 1), _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
  x[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
  x[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
}
DSTGI_INLINE F32 load_bf16(const uint16_t* p) {
  return as_float(shl32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
DSTGI_INLINE I32 load_s8(const int8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// table[index], of which the low four bits count.
DSTGI_INLINE F32 lookup(F32 table, I32 index) { return _mm512_permutexvar_ps(index, table); }
// `x` where a > b, else `other`.
DSTGI_INLINE F32 if_above(F32 a, F32 b, F32 x, F32 other) {
  return _mm512_mask_mov_ps(other, _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), x);
}
DSTGI_INLINE I32 count_above(I32 count, F32 a, F32 b) {
  return _mm512_mask_add_epi32(count, _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), count, _mm512_set1_epi32(1));
}
// 2 to the n, n whole and within float32's exponents (or far below: 0).
DSTGI_INLINE F32 scale_by_power(F32 x, F32 n) { return _mm512_scalef_ps(x, n); }
DSTGI_INLINE F32 round_even(F32 x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// x where limit[lane] > index + lane, else `other`; used for causal masks.
DSTGI_INLINE F32 keep_below(F32 x, int n, F32 other) {
  return _mm512_mask_mov_ps(other, n <= 0 ? static_cast<__mmask16>(0) : first(n), x);
}
