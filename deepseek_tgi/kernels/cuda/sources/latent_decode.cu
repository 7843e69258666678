// Attention of one query token a request over cached latents (MLA, absorbed): for every head
// parts = softmax(q' K) K[:RANK], K of a position being its latent and its rotary key, read once for 16 heads.
//
// All requests' contexts lie end to end as pieces of TOKENS positions; every block takes an equal run of pieces,
// whatever the lengths, and leaves one part a request it met; latent_combine puts the parts together. The sum's order
// follows from lengths alone.
//
// A warp owns a quarter of the latent: it copies those columns of a piece to its own shared memory, multiplies them
// with its part of the queries, and adds them up by weight. Between the two the warps exchange their parts of the
// scores. Quantised latents become halves in registers, of half their value so that the largest stay in range: as pairs
// of elements they are the scores' operand, turned over the diagonal, as pairs of tokens, that of the sums. Rotated INT4
// groups are read as they are: the up-projections carry the rotation.
//
// Elements of a quad: in all modes a lane's element e of step s (16 of the warp's elements) is `element(s, t, e)`, both
// as the queries' operand and as the sums' result.
#include "device.cuh"
#include "latent_parts.cuh"

constexpr int STEPS = OWN / 16;
constexpr int ROW = OWN * (INT4 ? 1 : BYTES ? 2 : 4) / 2;  // bytes of a token's latent in the warp's memory
constexpr int CHUNKS = ROW / 16;
constexpr int LATENT_ROW = ROW * WARPS, ROPE_ROW = ROPE * 2, ROPE_OWN = ROPE / WARPS * 2;
constexpr int SCALE_ROW = INT4 ? RANK / GROUP : RANK / GROUP * 2;  // 16 or 8 bytes
constexpr int SCALES = BYTES ? TOKENS * SCALE_ROW : 0;
constexpr int STAGE = TOKENS * (ROW + ROPE_OWN) + SCALES;
constexpr int PAGES = TOKENS / 16;  // at most so many pages hold a piece
constexpr float LOG2_E = 1.4426950408889634f;
// Weights are followed lazily: sums are scaled again only where a score exceeds the largest so far by more than SLACK, a
// power of two. Weights in halves are 2^8 times as large besides, so that small ones stay exact.
constexpr float WEIGHT_LOG2 = MODE ? 8.0f : 0.0f, SLACK = 7.0f;
constexpr u32 MAGIC = 0x64646464u, BIAS = 0x64806480u;
constexpr int CHAINS = TILES == 2 ? 2 : 1;  // sums of a score that are under way at a time

static_assert(OWN == 128 && ROPE == 64, "the kernel's cut of a latent");
static_assert(!BYTES || (INT4 ? GROUP == 32 : GROUP == 128), "the kernel's groups");

// Where the chunk of 16 bytes of a token's row lies, so that a warp's reads meet no bank twice.
DEVICE int chunk_at(int row, int chunk) {
  int turn = INT4 ? row >> 1 & 3 : BYTES ? (row & 1) << 2 : row & 7;
  return row * ROW + (chunk ^ turn) * 16;
}

// Elements 0, 1 and 2, 3 of step `s` of a query in bfloat16.
DEVICE void query_pairs(const u16* row, int s, int t, u32 (&pairs)[2]) {
  if (INT4) {
    u32 low = *(const u32*)(row + element(s, t, 0)), high = *(const u32*)(row + element(s, t, 1));
    pairs[0] = permute_bytes(low, high, 0x5410);
    pairs[1] = permute_bytes(low, high, 0x7632);
  } else if (BYTES) {
    words2 both = *(const words2*)(row + element(s, t, 0));
    pairs[0] = both.x;
    pairs[1] = both.y;
  } else {
    pairs[0] = *(const u32*)(row + element(s, t, 0));
    pairs[1] = *(const u32*)(row + element(s, t, 2));
  }
}

DEVICE void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  if (MODE) {
    mma_half(c, a, b);
  } else {
    mma_bf16(c, a, b);
  }
}

