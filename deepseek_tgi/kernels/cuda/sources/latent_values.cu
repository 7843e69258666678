// Sums of latents out of latent space: for every head a product of a decode step's tokens by its weights, in bfloat16 with
// sums in float32. Weights are read once for all tokens, and before these are there. A token's bits depend on itself alone.
// Macros: NOPE, VALUE, RANK.
#include "latent_queries.cuh"

constexpr int WARPS = 4, VALUES = 16, OWN = RANK / WARPS;

static_assert(RANK % 128 == 0 && VALUE % VALUES == 0, "the kernel's cut");

// out[b, h] = latent[h, b] rows[h, NOPE:]'. A block makes 16 values of a head; each warp has a quarter of the rank.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    latent_values(const u16* latent, const u16* __restrict__ rows, i64 rows_head, u16* out, int tokens) {
  __shared__ float parts[WARPS][2][4][32];
  const int head = blockIdx.y, warp = threadIdx.x / 32, lane = lane_id(), value = blockIdx.x * VALUES;
  words4 held[OWN / 32][2];  // as operand B: columns g and g + 8 of the block's values
#pragma unroll
  for (int p = 0; p < OWN / 32; p++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      held[p][half] = load_early(rows + head * rows_head + (i64)(value + lane / 4 + 8 * half) * RANK + warp * OWN + 32 * p + lane % 4 * 8);
  wait_for_earlier();
  let_next_start();
#pragma unroll 1
  for (int first = 0; first < tokens; first += 16) {
    Rows given[OWN / 32];
    const u16* const from = latent + ((i64)head * tokens + first) * RANK + warp * OWN;
#pragma unroll
    for (int p = 0; p < OWN / 32; p++) given[p].load(from, RANK, tokens - first, 32 * p);
    float sums[2][4] = {};
#pragma unroll
    for (int p = 0; p < OWN / 32; p++)
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        u32 a[4];
        given[p].step(odd, a);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const words4& v = held[p][half];
          const u32 b[2] = {odd ? v.z : v.x, odd ? v.w : v.y};
          mma_bf16(sums[half], a, b);
        }
      }
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int i = 0; i < 4; i++) parts[warp][half][i][lane] = sums[half][i];
    block_sync();
    // A warp has half the tokens and half the values: two neighbours a lane.
    const int half = warp / 2, pair = warp % 2 * 2, token = first + lane / 4 + 4 * pair;
    float made[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
      made[i] = (parts[0][half][pair + i][lane] + parts[1][half][pair + i][lane]) +
                (parts[2][half][pair + i][lane] + parts[3][half][pair + i][lane]);
    if (token < tokens)
      *(u32*)(out + ((i64)token * gridDim.y + head) * VALUE + value + 8 * half + lane % 4 * 2) = bf16_pair(made[0], made[1]);
    block_sync();
  }
}
EXPORT(latent_values)
