// Which experts a token goes to: one warp a token. Macros: EXPERTS, TOP, SIGMOID, RANKED (0: experts alone, 1: groups by
// their best expert, 2: by their best two), GROUPS, KEPT, NORMALISE.
#include "device.cuh"

constexpr int EACH = (EXPERTS + 31) / 32, IN_GROUP = EXPERTS / GROUPS, WARPS = 4;

// The lane with the largest value; of equal ones that with the lower id. Every lane gets both.
DEVICE void best_of_warp(float& value, int& id) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) {
    float other = shuffle_xor(value, mask);
    int other_id = shuffle_xor(id, mask);
    if (other > value || (other == value && other_id < id)) value = other, id = other_id;
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    route(const float* __restrict__ logits, const float* __restrict__ bias, float scale, int* __restrict__ ids,
          float* __restrict__ weights, int tokens) {
  __shared__ float all_ranked[WARPS][EXPERTS], all_scores[WARPS][EXPERTS];
  const int warp = threadIdx.x / 32, lane = lane_id();
  const i64 token = (i64)blockIdx.x * WARPS + warp;
  wait_for_earlier();
  if (token >= tokens) return;
  float* ranked = all_ranked[warp];
  float* scores = all_scores[warp];
  float own[EACH], top = -infinity(), total = 0.0f;
  int broken = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int e = i * 32 + lane;
    own[i] = e < EXPERTS ? logits[token * EXPERTS + e] : -infinity();
    if (e < EXPERTS && !(fabsf(own[i]) < infinity())) broken = 1;
    top = fmaxf(top, own[i]);
  }
  broken = warp_ballot(broken) != 0;
  top = warp_max(top);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    own[i] = SIGMOID ? 1.0f / (1.0f + expf(-own[i])) : expf(own[i] - top);
    if (i * 32 + lane < EXPERTS) total += own[i];
  }
  total = SIGMOID ? 1.0f : warp_sum(total);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int e = i * 32 + lane;
    if (e < EXPERTS) {
      own[i] = own[i] / total;
      scores[e] = own[i];
      own[i] += bias ? bias[e] : 0.0f;
      ranked[e] = own[i];
    }
  }
  warp_sync();
  if (RANKED) {
    float rank = -infinity();
    if (lane < GROUPS) {
      float best = -infinity(), second = -infinity();
      for (int i = 0; i < IN_GROUP; i++) {
        float value = ranked[lane * IN_GROUP + i];
        second = fmaxf(second, fminf(best, value));
        best = fmaxf(best, value);
      }
      rank = RANKED == 2 && IN_GROUP > 1 ? best + second : best;
    }
    u32 kept = 0;
    for (int i = 0; i < KEPT; i++) {
      float value = lane < GROUPS && !(kept >> lane & 1) ? rank : -infinity();
      int id = lane < GROUPS && !(kept >> lane & 1) ? lane : 32;
      best_of_warp(value, id);
      kept |= 1u << id;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      int e = i * 32 + lane;
      if (e < EXPERTS && !(kept >> (e / IN_GROUP) & 1)) own[i] = -infinity();
    }
  }
  float sum = 0.0f, mine = 0.0f;
  int chosen = 0;
  for (int j = 0; j < TOP; j++) {
    float value = -infinity();
    int id = EXPERTS;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      int e = i * 32 + lane;
      if (e < EXPERTS && own[i] > value) value = own[i], id = e;
    }
    best_of_warp(value, id);
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (i * 32 + lane == id) own[i] = -infinity();
    float score = id < EXPERTS ? scores[id] : 0.0f;
    sum += score;
    if (lane == j) mine = score, chosen = id;
  }
  if (lane < TOP) {
    float weight = (NORMALISE ? mine / (sum + 1e-20f) : mine) * scale;
    ids[token * TOP + lane] = broken ? lane : chosen;
    weights[token * TOP + lane] = broken ? bits_float(0x7FC00000u) : weight;
  }
  let_next_start();
}
EXPORT(route)
