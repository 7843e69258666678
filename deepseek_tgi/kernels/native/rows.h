// Row operations shared by the elementwise ops and the linears' prologues, so that fused and separate give the same bits.
#pragma once

#include <cmath>

#include "simd.h"

namespace dstgi {

using namespace simd;

// 1 / sqrt(mean(x^2) + eps). Four running sums of sixteen lanes, added in a fixed order.
DSTGI_INLINE float inverse_rms(const float* x, int64_t width, float eps) {
  F32 sum[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * LANES <= width; i += 4 * LANES)
    for (int j = 0; j < 4; ++j) {
      const F32 v = load(x + i + j * LANES);
      sum[j] = fma(v, v, sum[j]);
    }
  for (; i < width; i += LANES) {
    const F32 v = load_n(x + i, static_cast<int>(width - i));
    sum[0] = fma(v, v, sum[0]);
  }
  const float total = sum_lanes(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
  return 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
}

DSTGI_INLINE F32 norm_lanes(F32 x, F32 inverse, F32 weight) { return mul(mul(x, inverse), weight); }

DSTGI_INLINE void norm_row(const float* x, const float* weight, int64_t width, float eps, float* out) {
  const F32 inverse = set1(inverse_rms(x, width, eps));
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) store(out + i, norm_lanes(load(x + i), inverse, load(weight + i)));
  const int rest = static_cast<int>(width - i);
  if (rest > 0) store_n(out + i, norm_lanes(load_n(x + i, rest), inverse, load_n(weight + i, rest)), rest);
}

DSTGI_INLINE void silu_row(const float* gate, const float* up, int64_t width, float* out) {
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) store(out + i, mul(silu(load(gate + i)), load(up + i)));
  const int rest = static_cast<int>(width - i);
  if (rest > 0) store_n(out + i, mul(silu(load_n(gate + i, rest)), load_n(up + i, rest)), rest);
}

}  // namespace dstgi
