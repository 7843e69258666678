// Who takes which part of a decode step's contexts: see paged_decode.cu.
#pragma once
#include "device.cuh"

DEVICE int smaller(int a, int b) { return a < b ? a : b; }

// A run of pieces [begin, end) of the contexts of request `request`, for heads of `group` (KV head, then part of it).
struct Segment {
  int request, group, begin, end, pieces, first;  // `first` is the flat number of the group's piece 0
};

// Equal shares of all pieces; `base` is 0 where clusters take a group each.
struct Shares {
  int base, extra;
};
DEVICE int start_of(const Shares& shares, int block) { return block * shares.base + smaller(block, shares.extra); }
DEVICE int owner_of(const Shares& shares, int piece) {
  int longer = shares.extra * (shares.base + 1);
  return piece < longer ? piece / (shares.base + 1) : shares.extra + (piece - longer) / shares.base;
}

DEVICE int pieces_of(const int* cache_lens, int request) { return cache_lens[request] / STEP + 1; }

// Of all requests, for one group: pieces in all, and those of the longest.
struct Contexts {
  int total, longest;
};
DEVICE Contexts all_contexts(const int* cache_lens, int batch) {
  Contexts all{0, 0};
  for (int b = lane_id(); b < batch; b += 32) {
    const int pieces = pieces_of(cache_lens, b);
    all.total += pieces;
    all.longest = pieces > all.longest ? pieces : all.longest;
  }
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) {
    all.total += shuffle_xor(all.total, mask);
    const int other = shuffle_xor(all.longest, mask);
    all.longest = other > all.longest ? other : all.longest;
  }
  return all;
}
// The segment that flat piece `at` lies in, as far as `end`.
DEVICE Segment find_segment(const int* cache_lens, int batch, int groups, int at, int end) {
  int before = 0;
  for (int from = 0; from < batch; from += 32) {
    int b = from + lane_id();
    int own = b < batch ? pieces_of(cache_lens, b) : 0, upto = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int other = shuffle(upto, lane_id() - step & 31);
      if (lane_id() >= step) upto += other;
    }
    u32 behind = warp_ballot((before + upto) * groups > at);
    if (behind) {
      int lane = first_bit(behind);
      int pieces = shuffle(own, lane), first = (before + shuffle(upto, lane) - pieces) * groups;
      int group = (at - first) / pieces, begin = (at - first) % pieces;
      return {from + lane, group, begin, smaller(pieces, begin + end - at), pieces, first + group * pieces};
    }
    before += shuffle(upto, 31);
  }
  return {batch, 0, 0, 0, 1, at};
}
