// Sixteen float32 or int32 lanes, and the few operations the kernels need on them.
//
// With AVX-512 (BW, DQ, VL; VNNI if there) these are intrinsics. Otherwise, or under DSTGI_PORTABLE, they are GCC vector
// types, which the compiler lowers to whatever the machine has: the kernels above are written once.
// Fused multiply-adds are always asked for by name (the build forbids contraction), so that an element's rounding does
// not depend on which kernel computed it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && !defined(DSTGI_PORTABLE)
#define DSTGI_AVX512 1
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define DSTGI_INLINE static inline __attribute__((always_inline))
// Loops over arrays of vectors must vanish before the compiler decides what lives in registers.
#define DSTGI_UNROLL _Pragma("GCC unroll 64")

namespace simd {

constexpr int LANES = 16;

#ifdef DSTGI_AVX512

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

#else  // portable

typedef float F32 __attribute__((vector_size(64)));
typedef int32_t I32 __attribute__((vector_size(64)));
typedef uint32_t U32 __attribute__((vector_size(64)));
typedef int16_t S16 __attribute__((vector_size(64)));
typedef uint16_t U16 __attribute__((vector_size(64)));

DSTGI_INLINE F32 zero() { return F32{}; }
DSTGI_INLINE F32 set1(float x) { return F32{} + x; }
DSTGI_INLINE F32 load(const float* p) {
  F32 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
DSTGI_INLINE F32 load_n(const float* p, int n) {
  F32 x{};
  std::memcpy(&x, p, sizeof(float) * (n < LANES ? n : LANES));
  return x;
}
DSTGI_INLINE void store(float* p, F32 x) { std::memcpy(p, &x, sizeof x); }
DSTGI_INLINE void store_n(float* p, F32 x, int n) { std::memcpy(p, &x, sizeof(float) * (n < LANES ? n : LANES)); }
DSTGI_INLINE F32 add(F32 a, F32 b) { return a + b; }
DSTGI_INLINE F32 sub(F32 a, F32 b) { return a - b; }
DSTGI_INLINE F32 mul(F32 a, F32 b) { return a * b; }
DSTGI_INLINE F32 div(F32 a, F32 b) { return a / b; }
DSTGI_INLINE F32 fma(F32 a, F32 b, F32 c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__aarch64__)
  F32 r;
  for (int i = 0; i < LANES; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#else
  return a * b + c;
#endif
}
DSTGI_INLINE F32 max(F32 a, F32 b) { return a > b ? a : b; }
DSTGI_INLINE F32 min(F32 a, F32 b) { return a < b ? a : b; }
DSTGI_INLINE F32 to_float(I32 x) { return __builtin_convertvector(x, F32); }
DSTGI_INLINE F32 round_even(F32 x) {
  // Adding and taking away 1.5 * 2**23 rounds to nearest even for |x| < 2**22; larger values are whole already or are
  // saturated by the caller.
  const F32 magic = set1(12582912.0f);
  F32 r = (x + magic) - magic;
  F32 magnitude = x < 0.0f ? -x : x;
  return magnitude < 4194304.0f ? r : x;
}
DSTGI_INLINE I32 to_int(F32 x) { return __builtin_convertvector(round_even(x), I32); }
DSTGI_INLINE F32 as_float(I32 x) { return reinterpret_cast<F32>(x); }
DSTGI_INLINE I32 as_int(F32 x) { return reinterpret_cast<I32>(x); }

DSTGI_INLINE I32 izero() { return I32{}; }
DSTGI_INLINE I32 iset1(int32_t x) { return I32{} + x; }
DSTGI_INLINE I32 iload(const void* p) {
  I32 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
DSTGI_INLINE void istore(void* p, I32 x) { std::memcpy(p, &x, sizeof x); }
DSTGI_INLINE I32 iadd(I32 a, I32 b) { return a + b; }
DSTGI_INLINE I32 imul(I32 a, I32 b) { return a * b; }
DSTGI_INLINE I32 iand(I32 a, I32 b) { return a & b; }
DSTGI_INLINE I32 ior(I32 a, I32 b) { return a | b; }
DSTGI_INLINE I32 imax(I32 a, I32 b) { return a > b ? a : b; }
DSTGI_INLINE I32 imin(I32 a, I32 b) { return a < b ? a : b; }
DSTGI_INLINE I32 shl32(I32 x, int n) { return x << n; }
DSTGI_INLINE I32 shr32(I32 x, int n) { return reinterpret_cast<I32>(reinterpret_cast<U32>(x) >> n); }
DSTGI_INLINE I32 shl16(I32 x, int n) {
  return reinterpret_cast<I32>(reinterpret_cast<U16>(x) << static_cast<uint16_t>(n));
}
DSTGI_INLINE I32 shr16(I32 x, int n) {
  return reinterpret_cast<I32>(reinterpret_cast<U16>(x) >> static_cast<uint16_t>(n));
}
DSTGI_INLINE I32 sar16(I32 x, int n) {
  return reinterpret_cast<I32>(reinterpret_cast<S16>(x) >> static_cast<int16_t>(n));
}
DSTGI_INLINE I32 sub16(I32 a, I32 b) { return reinterpret_cast<I32>(reinterpret_cast<S16>(a) - reinterpret_cast<S16>(b)); }
DSTGI_INLINE I32 load_u8(const uint8_t* p) {
  I32 x;
  for (int i = 0; i < LANES; ++i) x[i] = p[i];
  return x;
}
DSTGI_INLINE I32 dot_pairs(I32 acc, I32 a, I32 b) {
#if defined(__AVX2__)
  __m256i x[2], y[2], s[2];
  std::memcpy(x, &a, sizeof a);
  std::memcpy(y, &b, sizeof b);
  for (int i = 0; i < 2; ++i) s[i] = _mm256_madd_epi16(x[i], y[i]);
  I32 sum;
  std::memcpy(&sum, s, sizeof sum);
  return acc + sum;
#elif defined(__SSE2__)
  __m128i x[4], y[4], s[4];
  std::memcpy(x, &a, sizeof a);
  std::memcpy(y, &b, sizeof b);
  for (int i = 0; i < 4; ++i) s[i] = _mm_madd_epi16(x[i], y[i]);
  I32 sum;
  std::memcpy(&sum, s, sizeof sum);
  return acc + sum;
#else
  I32 low = (a << 16 >> 16) * (b << 16 >> 16);
  return acc + low + (a >> 16) * (b >> 16);
#endif
}
DSTGI_INLINE void store_i16(int16_t* p, I32 x) {
  for (int i = 0; i < LANES; ++i) p[i] = static_cast<int16_t>(x[i] > 32767 ? 32767 : x[i] < -32768 ? -32768 : x[i]);
}
DSTGI_INLINE void store_u8(uint8_t* p, I32 x) {
  for (int i = 0; i < LANES; ++i) p[i] = static_cast<uint8_t>(x[i]);
}
DSTGI_INLINE float half_bits_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, rest = h & 0x7fff;
  uint32_t bits = rest << 13;
  float value;
  if (rest >= 0x7c00) {
    bits |= 0x7f800000;
  } else if (rest >= 0x0400) {
    bits += 112u << 23;
  } else {  // subnormal: rest * 2**-24, exact
    value = static_cast<float>(rest) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &value, 4);
  }
  bits |= sign;
  std::memcpy(&value, &bits, 4);
  return value;
}
DSTGI_INLINE F32 load_half(const uint16_t* p) {
  F32 x;
  for (int i = 0; i < LANES; ++i) x[i] = half_bits_to_float(p[i]);
  return x;
}
DSTGI_INLINE F32 load_e4m3(const uint8_t* p) {
  F32 x;
  for (int i = 0; i < LANES; ++i)
    x[i] = half_bits_to_float(static_cast<uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7));
  return x;
}
DSTGI_INLINE void load_e4m3_twice(const uint8_t* p, F32* x) {
  x[0] = load_e4m3(p);
  x[1] = load_e4m3(p + LANES);
}
DSTGI_INLINE F32 load_bf16(const uint16_t* p) {
  I32 x;
  for (int i = 0; i < LANES; ++i) x[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i]) << 16);
  return as_float(x);
}
DSTGI_INLINE I32 load_s8(const int8_t* p) {
  I32 x;
  for (int i = 0; i < LANES; ++i) x[i] = p[i];
  return x;
}
DSTGI_INLINE F32 lookup(F32 table, I32 index) {
  F32 x;
  for (int i = 0; i < LANES; ++i) x[i] = table[index[i] & 15];
  return x;
}
DSTGI_INLINE F32 if_above(F32 a, F32 b, F32 x, F32 other) { return a > b ? x : other; }
DSTGI_INLINE I32 count_above(I32 count, F32 a, F32 b) { return count - reinterpret_cast<I32>(a > b); }
DSTGI_INLINE F32 scale_by_power(F32 x, F32 n) {
  // In two halves, so that results near the ends of the exponent range stay right.
  I32 whole = to_int(n), half = whole >> 1, rest = whole - half;
  return x * as_float((half + 127) << 23) * as_float((rest + 127) << 23);
}
DSTGI_INLINE F32 keep_below(F32 x, int n, F32 other) {
  for (int i = 0; i < LANES; ++i) x[i] = i < n ? x[i] : other[i];
  return x;
}

