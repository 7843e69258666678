// Which experts a token goes to: one warp a token. Macros: those of route_token.cuh.
#include "route_token.cuh"

constexpr int WARPS = 4;

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    route(const float* logits, const float* __restrict__ bias, float scale, int* __restrict__ ids,
          float* __restrict__ weights, int tokens) {
  __shared__ float ranked[WARPS][EXPERTS], scores[WARPS][EXPERTS];
  const int warp = threadIdx.x / 32;
  const i64 token = (i64)blockIdx.x * WARPS + warp;
  wait_for_earlier();
  if (token >= tokens) return;
  float own[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int e = i * 32 + lane_id();
    own[i] = e < EXPERTS ? logits[token * EXPERTS + e] : -infinity();
  }
  route_token(own, bias, scale, ranked[warp], scores[warp], ids + token * TOP, weights + token * TOP);
  let_next_start();
}
EXPORT(route)
