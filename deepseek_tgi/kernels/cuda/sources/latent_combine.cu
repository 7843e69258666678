// The second half of latent_decode.cu and latent_wide.cu: the parts of a head put together, in bfloat16: out[h, b].
// ROWS heads share a part; parts of 16 have their elements in the order of `element`. Of a block's TEAMS of 128 threads
// each takes every so many'th part, four elements a thread. With VALUE, for few requests, the block goes on to the head's
// values, a quarter of them: out[b, h] = latent rows[h, NOPE:]'.
#include "device.cuh"
#include "latent_parts.cuh"

constexpr int AHEAD = 4;  // parts whose loads are under way

extern "C" __global__ void __launch_bounds__(128 * TEAMS)
    latent_combine(const float* parts, const float* marks, const int* __restrict__ cache_lens,
                   int batch, int row_tiles, int blocks, int least, const u16* __restrict__ rows, i64 rows_head,
                   u16* __restrict__ out) {
  __shared__ float sums[TEAMS][RANK], tops[TEAMS], totals[TEAMS];
  const int head = blockIdx.x, request = blockIdx.y, team = threadIdx.x / 128, own = threadIdx.x % 128;
  const Cut cut = make_cut(cache_lens, batch, blocks, least);
  const int origin = pieces_before(cache_lens, request);
  const int first = owner_of(cut, origin), last = owner_of(cut, origin + pieces_of(cache_lens, request) - 1);
  const i64 row = (i64)request * row_tiles * ROWS + head / ROWS * ROWS + head % ROWS;
  constexpr int BLOCK_ROWS = (VALUE + 3) / 4, OWN_ROWS = VALUE ? (BLOCK_ROWS + 4 * TEAMS - 1) / (4 * TEAMS) : 1;
  const int first_value = blockIdx.z * BLOCK_ROWS + threadIdx.x / 32;
  const int last_value = min_of(VALUE, (blockIdx.z + 1) * BLOCK_ROWS);
  u32 weights[OWN_ROWS][RANK / 64];  // under way before the parts are there
  if (VALUE) {
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++)
#pragma unroll
      for (int k = 0; k < RANK / 64; k++) {
        const int value = min_of(first_value + i * (4 * TEAMS), VALUE - 1);
        weights[i][k] = *(const u32*)(rows + head * rows_head + (i64)value * RANK + 64 * k + 2 * lane_id());
      }
  }
  wait_for_earlier();  // lengths are older than that
  let_next_start();

  float largest = -infinity(), total = 0.0f, sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int block = first + team; block <= last; block += TEAMS * AHEAD) {
    words4 part[AHEAD];
    words2 mark[AHEAD];
    float top = largest;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const bool there = block + i * TEAMS <= last;
      const i64 from = row + (i64)(there ? block + i * TEAMS : block) * row_tiles * ROWS;
      mark[i] = *(const words2*)(marks + from * 2);
      part[i] = *(const words4*)(parts + from * RANK + 4 * own);
      if (!there) mark[i] = words2{float_bits(-infinity()), 0};
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) top = fmaxf(top, bits_float(mark[i].x));
    const float faded = exp2_near(largest - top);
    total *= faded;
#pragma unroll
    for (int k = 0; k < 4; k++) sum[k] *= faded;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      if (block + i * TEAMS > last) continue;
      const float weight = exp2_near(bits_float(mark[i].x) - top);
      total += weight * bits_float(mark[i].y);
      sum[0] += weight * bits_float(part[i].x);
      sum[1] += weight * bits_float(part[i].y);
      sum[2] += weight * bits_float(part[i].z);
      sum[3] += weight * bits_float(part[i].w);
    }
    largest = top;
  }
  if (TEAMS > 1) {
    if (own == 0) {
      tops[team] = largest;
      totals[team] = total;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) sums[team][4 * own + k] = sum[k];
    block_sync();
    if (!VALUE && team) return;
    float top = -infinity();
#pragma unroll
    for (int i = 0; i < TEAMS; i++) top = fmaxf(top, tops[i]);
    total = sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
#pragma unroll
    for (int i = 0; i < TEAMS; i++) {
      if (first + i > last) continue;
      const float weight = exp2_near(tops[i] - top);
      total += weight * totals[i];
#pragma unroll
      for (int k = 0; k < 4; k++) sum[k] += weight * sums[i][4 * own + k];
    }
  }
  const float factor = reciprocal(total);
  const int column = own * 4 / OWN * OWN;
  if (!VALUE) {
    u16* const to = out + ((i64)head * batch + request) * RANK;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int where = ROWS == 16 ? column + element(own % 32 / 4, own % 4, k) : 4 * own + k;
      to[where] = float_bf16(sum[k] * factor);
    }
    return;
  }
  block_sync();
  float* const whole = sums[0];
  if (team == 0) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int where = ROWS == 16 ? column + element(own % 32 / 4, own % 4, k) : 4 * own + k;
      whole[where] = sum[k] * factor;
    }
  }
  block_sync();
  for (int i = 0; i < OWN_ROWS; i++) {
    const int value = first_value + i * (4 * TEAMS);
    if (value >= last_value) break;
    float product = 0.0f;
#pragma unroll
    for (int k = 0; k < RANK / 64; k++) {
      const u32 pair = weights[i][k];
      product += bf16_low(pair) * whole[64 * k + 2 * lane_id()] + bf16_high(pair) * whole[64 * k + 2 * lane_id() + 1];
    }
    product = warp_sum(product);
    if (lane_id() == 0) out[((i64)request * gridDim.x + head) * VALUE + value] = float_bf16(product);
  }
}
EXPORT(latent_combine)
