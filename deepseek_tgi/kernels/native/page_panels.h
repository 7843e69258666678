// How attention reads pages of keys and values: sixteen positions at a time into float32 panels.
//
// INT4 stays rotated: queries are rotated alike, and sums are rotated back. Its codes are transposed as words of eight,
// so that lanes are positions from the start and every position's scale is a lane.
#pragma once

#include "api.h"
#include "attention_tiles.h"
#include "head_int4.h"
#include "transpose.h"

namespace dstgi {

// One KV head in the pages of one request. `turns` [P / PANEL][rotary][PANEL]: cosines, then sines, of each position, if
// the head's keys have a centre, of which `num_pairs` `pairs` are not zero.
struct HeadPages {
  const Pages* p;
  const int32_t* table;
  int64_t head;
  const float* turns;
  int64_t rotary;
  const int32_t* pairs;
  int64_t num_pairs;
};

// What attention makes of the keys' centre in one panel.
struct CentrePanel {
  const float* rows[512 + 1];
  alignas(64) float marks[PANEL];
};

// Rows that the centre adds to a panel of keys: two for a pair, one for all that does not rotate.
DSTGI_INLINE int64_t centre_rows(const HeadPages& h) {
  return h.turns == nullptr ? 0 : 2 * h.num_pairs + (h.rotary < h.p->k_dim ? 1 : 0);
}

// `n` < 16 elements of a row's end, without reading past them.
template <int ITEM>
DSTGI_INLINE const char* padded_copy(const char* at, int n, char* room) {
  std::memset(room, 0, LANES * ITEM);
  std::memcpy(room, at, n * ITEM);
  return room;
}

constexpr int item_bytes(int mode) { return mode == H_FLOAT32 ? 4 : mode <= H_FLOAT16 ? 2 : 1; }

// Sixteen elements at `at` (`n` of them real, the others 0) as float32; `scale`, and `zero_point` for INT8.
template <int MODE>
DSTGI_INLINE F32 load_item(const char* at, int n, F32 scale, F32 zero_point) {
  constexpr int ITEM = item_bytes(MODE);
  if (MODE == H_FLOAT32) {
    const float* x = reinterpret_cast<const float*>(at);
    return n < LANES ? load_n(x, n) : load(x);
  }
  char room[LANES * ITEM];
  if (n < LANES) at = padded_copy<ITEM>(at, n, room);
  if (MODE == H_BFLOAT16) return load_bf16(reinterpret_cast<const uint16_t*>(at));
  if (MODE == H_FLOAT16) return load_half(reinterpret_cast<const uint16_t*>(at));
  const uint8_t* codes = reinterpret_cast<const uint8_t*>(at);
  const F32 x = MODE == H_INT8 ? fma(to_float(load_u8(codes)), scale, zero_point)
                               : mul(mul(load_e4m3(codes), set1(256.0f)), scale);
  return n < LANES ? keep_below(x, n, zero()) : x;
}

// Sixteen neighbouring positions of one head: they lie in one page, since a block holds a multiple of sixteen.
struct Group {
  const char *rows, *scale_rows;
  float scales[2 * LANES];  // INT8: scale, zero of each position; FP8: scale
};

template <int MODE>
DSTGI_INLINE void find_group(const HeadPages& h, int64_t at, bool is_key, Group* g) {
  const Pages& p = *h.p;
  const int64_t page = h.table[at / p.block_size] * p.page_stride;
  const int64_t row = h.head * p.block_size + at % p.block_size;
  g->rows = (is_key ? p.k : p.v) + page + row * head_bytes(MODE, is_key ? p.k_dim : p.v_dim);
  if (MODE < H_INT8) return;
  const char* scales = (is_key ? p.k_scale : p.v_scale) + page;
  const int64_t width = is_key ? p.k_dim : p.v_dim;
  g->scale_rows = scales + row * (MODE == H_INT8 ? 4 : MODE == H_FP8 ? 2 : width / int4_group(width));
  if (MODE == H_INT4) return;
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(g->scale_rows);
  store(g->scales, load_half(halves));
  if (MODE == H_INT8) store(g->scales + LANES, load_half(halves + LANES));
}

template <int MODE>
DSTGI_INLINE F32 scale_of(const Group& g, int64_t j) {
  return set1(g.scales[MODE == H_INT8 ? 2 * j : j]);
}
template <int MODE>
DSTGI_INLINE F32 zero_of(const Group& g, int64_t j) {
  return MODE == H_INT8 ? set1(g.scales[2 * j + 1]) : zero();
}

// Scales of sixteen positions (`count` of them real, the others 0), a row for each group, positions in lanes; returns
// the bytes of the first group.
DSTGI_INLINE I32 load_group_scales(const char* rows, int64_t count, int64_t groups, float* out) {
  alignas(64) int32_t words[MAX_GROUPS / 4][LANES] = {};
  for (int64_t j = 0; j < count; ++j)
    for (int64_t w = 0; w < (groups + 3) / 4; ++w)
      std::memcpy(&words[w][j], rows + j * groups + 4 * w, groups - 4 * w < 4 ? groups - 4 * w : 4);
  for (int64_t g = 0; g < groups; ++g)
    store(out + g * LANES, int4_scales(iand(shr32(iload(words[g / 4]), 8 * static_cast<int>(g % 4)), iset1(255))));
  return iand(iload(words[0]), iset1(255));
}

// INT4 keys of sixteen positions, `count` of them real, into column `block` of the panel; returns their marks, 0 or 1.
DSTGI_INLINE F32 load_int4_keys(const char* rows, const char* scale_rows, int64_t count, int64_t width, float* panel,
                                int64_t block) {
  const int64_t words = width / 8, words_a_group = int4_group(width) / 4, groups = width / int4_group(width);
  alignas(64) float turned[LANES * LANES], scales[MAX_GROUPS * LANES];
  const I32 first_bytes = load_group_scales(scale_rows, count, groups, scales);
  const F32 levels = load(LEVELS);
  float* to = panel + block;  // the low nibbles'; the high ones' lie half a vector further on
  const float* scale = scales;
  int64_t left = words_a_group;
  for (int64_t from = 0; from < words; from += LANES) {
    const int n = static_cast<int>(words - from < LANES ? words - from : LANES);
    F32 lines[LANES];
    for (int64_t j = 0; j < LANES; ++j)
      lines[j] = j < count ? load_n(reinterpret_cast<const float*>(rows + j * width / 2) + from, n) : zero();
    transpose16(lines, turned, LANES);
    for (int w = 0; w < n; ++w) {
      const I32 codes = as_int(load(turned + w * LANES));
      const F32 low = load(scale), high = load(scale + groups / 2 * LANES);
      DSTGI_UNROLL
      for (int t = 0; t < 4; ++t) {
        store(to, mul(lookup(levels, shr32(codes, 8 * t)), low));
        store(to + width / 2 * PANEL, mul(lookup(levels, shr32(codes, 8 * t + 4)), high));
        to += PANEL;
      }
      if (--left == 0) {
        left = words_a_group;
        scale += LANES;
      }
    }
  }
  return to_float(iand(first_bytes, iset1(1)));
}

// The centre's rows of one panel: cosines and sines in place, and the elements that do not rotate.
DSTGI_INLINE void find_turns(const HeadPages& h, int64_t from, const float** rows) {
  alignas(64) static const float ones[PANEL] = {
      1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
      1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  const float* turns = h.turns + from * h.rotary;  // `from` is a multiple of PANEL
  for (int64_t i = 0; i < h.num_pairs; ++i) {
    *rows++ = turns + h.pairs[i] * PANEL;
    *rows++ = turns + (h.rotary / 2 + h.pairs[i]) * PANEL;
  }
  if (h.rotary < h.p->k_dim) *rows = ones;
}

// Keys of positions [from, from + n) as [k_dim, rounded up to 16][PANEL]; what is beyond n is not looked at.
template <int MODE>
void load_keys(const HeadPages& h, int64_t from, int64_t n, float* panel, CentrePanel& centre, KeyPanel& out) {
  const int64_t width = h.p->k_dim, row_bytes = head_bytes(MODE, width);
  out = KeyPanel{panel};
  for (int64_t block = 0; block < n; block += LANES) {
    const int64_t rows = n - block < LANES ? n - block : LANES;
    Group g;
    find_group<MODE>(h, from + block, true, &g);
    if (MODE == H_INT4) {
      store(centre.marks + block, load_int4_keys(g.rows, g.scale_rows, rows, width, panel, block));
      continue;
    }
    for (int64_t d = 0; d < width; d += LANES) {
      F32 lines[LANES];
      for (int64_t j = 0; j < LANES; ++j)
        lines[j] = j < rows ? load_item<MODE>(g.rows + j * row_bytes + d * item_bytes(MODE), static_cast<int>(width - d),
                                              scale_of<MODE>(g, j), zero_of<MODE>(g, j))
                            : zero();
      transpose16(lines, panel + d * PANEL + block, PANEL);
    }
  }
  if (MODE < H_INT8 || h.turns == nullptr) return;
  find_turns(h, from, centre.rows);
  out = KeyPanel{panel, centre.rows, centre_rows(h), MODE == H_INT4 ? centre.marks : nullptr};
}

// INT4 values of up to sixteen positions as rows v_pad apart.
DSTGI_INLINE void load_int4_values(const char* rows, const char* scale_rows, int64_t count, int64_t width, float* to) {
  const int64_t group = int4_group(width), groups = width / group;
  alignas(64) int32_t places[MAX_INT4_HEAD];  // which scale an element has
  for (int64_t g = 0, d = 0; g < groups; ++g)
    for (int64_t i = 0; i < group; ++i) places[d++] = static_cast<int32_t>(g);
  const F32 levels = load(LEVELS);
  uint8_t room[LANES] = {};
  for (int64_t j = 0; j < count; ++j, to += width) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(scale_rows) + j * groups;
    if (groups < LANES) bytes = static_cast<const uint8_t*>(std::memcpy(room, bytes, groups));
    const F32 scales = int4_scales(load_u8(bytes));
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(rows) + j * (width / 2);
    for (int64_t d = 0; d < width / 2; d += LANES) {
      const I32 both = load_u8(codes + d);
      store(to + d, mul(lookup(levels, both), lookup(scales, iload(places + d))));
      store(to + width / 2 + d, mul(lookup(levels, shr32(both, 4)), lookup(scales, iload(places + width / 2 + d))));
    }
  }
}

// Values of positions [from, from + n) as rows v_pad apart; `groups` says where each sixteen begin: in the page itself if
// nothing has to be converted, else in the panel.
template <int MODE>
void load_values(const HeadPages& h, int64_t v_pad, int64_t from, int64_t n, float* panel, const float** groups) {
  const int64_t width = h.p->v_dim, row_bytes = head_bytes(MODE, width);
  for (int64_t block = 0; block < n; block += LANES) {
    const int64_t rows = n - block < LANES ? n - block : LANES;
    Group g;
    find_group<MODE>(h, from + block, false, &g);
    groups[block / LANES] = panel + block * v_pad;
    if (MODE == H_FLOAT32 && width == v_pad) {
      groups[block / LANES] = reinterpret_cast<const float*>(g.rows);
    } else if (MODE == H_INT4) {
      load_int4_values(g.rows, g.scale_rows, rows, width, panel + block * v_pad);
    } else {
      for (int64_t j = 0; j < rows; ++j)
        for (int64_t d = 0; d < width; d += LANES)
          store(panel + (block + j) * v_pad + d,
                load_item<MODE>(g.rows + j * row_bytes + d * item_bytes(MODE), static_cast<int>(width - d),
                                scale_of<MODE>(g, j), zero_of<MODE>(g, j)));
    }
  }
}

}  // namespace dstgi
