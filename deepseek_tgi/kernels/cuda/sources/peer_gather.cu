// Columns of WORLD ranks side by side: out[row] is x[row] of rank 0, then that of rank 1, and so on. Each rank's x
// `[rows, width of the rank]` is cut, as it lies in memory, into pieces of FLOATS, of which a launch swaps those that begin
// at `start`; a piece goes the way of `peer_sum_long`.
#include "inboxes.cuh"

struct Widths {
  int of[8];
};

// Four values of x from element `at` on, of `end`, to their columns, which begin at `first`.
DEVICE void spread_four(float* out, int total, int first, int width, int at, int end, words4 value) {
  const int row = at / width, column = at - row * width;
  float* to = out + (i64)row * total + first + column;
  if (width % 4 == 0 && (first | total) % 4 == 0) {  // then x is made of whole fours, and they do not cross rows
    *(words4*)to = value;
    return;
  }
  const u32 words[4] = {value.x, value.y, value.z, value.w};
  int left = width - column;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    while (left == 0) left = width, to += total - width;
    if (at + i < end) *to = bits_float(words[i]);
    to++, left--;
  }
}

// `x` and `out` begin on 16-byte boundaries. The grid covers the longest rank's piece.
extern "C" __global__ void __launch_bounds__(THREADS)
    peer_gather(const float* x, float* out, int rows, int start, int width0, int width1, int width2, int width3, int width4,
                int width5, int width6, int width7, int rank, const u8* own, u8* place0, u8* place1, u8* place2,
                u8* place3, u8* place4, u8* place5, u8* place6, u8* place7, int* state, u32* over, i64 limit) {
  const Places places = {{place0, place1, place2, place3, place4, place5, place6, place7}};
  const Widths widths = {{width0, width1, width2, width3, width4, width5, width6, width7}};
  __shared__ int lost, taken;
  int total = 0, end = 0;
#pragma unroll
  for (int r = 0; r < WORLD; r++) {
    total += widths.of[r];
    if (r == rank) end = rows * widths.of[r];
  }
  wait_for_earlier();
  const u32 number = next_number(state);
  const int chunk = take_chunk(state, &taken), from = start + chunk * CHUNK + threadIdx.x * 4;
  words4 mine[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) mine[v] = read_four(x, from + v * THREADS * 4, end);
#pragma unroll
  for (int r = 0; r < WORLD; r++) {
    u8* to = places.of[r] + FLOATS_AT + ((i64)inbox(rank, r, number) * FLOATS + from - start) * 4;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      if (r != rank && from + v * THREADS * 4 < end) *(words4*)(to + v * THREADS * 16) = mine[v];
    }
  }
  block_sync();
  let_next_start();
  const bool failed = swap_flags(places, own, rank, taken, number, over, limit, &lost, [&](int r) {
    int of_rank = 0;
#pragma unroll
    for (int i = 0; i < WORLD; i++) {
      if (i == r) of_rank = rows * widths.of[i];
    }
    return taken == 0 || start + taken * CHUNK < of_rank;  // who has nothing left takes part all the same
  });
  int first = 0;
#pragma unroll
  for (int r = 0; r < WORLD; r++) {
    const u8* theirs = own + FLOATS_AT + ((i64)inbox(r, rank, number) * FLOATS + from - start) * 4;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int at = from + v * THREADS * 4, of_rank = rows * widths.of[r];
      if (at >= of_rank) continue;
      words4 part = r == rank ? mine[v] : load_fresh(theirs + v * THREADS * 16);
      if (failed) part = {FAILED, FAILED, FAILED, FAILED};
      spread_four(out, total, first, widths.of[r], at, of_rank, part);
    }
    first += widths.of[r];
  }
  end_exchange(state, taken, number);
}
EXPORT(peer_gather)
