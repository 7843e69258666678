// The library's C interface, as `deepseek_tgi/kernels/library.py` declares it to ctypes. Every function is called with
// operands that Python has checked; none allocates anything it does not keep for reuse, none throws.
#pragma once

#include <cstdint>

#define DSTGI_API extern "C" __attribute__((visibility("default")))

// A packed integer weight. K is cut into `blocks` runs of `width` (a multiple of 16, padded with nothing's weight): each
// quantisation group holds `blocks_per_group` of them, so that no block crosses a group. N is cut into tiles of 32.
//   codes  int4: [tiles][blocks][width / 8][2][16] uint32, one lane an output, eight k a lane (see qlinear.cpp)
//          int8: [tiles][blocks][width / 4][2][16] uint32, four k a lane
//   scales [tiles][blocks][32] as `scale_kind` says; zeros [tiles][blocks][32] uint8 (int4 only)
struct QuantWeight {
  int64_t n, k, group_size, blocks_per_group, blocks, width;
  int64_t bits;        // 4 or 8
  int64_t scale_kind;  // 0 float32, 1 float16, 2 bfloat16
  int64_t digits;      // 1: activations to 15 bits of their block's largest; 2: to 31 bits
  int64_t num_threads;
  const uint32_t* codes;
  const void* scales;
  const uint8_t* zeros;
};

// A dense weight in tiles of 32 outputs. `kind`: 0 float32 [tiles][k][32], 1 bfloat16 pairs [tiles][(k + 1) / 2][2][16],
// 2 float16 [tiles][k][32], 3 float8 E4M3 [tiles][k][32] without NaN, with one float32 scale for each output and `block`
// inputs, [tiles][ceil(k / block)][32] (the others have no scales).
struct DenseWeight {
  int64_t n, k, kind, num_threads, block;
  const void* data;
  const float* scales;
};

// One layer's part of the pages; strides in bytes. `mode`: see HeadMode.
struct Pages {
  int64_t mode, num_pages, heads, block_size, k_dim, v_dim, page_stride;
  char *k, *v, *k_scale, *v_scale;
};

enum HeadMode : int64_t { H_FLOAT32, H_BFLOAT16, H_FLOAT16, H_INT8, H_FP8, H_INT4 };

// What low-bit keys and values of a layer are measured against (kernels/frame.py). centre, aim [heads][k_dim], weight
// [heads]; null if there is none. `pairs` [heads][pair_stride]: how many pairs of elements (i, i + rotary / 2) of the
// centre are not zero, then which. k_scale, v_scale: FP8 scales, 0 if each vector has its own.
struct Frame {
  const float *centre, *aim, *weight;
  const int32_t* pairs;
  int64_t pair_stride;
  float k_scale, v_scale;
};

// One layer's latents and rotary keys in the pages; strides in bytes. `mode`: 0 float32, 1 bfloat16, 2 float16, 3 int8,
// 4 int4, 5 float8 E4M3; from 3 on `group` elements share a scale and the rotary keys are bfloat16.
struct LatentPages {
  int64_t mode, num_pages, block_size, rank, rope_dim, group, page_stride;
  char *latent, *rope, *scale;
};

// A step's latents, rotary keys and queries on their way into the pages; `_row` strides in floats, the first `rotary`
// elements of a query head and of a key rotate.
struct LatentRows {
  float *q, *latent, *rope;
  const float* cos_sin;
  const int32_t* positions;
  const int64_t* slots;
  int64_t tokens, heads, q_dim, q_row, latent_row, rope_row, rotary, num_threads;
};

// The up-projection of latents. `kind`: 0 float32, 1 bfloat16. Both parts are cut into tiles of 64 columns, the last one
// narrower: keys [heads][rank / 64][nope][64], values [heads][v_pad / 64][rank][64], v_pad being v_dim rounded up to 16.
struct UpWeight {
  int64_t heads, nope, v_dim, v_pad, rank, kind;
  const void *keys, *values;
};

// Operands of a step's latent attention that all layers share. `expanded` [requests] or null says which requests are
// computed over expanded keys and values; `_row` strides in floats.
struct LatentCall {
  const float* q;
  float* out;
  const int32_t *cu_seqlens, *block_tables, *cache_lens;
  const uint8_t* expanded;
  int64_t requests, table_stride, q_row, num_threads;
  double scale;
};

// Operands of a step's attention that all layers share; `_row` strides in floats, `rotary` elements of a head rotate.
struct AttentionCall {
  float *q, *k;
  const float* v;
  float* out;
  const float* cos_sin;
  const int32_t* positions;
  const int64_t* slots;
  const int32_t *cu_seqlens, *block_tables, *cache_lens;
  int64_t tokens, requests, table_stride, heads, q_row, k_row, v_row, rotary, num_threads;
  double scale;
};

// How tokens choose experts. `counted`: the best experts that a group ranks by, 0 (groups do not count), 1 or 2.
struct RouteCall {
  int64_t experts, top_k, groups, top_groups, counted, sigmoid, normalise, num_threads;
  double scale;
};

// One expert; each of its matrices is a DenseWeight where said so, else a QuantWeight.
struct Expert {
  int64_t gate_up_dense, down_dense;
  const void *gate_up, *down;
  const int32_t* order;  // which input stands at each of gate_up's places; null: as they come
  int64_t layout;        // of `Experts`: whose digits of x it shares; -1: none (dense, or an order of its own)
};

// The experts of one layer. `layouts`: one weight for each way in which they want x as digits.
struct Experts {
  int64_t count, shared;  // experts[count] is every token's if `shared`
  int64_t hidden, num_layouts, num_threads;
  const Expert* experts;
  const QuantWeight* const* layouts;
};

// One meeting of ranks in shared memory: [world] lines of 64 bytes, each a counter of rounds and whether the rank has left,
// then [2][world][slot_floats]. Rounds begin at 1.
struct RankRound {
  int64_t rank, world, slot_floats;
  uint64_t round;
};

// What is done to the rows of x before the product.
enum Prologue : int64_t { PLAIN = 0, NORM = 1, SILU = 2 };
