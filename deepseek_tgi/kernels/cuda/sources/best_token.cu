// The largest logit of each row, where it stands, and the logarithm of its softmax.
// `best_in_chunk`: one block of THREADS looks at CHUNK logits of one row and leaves (largest, place, sum of exponents
// relative to it) in `parts [rows, chunks, 3]`. `best_of_chunks`: one block a row joins them in a fixed order, so a row's
// bits depend on itself alone. Of equal logits the first is taken; a NaN anywhere makes the row's largest NaN.
// `token_ids`: whole numbers of a float type become ids of at least 0 and less than `limit`, one a thread; with `wide` they
// are doubles.
#include "device.cuh"

struct Best {
  float value;
  int place;
};

DEVICE bool beats(Best a, Best b) {
  if (b.value != b.value) return false;
  return a.value != a.value || a.value > b.value || (a.value == b.value && a.place < b.place);
}

DEVICE Best best_of_warp(Best own) {
#pragma unroll
  for (int mask = 16; mask; mask /= 2) {
    const Best other = {shuffle_xor(own.value, mask), shuffle_xor(own.place, mask)};
    if (beats(other, own)) own = other;
  }
  return own;
}
// The best of all threads, in each of them; `shared` has a place for each warp.
DEVICE Best block_best(Best own, Best* shared) {
  own = best_of_warp(own);
  if (lane_id() == 0) shared[threadIdx.x / 32] = own;
  block_sync();
  Best best = shared[0];
#pragma unroll
  for (int i = 1; i < THREADS / 32; i++)
    if (beats(shared[i], best)) best = shared[i];
  return best;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    best_in_chunk(const float* logits, i64 stride, int width, float* parts) {
  constexpr int HELD = CHUNK / THREADS;
  __shared__ Best bests[THREADS / 32];
  __shared__ float sums[32];
  const i64 row = blockIdx.y;
  const float* x = logits + row * stride;
  const int start = blockIdx.x * CHUNK, first = start + threadIdx.x;
  wait_for_earlier();
  let_next_start();
  float held[HELD];
#pragma unroll
  for (int j = 0; j < HELD; j++) held[j] = first + j * THREADS < width ? x[first + j * THREADS] : -infinity();
  Best own = {-infinity(), start};
#pragma unroll
  for (int j = 0; j < HELD; j++) {
    const Best next = {held[j], first + j * THREADS};
    if (next.value != -infinity() && beats(next, own)) own = next;
  }
  const Best best = block_best(own, bests);
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < HELD; j++)
    if (first + j * THREADS < width && best.value > -infinity()) sum += exp_near(held[j] - best.value);
  sum = block_sum(sum, sums);
  if (threadIdx.x == 0) {
    float* part = parts + (row * gridDim.x + blockIdx.x) * 3;
    part[0] = best.value;
    part[1] = (float)best.place;
    part[2] = sum;
  }
}
EXPORT(best_in_chunk)

extern "C" __global__ void __launch_bounds__(THREADS)
    best_of_chunks(const float* parts, int chunks, int rows, float* out) {
  __shared__ Best bests[THREADS / 32];
  __shared__ float sums[32];
  const i64 row = blockIdx.x;
  const float* own_parts = parts + row * chunks * 3;
  wait_for_earlier();
  let_next_start();
  Best own = {-infinity(), 0x7FFFFFFF};
  for (int i = threadIdx.x; i < chunks; i += THREADS) {
    const Best next = {own_parts[i * 3], (int)own_parts[i * 3 + 1]};
    if (beats(next, own)) own = next;
  }
  const Best best = block_best(own, bests);
  float sum = 0.0f;
  for (int i = threadIdx.x; i < chunks; i += THREADS) {
    const float value = own_parts[i * 3];
    if (value > -infinity()) sum += own_parts[i * 3 + 2] * exp_near(value - best.value);
  }
  sum = block_sum(sum, sums);
  if (threadIdx.x == 0) {
    out[row] = (float)best.place;
    out[rows + row] = -0.6931471805599453f * log2_near(sum);
    out[2 * rows + row] = best.value;
  }
}
EXPORT(best_of_chunks)

extern "C" __global__ void __launch_bounds__(THREADS)
    token_ids(const void* __restrict__ values, int wide, i64* __restrict__ ids, int count, int limit) {
  wait_for_earlier();
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i < count) {
    const double value = wide ? ((const double*)values)[i] : (double)((const float*)values)[i];
    ids[i] = value >= 0.0 ? (value < (double)limit ? (i64)value : limit - 1) : 0;  // NaN is no number from 0 on
  }
  let_next_start();
}
EXPORT(token_ids)
