// Queries alone into latent space; see latent_queries.cuh.
#include "latent_queries.cuh"

extern "C" __global__ void __launch_bounds__(QUERY_THREADS)
    latent_queries(const u16* q, i64 q_head, i64 q_row, const u16* __restrict__ rows, i64 rows_head, u16* out, int tokens) {
  make_queries(q, q_head, q_row, rows, rows_head, out, tokens);
}
EXPORT(latent_queries)
