// How blocks share the contexts of a step: pieces of all requests end to end, equal runs of them for each block.
#pragma once

#define BYTES (MODE >= 2)
#define INT8 (MODE == 2)
#define FP8 (MODE == 3)
#define INT4 (MODE == 4)
constexpr int TOKENS = 8 * TILES, WARPS = 4, OWN = RANK / WARPS;

// Element of a warp's own that is number `e` of lane `t`'s four in step `s`: as codes lie in a word, so that words become
// operands without a shuffle.
DEVICE int element(int s, int t, int e) {
  if (INT4) return 32 * (s >> 1) + 4 * t + 2 * (s & 1) + (e >> 1) + 16 * (e & 1);
  if (BYTES) return 64 * (s >> 2) + 16 * t + 4 * (s & 3) + e;
  return 16 * s + 2 * t + (e & 1) + 8 * (e >> 1);
}

DEVICE int min_of(int a, int b) { return a < b ? a : b; }
DEVICE int max_of(int a, int b) { return a > b ? a : b; }

// A request's context in a decode step: what is stored and the token itself.
DEVICE int pieces_of(const int* cache_lens, int request) { return cache_lens[request] / TOKENS + 1; }

DEVICE int warp_total(int x) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) x += shuffle_xor(x, mask);
  return x;
}
// Pieces of the requests before `request`; the whole warp asks.
DEVICE int pieces_before(const int* cache_lens, int request) {
  int sum = 0;
  for (int b = lane_id(); b < request; b += 32) sum += pieces_of(cache_lens, b);
  return warp_total(sum);
}

// `blocks` runs of `total` pieces, the first `longer` of them one longer than the `base` of the others; run i begins at
// start_of(cut, i). None is shorter than `least`, unless all are one, or few requests have short contexts: then more
// blocks are the shorter way, of 32 positions or more.
struct Cut {
  int total, blocks, base, longer;
};
DEVICE int start_of(const Cut& cut, int block) {
  return block >= cut.blocks ? cut.total : block * cut.base + min_of(block, cut.longer);
}
DEVICE int owner_of(const Cut& cut, int piece) {
  const int in_longer = cut.longer * (cut.base + 1);
  return piece < in_longer ? piece / (cut.base + 1) : cut.longer + (piece - in_longer) / cut.base;
}
DEVICE Cut make_cut(const int* cache_lens, int batch, int blocks, int least) {
  const int total = pieces_before(cache_lens, batch), some = TOKENS > 32 || batch > 4 ? 1 : batch == 1 ? 32 : 16 * batch;
  const int used = max_of(1, min_of(blocks, max_of(total / least, min_of(total * TOKENS / 32, some))));
  return {total, used, total / used, total % used};
}

// A request's pieces as a block meets them: `piece` is the flat number it begins at, `origin` that of the request's
// first one.
struct Segment {
  int request, piece, origin, pieces;
};
// The segment of the flat piece `piece`; beyond all of them, a segment that begins there.
DEVICE Segment find_segment(const int* cache_lens, int batch, int piece) {
  int origin = 0;
  for (int base = 0; base < batch; base += 32) {
    const int own = base + lane_id() < batch ? pieces_of(cache_lens, base + lane_id()) : 0;
    int upto = own;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const int below = shuffle(upto, max_of(lane_id() - by, 0));
      if (lane_id() >= by) upto += below;
    }
    const u32 ends_later = warp_ballot(origin + upto > piece);
    if (ends_later) {
      const int lane = first_bit(ends_later);
      const int pieces = shuffle(own, lane);
      return {base + lane, piece, origin + shuffle(upto, lane) - pieces, pieces};
    }
    origin += shuffle(upto, 31);
  }
  return {batch, origin, origin, 0};
}
DEVICE Segment next_segment(const int* cache_lens, int batch, const Segment& at) {
  const int origin = at.origin + at.pieces, request = at.request + 1;
  return {request, origin, origin, request < batch ? pieces_of(cache_lens, request) : 0};
}
