// RMS norm of rows: out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight, in float32, stored as OUT_BF16 says.
// One block of THREADS a row; a row's bits depend on itself alone. X_BF16 rows are bfloat16, else float32. A thread holds
// RUNS runs of eight elements, read once; width is a multiple of 8 and rows lie on 16-byte boundaries where RUNS is not
// 0, else elements are read one by one, twice.
#include "device.cuh"

struct Run {
  float of[8];
};

DEVICE Run read_run(const void* x, i64 at, bool narrow) {
  Run run;
  if (narrow) {
    const words4 words = *(const words4*)((const u16*)x + at);
    const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; i++) run.of[2 * i] = bf16_low(pairs[i]), run.of[2 * i + 1] = bf16_high(pairs[i]);
  } else {
    const words4 low = *(const words4*)((const float*)x + at), high = *(const words4*)((const float*)x + at + 4);
    const u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; i++) run.of[i] = bits_float(words[i]);
  }
  return run;
}

DEVICE void write_run(void* out, i64 at, const Run& run) {
  if (OUT_BF16) {
    const words4 words = {bf16_pair(run.of[0], run.of[1]), bf16_pair(run.of[2], run.of[3]),
                          bf16_pair(run.of[4], run.of[5]), bf16_pair(run.of[6], run.of[7])};
    *(words4*)((u16*)out + at) = words;
  } else {
    u32 words[8];
#pragma unroll
    for (int i = 0; i < 8; i++) words[i] = float_bits(run.of[i]);
    *(words4*)((float*)out + at) = {words[0], words[1], words[2], words[3]};
    *(words4*)((float*)out + at + 4) = {words[4], words[5], words[6], words[7]};
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(const void* __restrict__ x, i64 x_stride, const float* __restrict__ weight, float eps, void* __restrict__ out,
             i64 out_stride, int width) {
  __shared__ float scratch[32];
  const i64 row = (i64)blockIdx.x * x_stride, to = (i64)blockIdx.x * out_stride;
  float squares = 0.0f;
#if RUNS
  Run runs[RUNS], weights[RUNS];
#pragma unroll
  for (int r = 0; r < RUNS; r++) {  // constant: while the kernel ahead still runs
    const int at = (r * THREADS + threadIdx.x) * 8;
    if (at < width) weights[r] = read_run(weight, at, false);
  }
  wait_for_earlier();
  let_next_start();
#pragma unroll
  for (int r = 0; r < RUNS; r++) {
    const int at = (r * THREADS + threadIdx.x) * 8;
    if (at < width) {
      runs[r] = read_run(x, row + at, X_BF16);
#pragma unroll
      for (int i = 0; i < 8; i++) squares += runs[r].of[i] * runs[r].of[i];
    }
  }
  const float factor = rsqrt_near(block_sum(squares, scratch) / width + eps);
#pragma unroll
  for (int r = 0; r < RUNS; r++) {
    const int at = (r * THREADS + threadIdx.x) * 8;
    if (at < width) {
#pragma unroll
      for (int i = 0; i < 8; i++) runs[r].of[i] *= factor * weights[r].of[i];
      write_run(out, to + at, runs[r]);
    }
  }
#else
  wait_for_earlier();
  let_next_start();
  const float* wide = (const float*)x + row;
  const u16* narrow = (const u16*)x + row;
  for (int i = threadIdx.x; i < width; i += THREADS) {
    float value = X_BF16 ? bf16_float(narrow[i]) : wide[i];
    squares += value * value;
  }
  const float factor = rsqrt_near(block_sum(squares, scratch) / width + eps);
  for (int i = threadIdx.x; i < width; i += THREADS) {
    float value = (X_BF16 ? bf16_float(narrow[i]) : wide[i]) * (factor * weight[i]);
    if (OUT_BF16) {
      ((u16*)out)[to + i] = float_bf16(value);
    } else {
      ((float*)out)[to + i] = value;
    }
  }
#endif
}
EXPORT(rms_norm)
