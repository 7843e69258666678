// What latent attention needs of a step's tokens: queries and rotary keys turned by their positions, latents normed,
// and both stored in their pages in the format MODE (numbered as in latent_decode.cu). One block a token: its first
// warp has the latent and the key, the others the queries' heads. NORM 0: the latent is stored as it comes, nothing is
// turned (one warp is enough). What is stored is what the norm leaves in `latent`.
#include "latent_codes.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    latent_prepare(void* q, i64 q_row, int heads, int head_width, void* latent, i64 latent_row, void* rope,
                   i64 rope_row, const float* __restrict__ norm_weight, float eps,
                   const int* __restrict__ positions, const float* __restrict__ cos_sin, const i64* __restrict__ slots,
                   u8* __restrict__ latent_pages, u8* __restrict__ rope_pages, u8* __restrict__ scale_pages,
                   i64 page_bytes) {
  const i64 token = blockIdx.x;
  let_next_start();
  // Positions, slots and the model's tables are older than the launches under way; what those write has no __restrict__,
  // for with it a compiler may read before the wait.
  const float* const turns_of = NORM ? cos_sin + (i64)positions[token] * ROPE : cos_sin;
  if (threadIdx.x < 32) {
    const i64 slot = slots[token];
    Norm norm;
    if (NORM) norm = load_norm(norm_weight, turns_of);
    wait_for_earlier();
    store_token(encode_token<NORM, true>(latent, token * latent_row, rope, token * rope_row, norm, eps), slot,
                Store{latent_pages, rope_pages, scale_pages, page_bytes});
    return;
  }
  const int first = threadIdx.x - 32;
  float cosine = turns_of[first % HALF_ROPE], sine = turns_of[HALF_ROPE + first % HALF_ROPE];
  wait_for_earlier();
  for (int at = first; at < heads * HALF_ROPE; at += THREADS - 32) {
    const int i = at % HALF_ROPE;
    if ((THREADS - 32) % HALF_ROPE && at != first) {
      cosine = turns_of[i];
      sine = turns_of[HALF_ROPE + i];
    }
    const i64 place = token * q_row + (i64)(at / HALF_ROPE) * head_width + i;
    const float low = read(q, place), high = read(q, place + HALF_ROPE);
    write(q, place, minus(times(low, cosine), times(high, sine)));
    write(q, place + HALF_ROPE, plus(times(high, cosine), times(low, sine)));
  }
}
EXPORT(latent_prepare)
