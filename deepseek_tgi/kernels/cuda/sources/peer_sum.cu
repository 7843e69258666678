// Sums over WORLD ranks: x[i] of rank 0, plus that of rank 1, and so on, in this order and so with the same bits on each.
//
// `peer_sum`: `out` may be another place than `x`, which then holds zeros afterwards, to be added to anew. Two values a
// packet, and beside each value, in the same word, the number of the sum: who finds the number has the value. Nothing else
// is waited for, so a sum takes as long as one way to the other GPU.
// `peer_sum_long`: values as they are, and then a flag for each block's chunk of them, which takes a second way and half
// the bytes.
#include "inboxes.cuh"

DEVICE u64 word_of(float value, u32 number) { return (u64)number << 32 | float_bits(value); }
DEVICE bool has_come(packet p, u32 number) { return (u32)(p.first >> 32) == number && (u32)(p.second >> 32) == number; }

extern "C" __global__ void __launch_bounds__(THREADS)
    peer_sum(float* x, float* out, int count, int rank, const u8* own, u8* place0, u8* place1, u8* place2, u8* place3,
             u8* place4, u8* place5, u8* place6, u8* place7, int* state, u32* over, i64 limit) {
  const Places places = {{place0, place1, place2, place3, place4, place5, place6, place7}};
  const int unit = blockIdx.x * THREADS + threadIdx.x, at = unit * 2;
  const bool whole = at + 1 < count;
  wait_for_earlier();
  const u32 number = next_number(state);
  const float first = at < count ? x[at] : 0.0f, second = whole ? x[at + 1] : 0.0f;
#pragma unroll
  for (int r = 0; r < WORLD; r++) {
    if (r != rank && at < count) {
      store_packet(places.of[r] + ((i64)inbox(rank, r, number) * PACKETS + unit) * PACKET_BYTES,
                   {word_of(first, number), word_of(second, number)});
    }
  }
  block_sync();
  const int said = say_read(state);
  let_next_start();

  if (at < count) {
    packet got[WORLD];
    u64 started = 0;
    bool failed = false;
    for (u32 looks = 1;; looks++) {
      int missing = -1;
#pragma unroll
      for (int r = 0; r < WORLD; r++) {
        if (r != rank) got[r] = load_packet(own + ((i64)inbox(r, rank, number) * PACKETS + unit) * PACKET_BYTES);
      }
#pragma unroll
      for (int r = 0; r < WORLD; r++) {
        if (r != rank && !has_come(got[r], number)) missing = r;
      }
      if (missing < 0) break;
      failed = given_up(looks, started, missing, over, limit);
      if (failed) break;
    }
    float sums[2];
#pragma unroll
    for (int r = 0; r < WORLD; r++) {
      const float low = r == rank ? first : bits_float((u32)got[r].first);
      const float high = r == rank ? second : bits_float((u32)got[r].second);
      sums[0] = r ? plus(sums[0], low) : low;
      sums[1] = r ? plus(sums[1], high) : high;
    }
    if (out != x) x[at] = 0.0f;
    if (out != x && whole) x[at + 1] = 0.0f;
    out[at] = failed ? bits_float(FAILED) : sums[0];
    if (whole) out[at + 1] = failed ? bits_float(FAILED) : sums[1];
  }
  end_exchange(state, said, number);
}
EXPORT(peer_sum)

DEVICE words4 add_four(words4 a, words4 b) {
  return {float_bits(plus(bits_float(a.x), bits_float(b.x))), float_bits(plus(bits_float(a.y), bits_float(b.y))),
          float_bits(plus(bits_float(a.z), bits_float(b.z))), float_bits(plus(bits_float(a.w), bits_float(b.w)))};
}

// `x` begins on a 16-byte boundary.
extern "C" __global__ void __launch_bounds__(THREADS)
    peer_sum_long(float* x, int count, int rank, const u8* own, u8* place0, u8* place1, u8* place2, u8* place3,
                  u8* place4, u8* place5, u8* place6, u8* place7, int* state, u32* over, i64 limit) {
  const Places places = {{place0, place1, place2, place3, place4, place5, place6, place7}};
  __shared__ int lost, taken;
  wait_for_earlier();
  const u32 number = next_number(state);
  const int chunk = take_chunk(state, &taken), from = chunk * CHUNK + threadIdx.x * 4;
  words4 mine[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) mine[v] = read_four(x, from + v * THREADS * 4, count);
#pragma unroll
  for (int r = 0; r < WORLD; r++) {
    u8* to = places.of[r] + FLOATS_AT + ((i64)inbox(rank, r, number) * FLOATS + from) * 4;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      if (r != rank && from + v * THREADS * 4 < count) *(words4*)(to + v * THREADS * 16) = mine[v];
    }
  }
  block_sync();
  let_next_start();
  const bool failed = swap_flags(places, own, rank, chunk, number, over, limit, &lost, [](int) { return true; });
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int at = from + v * THREADS * 4;
    if (at >= count) continue;
    words4 sum;
#pragma unroll
    for (int r = 0; r < WORLD; r++) {
      const words4 part =
          r == rank ? mine[v] : load_fresh(own + FLOATS_AT + ((i64)inbox(r, rank, number) * FLOATS + at) * 4);
      sum = r ? add_four(sum, part) : part;
    }
    if (failed) sum = {FAILED, FAILED, FAILED, FAILED};
    write_four(x, at, count, sum);
  }
  end_exchange(state, chunk, number);
}
EXPORT(peer_sum_long)
