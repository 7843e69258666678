// The number formats of a cached latent, as kernels/latent_format.py has them, and how a panel of positions is read.
#pragma once

#include "api.h"
#include "heads.h"
#include "levels.h"
#include "tile.h"

namespace dstgi {

enum LatentMode : int64_t { L_FLOAT32, L_BFLOAT16, L_FLOAT16, L_INT8, L_INT4, L_FP8 };

constexpr int MAX_ROTATED = 32;  // elements of the largest rotated group

DSTGI_INLINE bool is_turned(int64_t i) { return (0x7888 >> (i & 15) & 1) != 0; }  // 3, 7, 11, 12, 13, 14

DSTGI_INLINE int64_t latent_row_bytes(const LatentPages& p) {
  return p.mode == L_FLOAT32 ? p.rank * 4 : p.mode <= L_FLOAT16 ? p.rank * 2 : p.mode == L_INT4 ? p.rank / 2 : p.rank;
}

// Of every column of x [rank][columns], rows `stride` apart, columns a multiple of 16: D H undoes INT4's rotation of a
// latent; H D turns a query, since q (D H y) = (H D q) y.
void unrotate_columns(float* x, int64_t rank, int64_t group, int64_t columns, int64_t stride);
void rotate_queries(float* x, int64_t rank, int64_t group, int64_t columns, int64_t stride);

// Undoes the rotation of rows: x [rows][rank], dense; memory up to the next multiple of 16 rows is overwritten as well.
void unrotate_rows(float* x, int64_t rows, int64_t rank, int64_t group);

// Where neighbouring positions lie: sixteen from a multiple of sixteen are in one page, since a block holds such.
struct Place {
  const char *latent, *rope, *scale;
};

struct RowBytes {
  int64_t latent, rope, scale;
};

DSTGI_INLINE RowBytes row_bytes(const LatentPages& p) {
  const int64_t groups = p.mode < L_INT8 ? 0 : p.rank / p.group;
  return {latent_row_bytes(p), p.rope_dim * (p.mode == L_FLOAT32 ? 4 : 2), groups * (p.mode == L_INT4 ? 1 : 2)};
}

DSTGI_INLINE Place find_place(const LatentPages& p, const RowBytes& bytes, const int32_t* table, int64_t position) {
  const int64_t page = table[position / p.block_size] * p.page_stride, row = position % p.block_size;
  return {p.latent + page + row * bytes.latent, p.rope + page + row * bytes.rope, p.scale + page + row * bytes.scale};
}

// Up to sixteen positions from `from` on, a multiple of sixteen, of the request with block table `table`: rows `pitch`
// apart, the latent, then the rotary key.
void load_positions(const LatentPages& p, const int32_t* table, int64_t from, int64_t n, float* panel,
                    int64_t pitch);

// What `load_positions` will read: the latents, to be asked for on the way; the rest is asked for here.
inline Ahead positions_ahead(const LatentPages& p, const int32_t* table, int64_t from, int64_t n) {
  const RowBytes bytes = row_bytes(p);
  const Place at = find_place(p, bytes, table, from);
  for (int64_t i = 0; i < n * bytes.rope; i += 64) __builtin_prefetch(at.rope + i);
  for (int64_t i = 0; i < n * bytes.scale; i += 64) __builtin_prefetch(at.scale + i);
  return {at.latent, at.latent + n * bytes.latent};
}

}  // namespace dstgi
