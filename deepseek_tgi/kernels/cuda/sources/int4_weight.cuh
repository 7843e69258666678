// How an INT4 weight lies in memory, for every kernel that multiplies by it (kernels/int4_linear/layout.py packs it).
//
// Rows come in tiles of 16, columns in chunks of 64. A chunk of a tile is 512 bytes: 16 for each lane of a warp, one word
// for each 16 columns. With g = lane / 4 and t = lane % 4, the word of step s holds the 8 codes that are the lane's part
// of operand A of mma.m16n8k16, already in its order: nibble j of the lower half is column 16 s + 2t (+ 8 for j >= 2) of
// row g (+ 8 for odd j), the upper half the column after it. A warp thus reads 512 consecutive bytes, and four
// three-input operations on shifted copies make the four registers of A.
// Beside it, for each tile and group of GROUP columns, the rows' words in pairs (row g, row g + 8): a scale's 16 bits and
// above them 128 + zero as bfloat16; or, where scales need 32 bits, two words a row. SCALE_KIND says which scales they
// are: 0 float32, 1 float16, 2 bfloat16.
#pragma once
#include "device.cuh"

constexpr int TILE_ROWS = 16, CHUNK = 64, CHUNK_BYTES = 512, GROUP_BYTES = SCALE_KIND ? 64 : 128;
constexpr u32 ONE_TO_128 = 0x43004300u;  // 128.0 in both halves: a code in the low bits of the mantissa adds itself

// The codes in the lowest nibbles of both halves, each plus 128, as bfloat16: exact.
DEVICE u32 widen(u32 word) { return lop3<0xEA>(word, 0x000F000Fu, ONE_TO_128); }

DEVICE float scale_of(u32 bits) {
  return SCALE_KIND == 0 ? bits_float(bits) : SCALE_KIND == 1 ? half_low(bits) : bf16_low(bits);
}

// What rows g and g + 8 of a group have: `scale` for scale_of, and 128 + zero in both halves.
struct RowPair {
  u32 scale[2], zero[2];
};
#if SCALE_KIND == 0
typedef words4 RowWords;
DEVICE RowPair row_pair(const RowWords& m) {
  return {{m.x, m.z}, {permute_bytes(m.y, m.y, 0x3232), permute_bytes(m.w, m.w, 0x3232)}};
}
#else
typedef words2 RowWords;
DEVICE RowPair row_pair(const RowWords& m) {
  return {{m.x, m.y}, {permute_bytes(m.x, m.x, 0x3232), permute_bytes(m.y, m.y, 0x3232)}};
}
#endif
DEVICE RowWords row_words(const void* group, int g) { return ((const RowWords*)group)[g]; }
DEVICE RowPair row_pair(const void* group, int g) { return row_pair(row_words(group, g)); }
