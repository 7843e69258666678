// out[t] = table[ids[t]] in float32: eight neighbours a thread, a row of blocks for each id. KIND says what the table
// holds: 0 bfloat16, 1 half, 2 float32; its rows are multiples of eight elements, on 16-byte boundaries.
#include "device.cuh"

DEVICE void write_four(float* to, float a, float b, float c, float d) {
  *(words4*)to = {float_bits(a), float_bits(b), float_bits(c), float_bits(d)};
}

extern "C" __global__ void __launch_bounds__(THREADS)
    embedding(const i64* ids, const void* __restrict__ table, float* out, int width) {
  const int at = (blockIdx.x * THREADS + threadIdx.x) * 8;
  wait_for_earlier();
  let_next_start();
  if (at >= width) return;
  const i64 from = ids[blockIdx.y] * width + at;
  float* const to = out + (i64)blockIdx.y * width + at;
  if (KIND == 2) {
    const float* row = (const float*)table + from;
    *(words4*)to = *(const words4*)row;
    *(words4*)(to + 4) = *(const words4*)(row + 4);
    return;
  }
  const words4 pairs = *(const words4*)((const u16*)table + from);
  if (KIND == 0) {
    write_four(to, bf16_low(pairs.x), bf16_high(pairs.x), bf16_low(pairs.y), bf16_high(pairs.y));
    write_four(to + 4, bf16_low(pairs.z), bf16_high(pairs.z), bf16_low(pairs.w), bf16_high(pairs.w));
  } else {
    write_four(to, half_low(pairs.x), half_high(pairs.x), half_low(pairs.y), half_high(pairs.y));
    write_four(to + 4, half_low(pairs.z), half_high(pairs.z), half_low(pairs.w), half_high(pairs.w));
  }
}
EXPORT(embedding)