#endif

// Lane sums and maxima in one fixed tree, the same on every machine: halves folded onto each other.
DSTGI_INLINE float sum_lanes(F32 x) {
  float a[LANES];
  store(a, x);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a[i] += a[i + width];
  return a[0];
}
DSTGI_INLINE int32_t sum_lanes(I32 x) {
  int32_t a[LANES], sum = 0;
  istore(a, x);
  for (int i = 0; i < LANES; ++i) sum += a[i];
  return sum;
}
DSTGI_INLINE float max_lanes(F32 x) {
  float a[LANES];
  store(a, x);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a[i] = a[i] > a[i + width] ? a[i] : a[i + width];
  return a[0];
}
DSTGI_INLINE int32_t max_lanes(I32 x) {
  int32_t a[LANES];
  istore(a, x);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a[i] = a[i] > a[i + width] ? a[i] : a[i + width];
  return a[0];
}

// e to the x, within 2 ulp from -87.3 to 88.5; tends to 0 below, stays at its bound above; NaN stays NaN.
// Cody-Waite reduction, then Taylor's polynomial of degree 7 on |r| <= ln(2) / 2.
DSTGI_INLINE F32 exp(F32 x) {
  const F32 clamped = min(set1(88.5f), max(set1(-110.0f), x));
  const F32 n = round_even(mul(clamped, set1(1.44269504088896341f)));
  F32 r = fma(n, set1(-0.693145751953125f), clamped);
  r = fma(n, set1(-1.42860682030941723212e-6f), r);
  F32 p = set1(1.9841269841269841e-4f);
  p = fma(p, r, set1(1.3888888888888889e-3f));
  p = fma(p, r, set1(8.3333333333333333e-3f));
  p = fma(p, r, set1(4.1666666666666667e-2f));
  p = fma(p, r, set1(1.6666666666666667e-1f));
  p = fma(p, r, set1(0.5f));
  p = fma(mul(r, r), p, add(r, set1(1.0f)));
  return scale_by_power(p, n);
}

// x / (1 + e**-x)
DSTGI_INLINE F32 silu(F32 x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

}  // namespace simd
