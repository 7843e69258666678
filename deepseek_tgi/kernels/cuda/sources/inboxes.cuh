// What WORLD ranks, each with a GPU of its own, write into each other's memory (`place0` ...): there are inboxes from each
// of the others, one set for exchanges of odd and one for those of even numbers. Who sends the exchange after next has had
// everybody's part of the next one, which is sent only by who has read all of this one.
//
// `state` is this rank's: the number of its last exchange, then blocks of this launch that have read it. `over`, which the
// host sees too, is 0 until a rank is given up: by the host, or here after `limit` nanoseconds (2 + the rank's number).
// From then on nobody is waited for and results are NaN.
#pragma once
#include "peers.cuh"

constexpr u32 FAILED = 0x7FC00000u;
constexpr int OTHERS = WORLD - 1, CHUNK = THREADS * VECTORS * 4;
constexpr i64 PACKET_BYTES = sizeof(packet), FLOATS_AT = 2 * OTHERS * PACKETS * PACKET_BYTES;
constexpr i64 FLAGS_AT = FLOATS_AT + 2 * OTHERS * (i64)FLOATS * 4;

struct Places {
  u8* of[8];
};

// Which inbox of `to` is for what `from` sends in an exchange of that number.
DEVICE int inbox(int from, int to, u32 number) { return (number & 1) * OTHERS + (from < to ? from : from - 1); }
DEVICE u32 next_number(const int* state) {
  const u32 number = load_word(state) + 1;
  return number ? number : 2;  // what was never written has number 0
}
// True once nobody is waited for any more; `looks` counts from 1, `started` is 0 at first.
DEVICE bool given_up(u32 looks, u64& started, int missing, u32* over, i64 limit) {
  let_others_run();
  if (looks % PATIENCE) return false;
  const u64 now = nanoseconds();
  if (started == 0) started = now;
  const bool late = now - started > (u64)limit;
  if (late) store_word(over, 2 + missing);
  return late || load_word(over) != 0;
}
// The last block of a launch to have read the number, once all of its own threads have, writes the new one.
DEVICE int say_read(int* state) { return threadIdx.x == 0 ? atomic_add(state + 1, 1) : 0; }
// Which chunk this block is for: as many as have read the number before it, so that who waits for chunk c of another rank
// has begun all the chunks before c. Then of the first chunks that are not over on each rank the very first has come to
// all, or will without anybody's end, whatever the order in which blocks start and however few of them there is room for.
// Every thread comes here once it has read the number; `taken` is shared memory.
DEVICE int take_chunk(int* state, int* taken) {
  block_sync();
  if (threadIdx.x == 0) *taken = say_read(state);
  block_sync();
  return *taken;
}
DEVICE void end_exchange(int* state, int said, u32 number) {
  if (threadIdx.x || said != (int)gridDim.x - 1) return;
  state[1] = 0;
  store_word(state, number);
}

DEVICE i64 flag_at(int inbox, int chunk) { return FLAGS_AT + ((i64)inbox * (FLOATS / CHUNK) + chunk) * 4; }
// Says to all that this block's `chunk` lies in their inboxes, and waits until theirs lie in this rank's, as far as
// `there(r)` says that rank r has such a chunk; true if one will not come. Every thread of the block comes here, behind a
// block_sync; `lost` is shared memory.
template <class There>
DEVICE bool swap_flags(const Places& places, const u8* own, int rank, int chunk, u32 number, u32* over, i64 limit, int* lost,
                       There there) {
  if (threadIdx.x == 0) *lost = 0;
  block_sync();
#pragma unroll
  for (int r = 0; r < WORLD; r++) {
    if ((int)threadIdx.x != r || r == rank) continue;
    if (there(rank)) store_release(places.of[r] + flag_at(inbox(rank, r, number), chunk), number);
    if (!there(r)) continue;
    const u8* flag = own + flag_at(inbox(r, rank, number), chunk);
    u64 started = 0;
    for (u32 looks = 1; load_acquire(flag) != number; looks++) {
      if (given_up(looks, started, r, over, limit)) {
        *lost = 1;
        break;
      }
    }
  }
  block_sync();
  return *lost != 0;
}

// Four values from `at` on, those at `count` and behind being 0.
DEVICE words4 read_four(const float* x, int at, int count) {
  if (at + 3 < count) return *(const words4*)(x + at);
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) words[i] = at + i < count ? float_bits(x[at + i]) : 0;
  return {words[0], words[1], words[2], words[3]};
}
DEVICE void write_four(float* x, int at, int count, words4 value) {
  if (at + 3 < count) {
    *(words4*)(x + at) = value;
    return;
  }
  const u32 words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (at + i < count) x[at + i] = bits_float(words[i]);
  }
}
