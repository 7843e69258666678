// out = x W^T (+ bias) (+ residual) in float32 for few rows of x and a float32 weight: a router's gate, which must be exact.
// A block a weight row and TOKENS rows of x; the order of a sum depends on K alone, so a row has the same bits whatever
// the batch. The weight's first part is asked for before the kernel ahead has ended. X_BF16 tells x's dtype; rows of x
// lie x_stride apart. Macros: TOKENS, THREADS, X_BF16, OUT_BF16.
#include "device.cuh"

constexpr int AHEAD = 4;

DEVICE words4 four(const void* x, i64 at) {
  if (!X_BF16) return *(const words4*)((const float*)x + at);
  const words2 v = *(const words2*)((const u16*)x + at);
  return {v.x << 16, v.x & 0xFFFF0000u, v.y << 16, v.y & 0xFFFF0000u};
}
DEVICE float dot(const words4& a, const words4& b) {
  return bits_float(a.x) * bits_float(b.x) + bits_float(a.y) * bits_float(b.y) + bits_float(a.z) * bits_float(b.z) +
         bits_float(a.w) * bits_float(b.w);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    dense_rows(const void* __restrict__ x, i64 x_stride, const float* __restrict__ weight, const float* __restrict__ bias,
               const float* residual, void* out, int rows, int n, int k) {
  __shared__ float parts[TOKENS][THREADS / 32];
  const int row = blockIdx.x, first = blockIdx.y * TOKENS, begin = threadIdx.x * 4, step = THREADS * 4;
  const float* line = weight + (i64)row * k;
  words4 w[AHEAD];
#pragma unroll
  for (int j = 0; j < AHEAD; j++)
    if (begin + j * step < k) w[j] = *(const words4*)(line + begin + j * step);
  let_next_start();
  wait_for_earlier();
  float sum[TOKENS] = {};
#pragma unroll
  for (int j = 0; j < AHEAD; j++)
    if (begin + j * step < k)
#pragma unroll
      for (int m = 0; m < TOKENS; m++) {
        const int token = first + m < rows ? first + m : rows - 1;
        sum[m] += dot(w[j], four(x, token * x_stride + begin + j * step));
      }
  for (int at = begin + AHEAD * step; at < k; at += step) {
    const words4 more = *(const words4*)(line + at);
#pragma unroll
    for (int m = 0; m < TOKENS; m++) {
      const int token = first + m < rows ? first + m : rows - 1;
      sum[m] += dot(more, four(x, token * x_stride + at));
    }
  }
#pragma unroll
  for (int m = 0; m < TOKENS; m++) {
    const float part = warp_sum(sum[m]);
    if (lane_id() == 0) parts[m][threadIdx.x / 32] = part;
  }
  block_sync();
  const int token = first + threadIdx.x;
  if (threadIdx.x >= TOKENS || token >= rows) return;
  float total = 0.0f;
  for (int i = 0; i < THREADS / 32; i++) total += parts[threadIdx.x][i];
  const i64 to = (i64)token * n + row;
  if (bias) total += bias[row];
  if (residual) total += residual[to];
  if (OUT_BF16) {
    ((u16*)out)[to] = float_bf16(total);
  } else {
    ((float*)out)[to] = total;
  }
}
EXPORT(dense_rows)
