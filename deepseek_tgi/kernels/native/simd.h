// Sixteen float32 or int32 lanes, and the few operations the kernels need on them.
//
// Three files give them, the kernels above are written once: AVX-512 (BW, DQ, VL; VNNI if there); AVX2 with FMA and
// F16C; and, without those or under DSTGI_PORTABLE, GCC vector types. What they compute is the same, bit for bit.
// Fused multiply-adds are always asked for by name (the build forbids contraction), so that an element's rounding does
// not depend on which kernel computed it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && !defined(DSTGI_PORTABLE)
#define DSTGI_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(DSTGI_PORTABLE)
#define DSTGI_AVX2 1
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define DSTGI_INLINE static inline __attribute__((always_inline))
// Loops over arrays of vectors must vanish before the compiler decides what lives in registers.
#define DSTGI_UNROLL _Pragma("GCC unroll 64")
// A register tile by itself: its callers' variables do not compete for the registers.
#define DSTGI_APART __attribute__((noinline))

namespace simd {

constexpr int LANES = 16;

// Each file also says how many values its REGISTERS hold: register tiles are cut to that.
#if defined(DSTGI_AVX512)
#include "simd_avx512.h"
#elif defined(DSTGI_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

#ifndef DSTGI_AVX2
// x, which a tile will use more than once.
DSTGI_INLINE F32 held(F32 x) { return x; }

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
#endif

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
