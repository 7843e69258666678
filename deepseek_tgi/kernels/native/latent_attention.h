// What the two forms of latent attention share.
#pragma once

#include "attention_tiles.h"
#include "latent.h"
#include "pool.h"
#include "scratch.h"
#include "tile.h"

namespace dstgi {

constexpr int64_t UP_TILE = 64;  // columns of a tile of the up-projection

inline int64_t padded16(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

struct Step {
  const LatentPages& p;
  const UpWeight& up;
  const LatentCall& c;

  int64_t first(int64_t request) const { return c.cu_seqlens[request]; }
  int64_t tokens(int64_t request) const { return c.cu_seqlens[request + 1] - c.cu_seqlens[request]; }
  int64_t context(int64_t request) const { return c.cache_lens[request] + tokens(request); }
  bool expanded(int64_t request) const { return c.expanded != nullptr && c.expanded[request] != 0; }
  const int32_t* table(int64_t request) const { return c.block_tables + request * c.table_stride; }
  int64_t q_dim() const { return p.rope_dim + up.nope; }
  // Query of a token and head: the rotary part, then the rest.
  const float* query(int64_t token, int64_t head) const { return c.q + token * c.q_row + head * q_dim(); }
  float* output(int64_t token, int64_t head) const { return c.out + (token * up.heads + head) * up.v_dim; }

  // Floats between the positions of a panel: latent, rotary key; not a multiple of 1 KiB, which would crowd the cache.
  int64_t pitch() const {
    const int64_t n = p.rank + padded16(p.rope_dim);
    return n % 256 == 0 ? n + LANES : n;
  }
};

// Tile `tile` of a head's keys [nope][width] or values [rank][width], as elements from the start of the storage.
inline int64_t tile_width(int64_t columns, int64_t tile) {
  return columns - tile * UP_TILE < UP_TILE ? columns - tile * UP_TILE : UP_TILE;
}
inline int64_t key_tile(const UpWeight& up, int64_t head, int64_t tile) {
  return head * up.nope * up.rank + tile * UP_TILE * up.nope;
}
inline int64_t value_tile(const UpWeight& up, int64_t head, int64_t tile) {
  return head * up.rank * up.v_pad + tile * UP_TILE * up.rank;
}

void run_absorbed(const Step& s);
void run_expanded(const Step& s, int64_t request);

}  // namespace dstgi
