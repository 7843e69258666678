// Gated activation: out[t] = silu(gate) * up, `gate` the first `width` elements of a row and `up` the rest, in float32.
// A grid of (parts of a row, rows). BF16 says what both sides hold; with EIGHT a thread takes eight bfloat16 at a time,
// from a width that is a multiple of 8.
#include "device.cuh"

DEVICE float gated(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }
DEVICE u32 gated_pair(u32 gate, u32 up) {
  return bf16_pair(gated(bf16_low(gate), bf16_low(up)), gated(bf16_high(gate), bf16_high(up)));
}

extern "C" __global__ void __launch_bounds__(128)
    silu_mul(const void* __restrict__ gate_up, void* __restrict__ out, int width) {
  wait_for_earlier();
  let_next_start();
  const i64 row = blockIdx.y;
  const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  if (EIGHT) {
    const u16* from = (const u16*)gate_up + row * 2 * width;
    for (int i = first * 8; i < width; i += step * 8) {
      const words4 gate = *(const words4*)(from + i), up = *(const words4*)(from + width + i);
      *(words4*)((u16*)out + row * width + i) = {gated_pair(gate.x, up.x), gated_pair(gate.y, up.y),
                                                 gated_pair(gate.z, up.z), gated_pair(gate.w, up.w)};
    }
    return;
  }
  for (int i = first; i < width; i += step) {
    i64 at = row * 2 * width + i;
    float gate = BF16 ? bf16_float(((const u16*)gate_up)[at]) : ((const float*)gate_up)[at];
    float up = BF16 ? bf16_float(((const u16*)gate_up)[at + width]) : ((const float*)gate_up)[at + width];
    if (BF16) {
      ((u16*)out)[row * width + i] = float_bf16(gated(gate, up));
    } else {
      ((float*)out)[row * width + i] = gated(gate, up);
    }
  }
}
EXPORT(silu_mul)
