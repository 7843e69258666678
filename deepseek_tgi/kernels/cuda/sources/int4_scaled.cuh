// Weights as bfloat16, rounded once, two at a time in registers: `code - zero` exactly, times the scale in two parts.
#pragma once
#include "int4_weight.cuh"

// Zero and scale of a row, in both halves: scale = high + low to 16 bits.
struct Factor {
  u32 zero, high, low;
};
DEVICE Factor factor_of(const RowPair& pair, int half) {
  const float scale = scale_of(pair.scale[half]);
  const u32 high = bf16_pair(scale, scale);
  const float rest = scale - bf16_low(high);
  return {pair.zero[half], high, SCALE_KIND == 2 ? 0 : bf16_pair(rest, rest)};
}
DEVICE u32 scaled(u32 two, const Factor& f) {
  const u32 integer = bf16_sub(widen(two), f.zero);
  return SCALE_KIND == 2 ? bf16_mul(integer, f.high) : bf16_fma(integer, f.high, bf16_mul(integer, f.low));
}