// Eight levels of INT4 as bytes with an offset of 128: of each code either the lower or the upper table gives its
// magnitude, the other gives 0, as the selector's top bit asks for the sign of a table's byte.
DEVICE void int4_bytes(u32 codes, u32 (&bytes)[2]) {
  u32 turned = codes ^ 0x88888888u;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 below = permute_bytes(0x3C4D627Fu, 0x06121F2Du, codes >> 16 * i);
    const u32 above = permute_bytes(0x2D1F1206u, 0x7F624D3Cu, turned >> 16 * i);
    bytes[i] = above + 0x80808080u - below;
  }
}

// A word's four elements as halves of half their value. `factor` is the scale, halved, in both halves of the register;
// INT4's has few bits, so that the offset joins the multiplication exactly.
DEVICE void widen(u32 word, u32 factor, u32 (&pairs)[2]) {
  if (FP8) {
    pairs[0] = half_mul(fp8_halves((u16)word), factor);
    pairs[1] = half_mul(fp8_halves((u16)(word >> 16)), factor);
  } else if (INT4) {
    const u32 offset = half_mul(factor, 0xE480E480u);  // -1152
    pairs[0] = half_fma(permute_bytes(word, MAGIC, 0x4140), factor, offset);
    pairs[1] = half_fma(permute_bytes(word, MAGIC, 0x4342), factor, offset);
  } else {
    const u32 bytes = word ^ 0x80808080u;
    pairs[0] = half_mul(half_sub(permute_bytes(bytes, MAGIC, 0x4140), BIAS), factor);
    pairs[1] = half_mul(half_sub(permute_bytes(bytes, MAGIC, 0x4342), BIAS), factor);
  }
}

