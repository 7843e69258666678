// A 16 x 16 float32 transpose.
#pragma once

#include "simd.h"

namespace dstgi {

using namespace simd;

#ifdef DSTGI_AVX2
// Lane j of one half of rows[i], i < 8, becomes out[j * stride] lane i.
DSTGI_INLINE void transpose8(const F32* rows, __m256 F32::*half, float* out, int64_t stride) {
  __m256 a[8], b[8];
  DSTGI_UNROLL
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm256_unpacklo_ps(rows[2 * i].*half, rows[2 * i + 1].*half);
    a[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i].*half, rows[2 * i + 1].*half);
  }
  DSTGI_UNROLL
  for (int i = 0; i < 2; ++i) {
    b[4 * i] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
    b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0xee);
    b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
    b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xee);
  }
  // b[4 g + c] holds, in 128-bit lane l, column 4 l + c of rows 4 g to 4 g + 3.
  DSTGI_UNROLL
  for (int c = 0; c < 4; ++c) {
    _mm256_storeu_ps(out + c * stride, _mm256_permute2f128_ps(b[c], b[4 + c], 0x20));
    _mm256_storeu_ps(out + (4 + c) * stride, _mm256_permute2f128_ps(b[c], b[4 + c], 0x31));
  }
}
#endif

// rows[i] lane j becomes out[j * stride] lane i.
DSTGI_INLINE void transpose16(const F32* rows, float* out, int64_t stride) {
#ifdef DSTGI_AVX512
  __m512 a[16], b[16];
  DSTGI_UNROLL
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
  }
  DSTGI_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __m512d p0 = _mm512_castps_pd(a[4 * i]), p1 = _mm512_castps_pd(a[4 * i + 1]);
    const __m512d p2 = _mm512_castps_pd(a[4 * i + 2]), p3 = _mm512_castps_pd(a[4 * i + 3]);
    b[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(p0, p2));
    b[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(p0, p2));
    b[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(p1, p3));
    b[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(p1, p3));
  }
  // b[4 g + c] holds, in 128-bit lane l, column 4 l + c of rows 4 g to 4 g + 3.
  DSTGI_UNROLL
  for (int c = 0; c < 4; ++c) {
    const __m512 low01 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88), high01 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xdd);
    const __m512 low23 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);
    const __m512 high23 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xdd);
    store(out + c * stride, _mm512_shuffle_f32x4(low01, low23, 0x88));
    store(out + (4 + c) * stride, _mm512_shuffle_f32x4(high01, high23, 0x88));
    store(out + (8 + c) * stride, _mm512_shuffle_f32x4(low01, low23, 0xdd));
    store(out + (12 + c) * stride, _mm512_shuffle_f32x4(high01, high23, 0xdd));
  }
#elif defined(DSTGI_AVX2)
  for (int i = 0; i < 16; i += 8) {
    transpose8(rows + i, &F32::low, out + i, stride);
    transpose8(rows + i, &F32::high, out + 8 * stride + i, stride);
  }
#else
  float flat[16][16];
  for (int i = 0; i < 16; ++i) store(flat[i], rows[i]);
  for (int j = 0; j < 16; ++j)
    for (int i = 0; i < 16; ++i) out[j * stride + i] = flat[i][j];
#endif
}

}  // namespace dstgi
