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

// The best of all threads, in `shared[0]`.
DEVICE Best block_best(Best own, Best* shared) {
  shared[threadIdx.x] = own;
  block_sync();
  for (int half = THREADS / 2; half > 0; half /= 2) {
    if (threadIdx.x < half && beats(shared[threadIdx.x + half], shared[threadIdx.x])) {
      shared[threadIdx.x] = shared[threadIdx.x + half];
    }
    block_sync();
  }
  return shared[0];
}

DEVICE float block_total(float own, float* shared) {
  shared[threadIdx.x] = own;
  block_sync();
  for (int half = THREADS / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
    block_sync();
  }
  return shared[0];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    best_in_chunk(const float* __restrict__ logits, i64 stride, int width, float* __restrict__ parts) {
  __shared__ Best bests[THREADS];
  __shared__ float sums[THREADS];
  const i64 row = blockIdx.y;
  const float* x = logits + row * stride;
  const int start = blockIdx.x * CHUNK;
  const int stop = start + CHUNK < width ? start + CHUNK : width;
  Best own = {-infinity(), start};
  wait_for_earlier();
  for (int i = start + threadIdx.x; i < stop; i += THREADS) {
    Best next = {x[i], i};
    if (next.value == -infinity()) continue;
    if (beats(next, own)) own = next;
  }
  Best best = block_best(own, bests);
  float sum = 0.0f;
  for (int i = start + threadIdx.x; i < stop; i += THREADS) {
    if (best.value > -infinity()) sum += exp_near(x[i] - best.value);
  }
  sum = block_total(sum, sums);
  if (threadIdx.x == 0) {
    float* part = parts + (row * gridDim.x + blockIdx.x) * 3;
    part[0] = best.value;
    part[1] = (float)best.place;
    part[2] = sum;
  }
  let_next_start();
}
EXPORT(best_in_chunk)

extern "C" __global__ void __launch_bounds__(THREADS)
    best_of_chunks(const float* __restrict__ parts, int chunks, int rows, float* __restrict__ out) {
  __shared__ Best bests[THREADS];
  __shared__ float sums[THREADS];
  const i64 row = blockIdx.x;
  const float* own_parts = parts + row * chunks * 3;
  wait_for_earlier();
  Best own = {-infinity(), 0};
  bool any = false;
  for (int i = threadIdx.x; i < chunks; i += THREADS) {
    Best next = {own_parts[i * 3], (int)own_parts[i * 3 + 1]};
    if (!any || beats(next, own)) own = next;
    any = true;
  }
  if (!any) own.place = 0x7FFFFFFF;
  Best best = block_best(own, bests);
  float sum = 0.0f;
  for (int i = threadIdx.x; i < chunks; i += THREADS) {
    float value = own_parts[i * 3];
    if (value > -infinity()) sum += own_parts[i * 3 + 2] * exp_near(value - best.value);
  }
  sum = block_total(sum, sums);
  if (threadIdx.x == 0) {
    out[row] = (float)best.place;
    out[rows + row] = -0.6931471805599453f * log2_near(sum);
    out[2 * rows + row] = best.value;
  }
  let_next_start();
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
