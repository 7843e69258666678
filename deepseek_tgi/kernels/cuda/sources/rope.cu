// Rotary embedding in place, element i of a head with element i + half, in float32. One block a token; heads of q, then
// of k. BF16 says what both hold. Each operation rounds, as where rotation is part of another kernel: cached bytes depend
// on it.
#include "device.cuh"

DEVICE float read(const void* x, i64 at) { return BF16 ? bf16_float(((const u16*)x)[at]) : ((const float*)x)[at]; }
DEVICE void write(void* x, i64 at, float value) {
  if (BF16) {
    ((u16*)x)[at] = float_bf16(value);
  } else {
    ((float*)x)[at] = value;
  }
}

extern "C" __global__ void __launch_bounds__(256)
    rope(void* __restrict__ q, i64 q_stride, int q_heads, int q_dim, void* __restrict__ k, i64 k_stride, int k_heads,
         int k_dim, const int* __restrict__ positions, const float* __restrict__ cos_sin, int half) {
  wait_for_earlier();
  const i64 token = blockIdx.x;
  const float* turn = cos_sin + (i64)positions[token] * 2 * half;
  for (int i = threadIdx.x; i < (q_heads + k_heads) * half; i += blockDim.x) {
    int head = i / half, at = i % half;
    bool query = head < q_heads;
    void* x = query ? q : k;
    i64 place = query ? token * q_stride + (i64)head * q_dim + at : token * k_stride + (i64)(head - q_heads) * k_dim + at;
    float cosine = turn[at], sine = turn[half + at], first = read(x, place), second = read(x, place + half);
    write(x, place, minus(times(first, cosine), times(second, sine)));
    write(x, place + half, plus(times(second, cosine), times(first, sine)));
  }
  let_next_start();
}
EXPORT(rope)
