// Gated activation: out[t] = silu(gate) * up, `gate` the first `width` elements of a row and `up` the rest, in float32.
// A grid of (parts of a row, rows); BF16 says what both sides hold.
#include "device.cuh"

extern "C" __global__ void __launch_bounds__(256)
    silu_mul(const void* __restrict__ gate_up, void* __restrict__ out, int width) {
  wait_for_earlier();
  const i64 row = blockIdx.y;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < width; i += gridDim.x * blockDim.x) {
    i64 at = row * 2 * width + i;
    float gate = BF16 ? bf16_float(((const u16*)gate_up)[at]) : ((const float*)gate_up)[at];
    float up = BF16 ? bf16_float(((const u16*)gate_up)[at + width]) : ((const float*)gate_up)[at + width];
    float value = gate / (1.0f + expf(-gate)) * up;
    if (BF16) {
      ((u16*)out)[row * width + i] = float_bf16(value);
    } else {
      ((float*)out)[row * width + i] = value;
    }
  }
  let_next_start();
}
EXPORT(silu_mul)
