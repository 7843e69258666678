// RMS norm of rows: out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight, in float32, stored as OUT_BF16 says.
// One block of THREADS a row; a row's bits depend on itself alone. X_BF16 rows are bfloat16, else float32.
#include "device.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(const void* __restrict__ x, i64 x_stride, const float* __restrict__ weight, float eps, void* __restrict__ out,
             i64 out_stride, int width) {
  __shared__ float scratch[32];
  const i64 row = blockIdx.x;
  const float* wide = (const float*)x + row * x_stride;
  const u16* narrow = (const u16*)x + row * x_stride;
  float squares = 0.0f;
  wait_for_earlier();
  for (int i = threadIdx.x; i < width; i += THREADS) {
    float value = X_BF16 ? bf16_float(narrow[i]) : wide[i];
    squares += value * value;
  }
  float factor = rsqrt_near(block_sum(squares, scratch) / width + eps);
  for (int i = threadIdx.x; i < width; i += THREADS) {
    float value = (X_BF16 ? bf16_float(narrow[i]) : wide[i]) * factor * weight[i];
    if (OUT_BF16) {
      ((u16*)out)[row * out_stride + i] = float_bf16(value);
    } else {
      ((float*)out)[row * out_stride + i] = value;
    }
  }
  let_next_start();
}
EXPORT(rms_norm)
