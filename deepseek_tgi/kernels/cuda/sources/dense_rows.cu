// out = x W^T (+ bias) (+ residual) in float32 for few rows of x and a float32 weight: a router's gate, which must be exact.
// A warp a weight row, TOKENS rows of x at a time; the order of a sum depends on K alone, so a row has the same bits
// whatever the batch. X_BF16 tells x's dtype; rows of x lie x_stride apart. Macros: TOKENS, THREADS, X_BF16, OUT_BF16.
#include "device.cuh"

DEVICE words4 four(const void* x, i64 at) {
  if (!X_BF16) return *(const words4*)((const float*)x + at);
  const words2 v = *(const words2*)((const u16*)x + at);
  return {v.x << 16, v.x & 0xFFFF0000u, v.y << 16, v.y & 0xFFFF0000u};
}

extern "C" __global__ void __launch_bounds__(THREADS)
    dense_rows(const void* __restrict__ x, i64 x_stride, const float* __restrict__ weight, const float* __restrict__ bias,
               const float* residual, void* out, int rows, int n, int k) {
  const int lane = lane_id(), row = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, first = blockIdx.y * TOKENS;
  let_next_start();
  wait_for_earlier();
  if (row >= n) return;
  float sum[TOKENS] = {};
  for (int at = lane * 4; at < k; at += 128) {
    const words4 w = *(const words4*)(weight + (i64)row * k + at);
#pragma unroll
    for (int m = 0; m < TOKENS; m++) {
      const int token = first + m < rows ? first + m : rows - 1;
      const words4 v = four(x, token * x_stride + at);
      sum[m] += bits_float(w.x) * bits_float(v.x) + bits_float(w.y) * bits_float(v.y) + bits_float(w.z) * bits_float(v.z) +
                bits_float(w.w) * bits_float(v.w);
    }
  }
#pragma unroll
  for (int m = 0; m < TOKENS; m++) {
    float total = warp_sum(sum[m]);
    if (lane || first + m >= rows) continue;
    const i64 to = (i64)(first + m) * n + row;
    if (bias) total += bias[row];
    if (residual) total += residual[to];
    if (OUT_BF16) {
      ((u16*)out)[to] = float_bf16(total);
    } else {
      ((float*)out)[to] = total;
    }
  }
}
EXPORT(dense_rows)
