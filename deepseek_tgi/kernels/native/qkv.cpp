// From the fused projections to attention's output: head norms, rotation, cache write, attention.

#include "heads.h"
#include "pool.h"

DSTGI_API void dstgi_paged_attention(const Pages* pages, const float* q, float* out, const int32_t* cu_seqlens,
                                     const int32_t* block_tables, const int32_t* cache_lens, int64_t requests,
                                     int64_t table_stride, int64_t heads, int64_t q_row, float scale,
                                     int64_t num_threads, const Frame* frame, const float* turns, int64_t rotary);

namespace dstgi {
namespace {

constexpr int64_t PARALLEL_FROM = 8;  // tokens

void prepare(const Pages& p, const AttentionCall& c, const float* q_norm, const float* k_norm, float eps,
             const Frame* frame, int64_t t) {
  const float* row = c.cos_sin + static_cast<int64_t>(c.positions[t]) * c.rotary;
  for (int64_t h = 0; h < c.heads; ++h) {
    float* q = c.q + t * c.q_row + h * p.k_dim;
    if (q_norm != nullptr) norm_row(q, q_norm, p.k_dim, eps, q);
    rotate_head(q, row, c.rotary / 2);
  }
  for (int64_t h = 0; h < p.heads; ++h) {
    float* k = c.k + t * c.k_row + h * p.k_dim;
    if (k_norm != nullptr) norm_row(k, k_norm, p.k_dim, eps, k);
    rotate_head(k, row, c.rotary / 2);
    if (c.slots[t] < 0) continue;
    write_head(p, true, {frame, row, c.rotary}, k, c.slots[t], h);
    write_head(p, false, {frame, row, c.rotary}, c.v + t * c.v_row + h * p.v_dim, c.slots[t], h);
  }
}

}  // namespace
}  // namespace dstgi

// `q_norm`, `k_norm` [k_dim] or null; `frame`, `turns` as in `dstgi_paged_attention`. q and k are overwritten.
DSTGI_API void dstgi_qkv_attention(const Pages* pages, const AttentionCall* c, const float* q_norm,
                                   const float* k_norm, float eps, const Frame* frame, const float* turns) {
  const int64_t threads = c->tokens < dstgi::PARALLEL_FROM ? 1 : c->num_threads;
  const int64_t runs = c->tokens < 4 * threads ? c->tokens : 4 * threads;
  dstgi::parallel(threads, runs, [&](int64_t i) {
    for (int64_t t = c->tokens * i / runs; t < c->tokens * (i + 1) / runs; ++t)
      dstgi::prepare(*pages, *c, q_norm, k_norm, eps, frame, t);
  });
  dstgi_paged_attention(pages, c->q, c->out, c->cu_seqlens, c->block_tables, c->cache_lens, c->requests,
                        c->table_stride, c->heads, c->q_row, static_cast<float>(c->scale), c->num_threads, frame, turns,
                        c->rotary);
}
