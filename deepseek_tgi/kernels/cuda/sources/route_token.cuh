// A token's experts, chosen by one warp. Macros: EXPERTS, TOP, SIGMOID, RANKED (0: experts alone, 1: groups by their best
// expert, 2: by their best two), GROUPS, KEPT, NORMALISE.
#pragma once
#include "device.cuh"

constexpr int EACH = (EXPERTS + 31) / 32, IN_GROUP = EXPERTS / GROUPS;

// The lane with the largest value; of equal ones that with the lower id. Every lane gets both.
DEVICE void best_of_warp(float& value, int& id) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) {
    float other = shuffle_xor(value, mask);
    int other_id = shuffle_xor(id, mask);
    if (other > value || (other == value && other_id < id)) value = other, id = other_id;
  }
}

// Its place among floats: larger ones have larger places, equal ones the same.
DEVICE u32 place(float x) {
  const u32 bits = float_bits(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// `own[i]` is the logit of expert 32 i + lane; `ranked` and `scores` are EXPERTS floats of this warp's in shared memory.
DEVICE void route_token(float (&own)[EACH], const float* bias, float scale, float* ranked, float* scores, int* ids,
                        float* weights) {
  const int lane = lane_id();
  float top = -infinity(), total = 0.0f;
  int broken = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int e = i * 32 + lane;
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
#pragma unroll 1
  for (int j = 0; j < TOP; j++) {
    u32 best = 0;  // below every value's place
    int id = EXPERTS;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int e = i * 32 + lane;
      if (e < EXPERTS && own[i] > -infinity() && place(own[i]) > best) best = place(own[i]), id = e;
    }
    const u32 most = warp_most(best);
    id = warp_least(best == most ? id : EXPERTS);
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (i * 32 + lane == id) own[i] = -infinity();
    float score = id < EXPERTS ? scores[id] : 0.0f;
    sum += score;
    if (lane == j) mine = score, chosen = id;
  }
  if (lane < TOP) {
    float weight = (NORMALISE ? mine / (sum + 1e-20f) : mine) * scale;
    ids[lane] = broken ? lane : chosen;
    weights[lane] = broken ? bits_float(0x7FC00000u) : weight;
  }
}
