// Row operations: norm, rotation, gated activation, cache write. Each row is one thread's work.

#include "heads.h"
#include "pool.h"

// x, out [t, heads, width]: strides in floats, last axis dense.
DSTGI_API void dstgi_rms_norm(const float* x, const float* weight, float* out, int64_t t, int64_t heads, int64_t width,
                              int64_t x_row, int64_t x_head, int64_t out_row, int64_t out_head, float eps,
                              int64_t num_threads) {
  using namespace dstgi;
  by_rows(t, heads * width, num_threads, [&](int64_t i) {
    for (int64_t h = 0; h < heads; ++h)
      norm_row(x + i * x_row + h * x_head, weight, width, eps, out + i * out_row + h * out_head);
  });
}

DSTGI_API void dstgi_silu_mul(const float* gate_up, float* out, int64_t t, int64_t width, int64_t num_threads) {
  using namespace dstgi;
  by_rows(t, width, num_threads, [&](int64_t i) {
    silu_row(gate_up + i * 2 * width, gate_up + i * 2 * width + width, width, out + i * width);
  });
}

// In place on q [t, q_heads, q_dim] and k [t, k_heads, k_dim]; heads are dense, rows `q_row`/`k_row` floats apart.
DSTGI_API void dstgi_rope(float* q, float* k, const int32_t* positions, const float* cos_sin, int64_t t,
                          int64_t q_heads, int64_t k_heads, int64_t q_dim, int64_t k_dim, int64_t q_row, int64_t k_row,
                          int64_t rotary, int64_t num_threads) {
  using namespace dstgi;
  by_rows(t, (q_heads + k_heads) * rotary, num_threads, [&](int64_t i) {
    const float* row = cos_sin + static_cast<int64_t>(positions[i]) * rotary;
    for (int64_t h = 0; h < q_heads; ++h) rotate_head(q + i * q_row + h * q_dim, row, rotary / 2);
    for (int64_t h = 0; h < k_heads; ++h) rotate_head(k + i * k_row + h * k_dim, row, rotary / 2);
  });
}

// `frame` may be null; else tokens stand at `positions` and are turned by the rows of `cos_sin`.
DSTGI_API void dstgi_kv_write(const Pages* pages, const float* k, const float* v, const int64_t* slots, int64_t t,
                              int64_t k_row, int64_t k_head, int64_t v_row, int64_t v_head, int64_t num_threads,
                              const Frame* frame, const int32_t* positions, const float* cos_sin, int64_t rotary) {
  using namespace dstgi;
  by_rows(t, pages->heads * (pages->k_dim + pages->v_dim), num_threads, [&](int64_t i) {
    if (slots[i] < 0) return;
    const Turn turn{frame, frame == nullptr ? nullptr : cos_sin + static_cast<int64_t>(positions[i]) * rotary, rotary};
    for (int64_t h = 0; h < pages->heads; ++h) {
      write_head(*pages, true, turn, k + i * k_row + h * k_head, slots[i], h);
      write_head(*pages, false, turn, v + i * v_row + h * v_head, slots[i], h);
    }
  });
}
