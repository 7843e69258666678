// What a decode step does before it attends over latents, in one launch: queries go into latent space, their rotary parts
// and the step's keys are turned, and latents are normed and stored with them, as latent_prepare.cu does it.
//
// The first RANK / 64 blocks of a head make its queries; the next one turns the head's rotary queries; the last one's warps
// store a token each, or every so many'th. What is left in `latent` and `rope` is what was given.
// Macros: those of latent_codes.cuh (with X_BF16 1) and of latent_queries.cuh.
#include "latent_codes.cuh"
#include "latent_queries.cuh"

extern "C" __global__ void __launch_bounds__(QUERY_THREADS)
    latent_ready(u16* q, i64 q_head, i64 q_row, const u16* __restrict__ rows, i64 rows_head, u16* out, int tokens, u16* latent,
                 i64 latent_row, u16* rope, i64 rope_row, const float* __restrict__ norm_weight, float eps,
                 const int* __restrict__ positions, const float* __restrict__ cos_sin, const i64* __restrict__ slots,
                 u8* latent_pages, u8* rope_pages, u8* scale_pages, i64 page_bytes) {
  if (blockIdx.x < RANK / COLUMNS) {
    make_queries(q + ROPE, q_head, q_row, rows, rows_head, out, tokens);
    return;
  }
  let_next_start();
  // Positions, slots and the model's tables are older than the launches under way.
  if (blockIdx.x > RANK / COLUMNS) {
    const Store store = {latent_pages, rope_pages, scale_pages, page_bytes};
    constexpr int WARPS = QUERY_THREADS / 32;
    const int step = gridDim.y * WARPS;
    const int first = blockIdx.y * WARPS + threadIdx.x / 32;
    Norm norm;
    if (first < tokens) norm = load_norm(norm_weight, cos_sin + (i64)positions[first] * ROPE);
    wait_for_earlier();
#pragma unroll 1
    for (int token = first; token < tokens; token += step) {
      if (token != first) norm = load_norm(norm_weight, cos_sin + (i64)positions[token] * ROPE);
      store_token(encode_token<true, false>(latent, token * latent_row, rope, token * rope_row, norm, eps), slots[token], store);
    }
    return;
  }
  constexpr int AT_ONCE = 4;
  q += blockIdx.y * q_head;
  for (int first = threadIdx.x; first < tokens * HALF_ROPE; first += AT_ONCE * QUERY_THREADS) {
    float cosine[AT_ONCE], sine[AT_ONCE], low[AT_ONCE], high[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const int i = first + j * QUERY_THREADS;
      if (i >= tokens * HALF_ROPE) continue;
      const float* const turn = cos_sin + (i64)positions[i / HALF_ROPE] * ROPE + i % HALF_ROPE;
      cosine[j] = turn[0], sine[j] = turn[HALF_ROPE];
    }
    wait_for_earlier();
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const int i = first + j * QUERY_THREADS;
      const i64 place = i / HALF_ROPE * q_row + i % HALF_ROPE;
      if (i < tokens * HALF_ROPE) low[j] = read(q, place), high[j] = read(q, place + HALF_ROPE);
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const int i = first + j * QUERY_THREADS;
      const i64 place = i / HALF_ROPE * q_row + i % HALF_ROPE;
      if (i >= tokens * HALF_ROPE) continue;
      write(q, place, minus(times(low[j], cosine[j]), times(high[j], sine[j])));
      write(q, place + HALF_ROPE, plus(times(high[j], cosine[j]), times(low[j], sine[j])));
    }
  }
}
EXPORT(latent_ready)