extern "C" __global__ void __launch_bounds__(128, BLOCKS)
    latent_decode(const u16* q_latent, i64 q_latent_head, i64 q_latent_row, const u16* q_rope,
                  i64 q_rope_head, i64 q_rope_row, const u8* __restrict__ latent, const u8* __restrict__ rope,
                  const u8* __restrict__ scales, int page_bytes, const int* __restrict__ tables, i64 table_stride,
                  const int* __restrict__ cache_lens, int batch, int heads, float scale, float* __restrict__ parts,
                  float* __restrict__ marks, int least) {
  const int warp = threadIdx.x / 32, lane = lane_id(), g = lane / 4, t = lane % 4;
  const int row_tile = blockIdx.y;
  u8* const own = dynamic_shared() + warp * STAGES * STAGE;
  words4(*const exchange)[WARPS][TILES][32] = (words4(*)[WARPS][TILES][32])(dynamic_shared() + WARPS * STAGES * STAGE);
  float(*const tops)[16] = (float(*)[16])(exchange + 2);
  const Cut cut = make_cut(cache_lens, batch, gridDim.x, least);
  const int begin = start_of(cut, blockIdx.x), end = start_of(cut, blockIdx.x + 1);
  int parity = 0;
  bool waited = false;  // lengths and tables are older than the launch before this one

  for (Segment at = find_segment(cache_lens, batch, begin); at.piece < end; at = next_segment(cache_lens, batch, at)) {
    const int first = at.piece - at.origin, length = cache_lens[at.request] + 1;
    const int last = min_of(end - at.origin, at.pieces);
    const int* table = tables + at.request * table_stride;

    // --- what copies need of the block table, a piece ahead ---
    auto look_up = [&](int piece, int (&pages)[PAGES]) {
#pragma unroll
      for (int i = 0; i < PAGES; i++) {
        int position = piece * TOKENS + 16 * i;
        pages[i] = piece < last && position < length ? table[position / BLOCK] : 0;
      }
    };
    constexpr int LANES = CHUNKS, ROWS_AT_ONCE = 32 / LANES;
    const u8* const lane_latent = latent + lane / LANES * LATENT_ROW + warp * ROW + lane % LANES * 16;
    const u8* const lane_rope = rope + lane / 2 * ROPE_ROW + warp * ROPE_OWN + lane % 2 * 16;
    const u8* const lane_scales = BYTES ? scales + lane * 16 : scales;
    auto copies = [&](int piece, int slot, const int (&pages)[PAGES], bool all) {
      u8* const to = own + slot * STAGE;
      const int there = length - piece * TOKENS;
#pragma unroll
      for (int half = 0; half < PAGES; half++) {
        const i64 page = (i64)pages[half] * page_bytes;
        const int place = BLOCK == 16 ? 0 : (piece * TOKENS + 16 * half) % BLOCK;
        const u8* const from = lane_latent + page + place * LATENT_ROW;
#pragma unroll
        for (int i = 0; i < 16 / ROWS_AT_ONCE; i++) {
          const int row = 16 * half + lane / LANES + i * ROWS_AT_ONCE;
          copy_async(to + chunk_at(row, lane % LANES), from + i * ROWS_AT_ONCE * LATENT_ROW, all || row < there);
        }
        const int row = 16 * half + lane / 2;
        copy_async(to + TOKENS * ROW + row * ROPE_OWN + lane % 2 * 16, lane_rope + page + place * ROPE_ROW,
                   all || row < there);
        if (BYTES && lane < SCALE_ROW) {  // 16 tokens' scales are so many chunks
          const int first_row = 16 * half + lane * 16 / SCALE_ROW;
          copy_async(to + TOKENS * (ROW + ROPE_OWN) + (half * SCALE_ROW + lane) * 16,
                     lane_scales + page + place * SCALE_ROW, all || first_row < there);
        }
      }
    };
    auto copy_piece = [&](int piece, int slot, const int (&pages)[PAGES]) {
      if ((piece + 1) * TOKENS <= length) {
        copies(piece, slot, pages, true);
      } else {
        copies(piece, slot, pages, false);
      }
    };
    warp_sync();
    int early[STAGES - 1][PAGES], pages[PAGES];
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) look_up(first + i, early[i]);
    look_up(first + STAGES - 1, pages);
    if (!waited) {
      wait_for_earlier();
      let_next_start();
      waited = true;
    }
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
      if (first + i < last) copy_piece(first + i, i, early[i]);
      copy_commit();
    }

    // --- queries; as halves, rows are scaled by a power of two ---
    u32 query[STEPS][4], query_rope[4];
    float row_units[2] = {1.0f, 1.0f};
    {
      const int rows[2] = {row_tile * 16 + g, row_tile * 16 + g + 8};
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const bool there = rows[half] < heads;
        const u16* from = q_latent + (there ? rows[half] : 0) * q_latent_head + at.request * q_latent_row + warp * OWN;
        float top = 0.0f;
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
          u32 pairs[2];
          query_pairs(from, s, t, pairs);
#pragma unroll
          for (int i = 0; i < 2; i++) {
            query[s][half + 2 * i] = there ? pairs[i] : 0;
            if (MODE) top = fmaxf(top, fmaxf(fabsf(bf16_low(pairs[i])), fabsf(bf16_high(pairs[i]))));
          }
        }
        if (MODE) {
          top = fmaxf(top, shuffle_xor(top, 1));
          top = fmaxf(top, shuffle_xor(top, 2));
          if (t == 0) tops[warp][g + 8 * half] = top;
        }
        from = q_rope + (there ? rows[half] : 0) * q_rope_head + at.request * q_rope_row + warp * (ROPE / WARPS) + 4 * t;
        const words2 pair = *(const words2*)from;
        query_rope[half] = there ? pair.x : 0;
        query_rope[half + 2] = there ? pair.y : 0;
      }
      if (MODE) {
        block_sync();
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int row = g + 8 * half;
          const float top = fmaxf(fmaxf(tops[0][row], tops[1][row]), fmaxf(tops[2][row], tops[3][row]));
          u32 unit = float_bits(top) & 0x7F800000u;
          if (unit < 0x01000000u || unit >= 0x7E800000u) unit = 0x3F800000u;
          row_units[half] = bits_float(unit);
          const float inverse = bits_float(0x7F000000u - unit), rope_inverse = BYTES ? 0.5f * inverse : inverse;
#pragma unroll
          for (int i = half; i < 4; i += 2) {
#pragma unroll
            for (int s = 0; s < STEPS; s++)
              query[s][i] = half_pair(bf16_low(query[s][i]) * inverse, bf16_high(query[s][i]) * inverse);
            const float low = bf16_low(query_rope[i]) * rope_inverse, high = bf16_high(query_rope[i]) * rope_inverse;
            query_rope[i] = MODE == 1 ? half_pair(low, high) : bf16_pair(low, high);
          }
        }
        block_sync();
      }
    }
    const float unit = scale * LOG2_E * (BYTES ? 2.0f : 1.0f);
    const float units[2] = {unit * row_units[0], unit * row_units[1]};

    float sums[2 * STEPS][4];
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) sums[i][j] = 0.0f;
    float largest[2] = {-infinity(), -infinity()}, total[2] = {0.0f, 0.0f};
    int slot = 0, free_slot = STAGES - 1;
    for (int piece = first; piece < last; piece++) {
      copy_wait<STAGES - 2>();
      warp_sync();
      if (piece + STAGES - 1 < last) copy_piece(piece + STAGES - 1, free_slot, pages);
      copy_commit();
      look_up(piece + STAGES, pages);
      const u8* const held = own + slot * STAGE;
      const u8* const held_rope = held + TOKENS * ROW;
      const u8* const held_scales = held_rope + TOKENS * ROPE_OWN;
      slot = slot + 1 == STAGES ? 0 : slot + 1;
      free_slot = free_slot + 1 == STAGES ? 0 : free_slot + 1;

      // --- this warp's part of the scores ---
      float scores[TILES][4];
      u32 kept[BYTES ? TILES : 1][STEPS][2];
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        float sum[CHAINS][4];
#pragma unroll
        for (int i = 0; i < 4 * CHAINS; i++) sum[i / 4][i % 4] = 0.0f;
        {
          const words2 keys = *(const words2*)(held_rope + (8 * j + g) * ROPE_OWN + 8 * t);
          const u32 b[2] = {keys.x, keys.y};
          if (MODE == 1) {
            mma_half(sum[0], query_rope, b);
          } else {
            mma_bf16(sum[0], query_rope, b);
          }
        }
        if (BYTES) {
          const int row = 8 * j + g;
          u32 words[STEPS], factors[4];
          if (INT4) {
            u32 bytes = *(const u32*)(held_scales + row * SCALE_ROW + 4 * warp);
#pragma unroll
            for (int i = 0; i < 4; i++) {
              u32 two[2];
              int4_bytes(*(const u32*)(held + chunk_at(row, i) + 4 * t), two);
              words[2 * i] = two[0];
              words[2 * i + 1] = two[1];
              factors[i] = half_mul(permute_bytes(bytes, 0, 0x0404 | i << 12 | i << 4) >> 1, 0x20002000u);  // 2^-7
            }
          } else {
#pragma unroll
            for (int i = 0; i < 2; i++) {
              const words4 four = *(const words4*)(held + chunk_at(row, 4 * i + t));
              words[4 * i] = four.x;
              words[4 * i + 1] = four.y;
              words[4 * i + 2] = four.z;
              words[4 * i + 3] = four.w;
            }
            u32 own_scale = *(const u16*)(held_scales + row * SCALE_ROW + 2 * warp);
            // A copied chunk has two tokens' scales: of a last token without a second, what nobody wrote.
            if (piece * TOKENS + row >= length) own_scale = 0;
            factors[0] = half_mul(permute_bytes(own_scale, 0, 0x1010), 0x38003800u);  // 1/2
          }
#pragma unroll
          for (int s = 0; s < STEPS; s++) {
            widen(words[s], factors[INT4 ? s / 2 : 0], kept[j][s]);
            mma_half(sum[s % CHAINS], query[s], kept[j][s]);
          }
        } else {
#pragma unroll
          for (int s = 0; s < STEPS; s += 2) {
            u32 keys[4];
            load_tiles(keys, held + chunk_at(8 * j + lane % 8, 2 * s + lane / 8));
            const u32 b[2][2] = {{keys[0], keys[1]}, {keys[2], keys[3]}};
            mma(sum[0], query[s], b[0]);
            mma(sum[CHAINS - 1], query[s + 1], b[1]);
          }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) scores[j][i] = CHAINS == 1 ? sum[0][i] : sum[0][i] + sum[CHAINS - 1][i];
      }

      // --- all of the scores: sums of two warps, then of both; the same bits in every warp ---
