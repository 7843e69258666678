// From the residual stream of a few tokens to their experts in one launch: RMS norm, the router's product in float32, and
// the choice.
//
// A cluster of RANKS blocks has TOKENS tokens. Each of its blocks norms them all and multiplies by its share of the
// router's rows, a few columns of each a thread, which are on their way before the launch ahead ends; the logits are read
// through the cluster, by a warp for each token. A token's bits depend on itself alone: sums have the same order whatever
// TOKENS is.
//
// Macros: those of route_token.cuh, TOKENS (a power of two, at most RANKS), THREADS, HIDDEN (a multiple of 4).
#include "route_token.cuh"

constexpr int RANKS = 8, WARPS = THREADS / 32, OWN = (EXPERTS + RANKS - 1) / RANKS, RUNS = (HIDDEN + 4 * THREADS - 1) / (4 * THREADS);
constexpr int SPREAD = OWN <= 1 ? 1 : OWN <= 2 ? 2 : OWN <= 4 ? 4 : OWN <= 8 ? 8 : OWN <= 16 ? 16 : 32;  // OWN to a power of two

static_assert(OWN <= 32, "a warp's lanes hold a token's sums");

struct Shared {
  float squares[TOKENS][WARPS], sums[TOKENS][WARPS][SPREAD], logits[TOKENS][OWN], ranked[EXPERTS], scores[EXPERTS];
};

DEVICE float product(u32 a, float b) { return bits_float(a) * b; }

// Sums of COUNT values over the warp, in the same order for every COUNT: a lane gets that of value (lane / (32 / COUNT)).
template <int COUNT>
DEVICE float spread_sum(float (&values)[COUNT]) {
  int left = COUNT;
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) {
    if (left > 1) {
      left /= 2;
      const bool upper = lane_id() & mask;
#pragma unroll
      for (int i = 0; i < COUNT / 2; i++)
        if (i < left) {
          const float sent = upper ? values[i] : values[i + left], kept = upper ? values[i + left] : values[i];
          values[i] = kept + shuffle_xor(sent, mask);
        }
    } else {
      values[0] += shuffle_xor(values[0], mask);
    }
  }
  return values[0];
}

extern "C" __global__ void __cluster_dims__(1, 8, 1) __launch_bounds__(THREADS)
    expert_choice(const float* hidden, i64 hidden_row, const float* norm_weight, float eps, const float* gate, const float* bias,
                  float scale, u16* normed, int* ids, float* weights, int tokens) {
  Shared& shared = *(Shared*)dynamic_shared();
  const int rank = blockIdx.y, warp = threadIdx.x / 32, lane = lane_id();
  const int first = blockIdx.x * TOKENS, count = tokens - first < TOKENS ? tokens - first : TOKENS;
  words4 rows[RUNS][OWN], norm[RUNS];
#pragma unroll
  for (int r = 0; r < RUNS; r++) {
    const int at = (r * THREADS + (int)threadIdx.x) * 4;
    norm[r] = at < HIDDEN ? load_early(norm_weight + at) : words4{0, 0, 0, 0};
#pragma unroll
    for (int e = 0; e < OWN; e++)
      rows[r][e] = at < HIDDEN && rank * OWN + e < EXPERTS ? load_early(gate + (i64)(rank * OWN + e) * HIDDEN + at) : words4{0, 0, 0, 0};
  }
  let_next_start();
  wait_for_earlier();
  words4 x[TOKENS][RUNS];
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < RUNS; r++) {
      const int at = (r * THREADS + (int)threadIdx.x) * 4;
      x[t][r] = t < count && at < HIDDEN ? *(const words4*)(hidden + (first + t) * hidden_row + at) : words4{0, 0, 0, 0};
    }
#pragma unroll
    for (int r = 0; r < RUNS; r++) {
      const words4& v = x[t][r];
      sum += (product(v.x, bits_float(v.x)) + product(v.y, bits_float(v.y))) + (product(v.z, bits_float(v.z)) + product(v.w, bits_float(v.w)));
    }
    sum = warp_sum(sum);
    if (lane == 0) shared.squares[t][warp] = sum;
  }
  block_sync();
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += shared.squares[t][w];
    const float factor = rsqrt_near(total / HIDDEN + eps);
    float values[SPREAD] = {};
#pragma unroll
    for (int r = 0; r < RUNS; r++) {
      const words4 &v = x[t][r], &n = norm[r];
      const words2 pair = {bf16_pair(product(v.x, factor * bits_float(n.x)), product(v.y, factor * bits_float(n.y))),
                           bf16_pair(product(v.z, factor * bits_float(n.z)), product(v.w, factor * bits_float(n.w)))};
      const int at = (r * THREADS + (int)threadIdx.x) * 4;
      if (t % RANKS == rank && t < count && at < HIDDEN) *(words2*)(normed + (i64)(first + t) * HIDDEN + at) = pair;
      const float y[4] = {bf16_low(pair.x), bf16_high(pair.x), bf16_low(pair.y), bf16_high(pair.y)};
#pragma unroll
      for (int e = 0; e < OWN; e++)
        values[e] += (product(rows[r][e].x, y[0]) + product(rows[r][e].y, y[1])) + (product(rows[r][e].z, y[2]) + product(rows[r][e].w, y[3]));
    }
    const float sum = spread_sum(values);
    if (lane % (32 / SPREAD) == 0) shared.sums[t][warp][lane / (32 / SPREAD)] = sum;
  }
  block_sync();
  for (int i = threadIdx.x; i < TOKENS * OWN; i += THREADS) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += shared.sums[i / OWN][w][i % OWN];
    shared.logits[i / OWN][i % OWN] = total;
  }
  cluster_sync();
  if (rank < count && warp == 0) {
    float own[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int e = i * 32 + lane;
      own[i] = e < EXPERTS ? cluster_load(&shared.logits[rank][e % OWN], e / OWN) : -infinity();
    }
    const i64 token = first + rank;
    route_token(own, bias, scale, shared.ranked, shared.scores, ids + token * TOP, weights + token * TOP);
  }
  cluster_sync();  // logits stay until all have read them
}
EXPORT_CLUSTER(expert_choice, 8)