#pragma unroll
      for (int j = 0; j < TILES; j++)
        exchange[parity][warp][j][lane] = words4{float_bits(scores[j][0]), float_bits(scores[j][1]),
                                                 float_bits(scores[j][2]), float_bits(scores[j][3])};
      block_sync();
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        const words4 beside = exchange[parity][warp ^ 1][j][lane];
        const words4 one = exchange[parity][warp ^ 2][j][lane], other = exchange[parity][warp ^ 3][j][lane];
        scores[j][0] = (scores[j][0] + bits_float(beside.x)) + (bits_float(one.x) + bits_float(other.x));
        scores[j][1] = (scores[j][1] + bits_float(beside.y)) + (bits_float(one.y) + bits_float(other.y));
        scores[j][2] = (scores[j][2] + bits_float(beside.z)) + (bits_float(one.z) + bits_float(other.z));
        scores[j][3] = (scores[j][3] + bits_float(beside.w)) + (bits_float(one.w) + bits_float(other.w));
      }
      parity ^= 1;

      // --- weights ---
      if ((piece + 1) * TOKENS > length) {
#pragma unroll
        for (int j = 0; j < TILES; j++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            if (piece * TOKENS + 8 * j + 2 * t + i % 2 >= length) scores[j][i] = -infinity();
      }
      float top[2] = {-infinity(), -infinity()};
#pragma unroll
      for (int j = 0; j < TILES; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) top[i / 2] = fmaxf(top[i / 2], scores[j][i]);
      float origin[2];  // a weight is 2 to the power of score * unit - origin
#pragma unroll
      for (int i = 0; i < 2; i++) {
        top[i] = fmaxf(top[i], shuffle_xor(top[i], 1));
        top[i] = fmaxf(top[i], shuffle_xor(top[i], 2));
        top[i] *= units[i];
        if (!(top[i] > largest[i] + SLACK)) top[i] = largest[i];
        origin[i] = top[i] - WEIGHT_LOG2;
      }
      if (warp_ballot(top[0] != largest[0] || top[1] != largest[1])) {
        const float faded[2] = {exp2_near(largest[0] - top[0]), exp2_near(largest[1] - top[1])};
#pragma unroll
        for (int i = 0; i < 2 * STEPS; i++)
#pragma unroll
          for (int k = 0; k < 4; k++) sums[i][k] *= faded[k / 2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          total[i] *= faded[i];
          largest[i] = top[i];
        }
      }
      u32 weights[TILES][2];
#pragma unroll
      for (int j = 0; j < TILES; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float low = exp2_near(scores[j][2 * i] * units[i] - origin[i]);
          const float high = exp2_near(scores[j][2 * i + 1] * units[i] - origin[i]);
          total[i] += low + high;
          weights[j][i] = MODE ? half_pair(low, high) : bf16_pair(low, high);
        }

      // --- sums ---
#pragma unroll
      for (int j = 0; j < TILES; j += 2) {
        const u32 a[4] = {weights[j][0], weights[j][1], weights[j + 1][0], weights[j + 1][1]};
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
          u32 b[2][2];
          if (BYTES) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
              b[i][0] = turn_tile(kept[j][s][i]);
              b[i][1] = turn_tile(kept[j + 1][s][i]);
            }
          } else {
            u32 values[4];
            load_tiles_turned(values, held + chunk_at(8 * j + lane % 16, 2 * s + lane / 16));
#pragma unroll
            for (int i = 0; i < 4; i++) b[i / 2][i % 2] = values[i];
          }
          mma(sums[2 * s], a, b[0]);
          mma(sums[2 * s + 1], a, b[1]);
        }
      }
    }

    // --- the request's part ---
    const i64 part = ((i64)(blockIdx.x + at.request) * gridDim.y + row_tile) * 16;
    const float back = BYTES ? 2.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      total[i] += shuffle_xor(total[i], 1);
      total[i] += shuffle_xor(total[i], 2);
      float* to = parts + (part + g + 8 * i) * RANK + warp * OWN + 4 * t;
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        const float* even = sums[2 * s] + 2 * i;
        const float* odd = sums[2 * s + 1] + 2 * i;
        *(words4*)(to + 16 * s) = words4{float_bits(even[0] * back), float_bits(even[1] * back),
                                         float_bits(odd[0] * back), float_bits(odd[1] * back)};
      }
      if (warp == 0 && t == 0) {
        marks[(part + g + 8 * i) * 2] = largest[i];
        marks[(part + g + 8 * i) * 2 + 1] = total[i];
      }
    }
  }
}
EXPORT(latent_decode)
