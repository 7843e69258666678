// latent_decode.cu for many heads: 64 of them share what is read, so that the matrix units and not memory set the pace.
// For Hopper's warpgroup instructions (sm_90a); the parts and their putting together are those of latent_decode.cu, with
// elements in their own order.
//
// One warpgroup makes operands: pieces of 64 positions, codes widened to halves of half their value (so that the largest
// stay halves) or copied, in one of two buffers. The other two attend: each scores 32 positions of a piece, they exchange
// largest scores and weights, and each adds up its half of the latent over all 64. Gates, barriers with a number, say
// that a buffer is full or free.
#include "latent_matrices.cuh"
#include "latent_parts.cuh"

constexpr int THREADS = 384, ATTENDING = 256, LINES = 64;
constexpr int TABLE = LINES * 128, TABLES = (RANK + ROPE) / 64, BUFFER = TABLE * TABLES;
constexpr int STEPS = RANK / 16, ROPE_STEPS = ROPE / 16, HELD = RANK / 2;
constexpr int FULL = 1, FREE = 3, TOGETHER = 5;
constexpr int LATENT_ROW = RANK * (INT4 ? 1 : BYTES ? 2 : 4) / 2, ROPE_ROW = ROPE * 2;
constexpr int SCALE_ROW = INT4 ? RANK / GROUP : RANK / GROUP * 2;
// Of weights, as in latent_decode.cu.
constexpr float LOG2_E = 1.4426950408889634f, WEIGHT_LOG2 = MODE ? 8.0f : 0.0f, SLACK = 7.0f;
constexpr u32 MAGIC = 0x64646464u, BIAS = 0x64806480u;

static_assert(RANK == 512 && ROPE == 64 && TOKENS == LINES, "the kernel's cut");
static_assert(!BYTES || (INT4 ? GROUP == 32 : GROUP == 128), "the kernel's groups");

DEVICE u8* line_part(u8* table, int line, int part) { return table + line * 128 + ((part ^ (line & 7)) << 4); }
DEVICE void put(u8* to, u32 a, u32 b, u32 c, u32 d) { *(words4*)to = words4{a, b, c, d}; }

// Two words of eight INT4 codes' levels as bytes with an offset of 128 (see latent_decode.cu).
DEVICE void int4_bytes(u32 codes, u32 (&bytes)[2]) {
  const u32 turned = codes ^ 0x88888888u;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 below = permute_bytes(0x3C4D627Fu, 0x06121F2Du, codes >> 16 * i);
    const u32 above = permute_bytes(0x2D1F1206u, 0x7F624D3Cu, turned >> 16 * i);
    bytes[i] = above + 0x80808080u - below;
  }
}
template <int selector>
DEVICE u32 halves_of(u32 bytes) {
  return half_sub(permute_bytes(bytes, MAGIC, selector), BIAS);
}

// What a thread of the making group holds of a piece: for quantised pages, 16 or 8 bytes of codes at 16 places, scales of
// two tokens, and rotary keys.
struct Raw {
  words4 codes[INT4 ? 8 : 16], scales[INT4 ? 2 : 1], rope[4];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    latent_wide(const u16* q_latent, i64 q_latent_head, i64 q_latent_row, const u16* q_rope,
                i64 q_rope_head, i64 q_rope_row, const u8* __restrict__ latent, const u8* __restrict__ rope,
                const u8* __restrict__ scales, int page_bytes, const int* __restrict__ tables, i64 table_stride,
                const int* __restrict__ cache_lens, int batch, int heads, float scale, float* __restrict__ parts,
                float* __restrict__ marks, int least) {
  u8* const base = dynamic_shared() + (-shared_address(dynamic_shared()) & 1023);
  u8* const queries = base;
  u8* const buffers = base + BUFFER;
  words4* const shared_weights = (words4*)(base + 3 * BUFFER);    // [2 groups][2][128 threads]
  float* const shared_tops = (float*)(shared_weights + 2 * 2 * 128);  // [2 groups][64 rows]
  float* const query_units = shared_tops + 2 * LINES;
  const int warp = threadIdx.x / 32, lane = lane_id(), group = threadIdx.x / 128;
  const int row_tile = blockIdx.y;
  const Cut cut = make_cut(cache_lens, batch, gridDim.x, least);  // lengths are older than the launch before this one
  const int begin = start_of(cut, blockIdx.x), end = start_of(cut, blockIdx.x + 1);
  wait_for_earlier();
  let_next_start();

  if (group == 2) {
    fewer_registers<MAKER_REGISTERS>();
    const int own = (warp - 8) * 16, quad_row = lane / 4, quad = lane % 4;
    int filled = 0;
    for (Segment at = find_segment(cache_lens, batch, begin); at.piece < end; at = next_segment(cache_lens, batch, at)) {
      const int first = at.piece - at.origin, length = cache_lens[at.request] + 1;
      const int last = min_of(end - at.origin, at.pieces);
      const int* table = tables + at.request * table_stride;
      auto page_of = [&](int piece) {
        const int position = piece * LINES + own;
        return piece < last && position < length ? table[position / BLOCK] : 0;
      };
      Raw raw;
      auto fetch = [&](int piece, int page) {
        const int place = (piece * LINES + own) % BLOCK;
        const u8* codes = latent + (i64)page * page_bytes + place * LATENT_ROW;
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int row = quad_row + 8 * i;
          const bool there = piece * LINES + own + row < length;
#pragma unroll
          for (int t = 0; t < 8; t++) {
            if (INT4) {
              words2 half = {0, 0};
              if (there) half = load_once8(codes + row * LATENT_ROW + 32 * t + 8 * quad);
              words4& both = raw.codes[4 * i + t / 2];
              if (t % 2) {
                both.z = half.x;
                both.w = half.y;
              } else {
                both.x = half.x;
                both.y = half.y;
              }
            } else {
              raw.codes[8 * i + t] = words4{0, 0, 0, 0};
              if (there) raw.codes[8 * i + t] = load_once(codes + row * LATENT_ROW + 64 * t + 16 * quad);
            }
          }
          const u8* from = scales + (i64)page * page_bytes + (place + row) * SCALE_ROW;
          if (INT4) {
            raw.scales[i] = there ? *(const words4*)from : words4{0, 0, 0, 0};
          } else {
            const words2 half = there ? *(const words2*)from : words2{0, 0};
            if (i) {
              raw.scales[0].z = half.x;
              raw.scales[0].w = half.y;
            } else {
              raw.scales[0].x = half.x;
              raw.scales[0].y = half.y;
            }
          }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int row = lane / 8 + 4 * i;
          raw.rope[i] = words4{0, 0, 0, 0};
          if (piece * LINES + own + row < length)
            raw.rope[i] = load_once(rope + (i64)page * page_bytes + (place + row) * ROPE_ROW + lane % 8 * 16);
        }
      };
      auto widen = [&](u8* buffer) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int row = own + quad_row + 8 * i;
#pragma unroll
          for (int t = 0; t < 8; t++) {
            u8* const to = buffer + t * TABLE;
            if (INT4) {
              const words4 four = raw.codes[4 * i + t / 2];
              const u32 words[2] = {t % 2 ? four.z : four.x, t % 2 ? four.w : four.y};
              // Two groups a table: this lane's is 2 t + quad / 2, its scale a byte of 16.
              const words4 all = raw.scales[i];
              const u32 word = t < 2 ? all.x : t < 4 ? all.y : t < 6 ? all.z : all.w;
              const u32 byte = permute_bytes(word, 0, 0x4440 + 2 * (t % 2) + quad / 2);
              const u32 factor = half_mul(byte << 7 | byte << 23, 0x20002000u);  // 2^-7
              u32 low[4], high[4];
#pragma unroll
              for (int k = 0; k < 2; k++) {
                u32 bytes[2];
                int4_bytes(words[k], bytes);
                // Of a byte's codes the low one is element i, the high one 16 + i.
                const u32 even = permute_bytes(bytes[0], bytes[1], 0x6420), odd = permute_bytes(bytes[0], bytes[1], 0x7531);
                low[2 * k] = half_mul(halves_of<0x4140>(even), factor);
                low[2 * k + 1] = half_mul(halves_of<0x4342>(even), factor);
                high[2 * k] = half_mul(halves_of<0x4140>(odd), factor);
                high[2 * k + 1] = half_mul(halves_of<0x4342>(odd), factor);
              }
              const int part = 4 * (quad / 2) + quad % 2;
              const bool turned = row & 1;  // odd lines begin with the other part: no bank is met twice
              put(line_part(to, row, part + (turned ? 2 : 0)), turned ? high[0] : low[0], turned ? high[1] : low[1],
                  turned ? high[2] : low[2], turned ? high[3] : low[3]);
              put(line_part(to, row, part + (turned ? 0 : 2)), turned ? low[0] : high[0], turned ? low[1] : high[1],
                  turned ? low[2] : high[2], turned ? low[3] : high[3]);
            } else {
              const words4 four = raw.codes[8 * i + t];
              const u32 words[4] = {four.x, four.y, four.z, four.w};
              const u32 pair = i ? (t < 4 ? raw.scales[0].z : raw.scales[0].w) : (t < 4 ? raw.scales[0].x : raw.scales[0].y);
              const u32 factor = half_mul(permute_bytes(pair, 0, t / 2 % 2 ? 0x3232 : 0x1010), 0x38003800u);  // 1/2
              u32 wide[8];
#pragma unroll
              for (int k = 0; k < 4; k++) {
                if (FP8) {
                  wide[2 * k] = half_mul(fp8_halves((u16)words[k]), factor);
                  wide[2 * k + 1] = half_mul(fp8_halves((u16)(words[k] >> 16)), factor);
                } else {
                  const u32 bytes = words[k] ^ 0x80808080u;
                  wide[2 * k] = half_mul(halves_of<0x4140>(bytes), factor);
                  wide[2 * k + 1] = half_mul(halves_of<0x4342>(bytes), factor);
                }
              }
              put(line_part(to, row, 2 * quad), wide[0], wide[1], wide[2], wide[3]);
              put(line_part(to, row, 2 * quad + 1), wide[4], wide[5], wide[6], wide[7]);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
          *(words4*)line_part(buffer + (TABLES - 1) * TABLE, own + lane / 8 + 4 * i, lane % 8) = raw.rope[i];
      };

      int page = page_of(first), next_page = page_of(first + 1);
      if (BYTES) fetch(first, page);
      for (int piece = first; piece < last; piece++, filled++) {
        u8* const buffer = buffers + (filled & 1) * BUFFER;
        const int later_page = page_of(piece + 2);
        if (filled >= 2) gate_wait(FREE + (filled & 1), THREADS);
        if (BYTES) {
          widen(buffer);
        } else {
          const int place = (piece * LINES + own) % BLOCK;
          for (int i = 0; i < 16 / 4; i++) {
            const int row = lane / 8 + 4 * i;
            const bool there = piece * LINES + own + row < length;
            const u8* from = latent + (i64)page * page_bytes + (place + row) * LATENT_ROW + lane % 8 * 16;
#pragma unroll
            for (int t = 0; t < TABLES - 1; t++)
              copy_async(line_part(buffer + t * TABLE, own + row, lane % 8), from + t * 128, there);
            copy_async(line_part(buffer + (TABLES - 1) * TABLE, own + row, lane % 8),
                       rope + (i64)page * page_bytes + (place + row) * ROPE_ROW + lane % 8 * 16, there);
          }
          copy_commit();
          copy_wait<0>();
        }
        show_to_matrices();
        gate_arrive(FULL + (filled & 1), THREADS);
        if (BYTES && piece + 1 < last) fetch(piece + 1, next_page);  // after the fence, which would wait for it
        page = next_page;
        next_page = later_page;
      }
    }
    for (int i = max_of(filled - 2, 0); i < filled; i++) gate_wait(FREE + (i & 1), THREADS);  // nobody is left waiting for
  } else {
    more_registers<ATTENDING_REGISTERS>();
    const int g = lane / 4, t = lane % 4, thread = threadIdx.x % 128;
    const int row = warp % 4 * 16 + g;  // and eight on
    int used = 0;
    for (Segment at = find_segment(cache_lens, batch, begin); at.piece < end; at = next_segment(cache_lens, batch, at)) {
      const int first = at.piece - at.origin, length = cache_lens[at.request] + 1;
      const int last = min_of(end - at.origin, at.pieces);

      // --- queries: a warp takes eight heads ---
      gate_wait(TOGETHER, ATTENDING);
      for (int i = 0; i < 8; i++) {
        const int line = warp * 8 + i, head = row_tile * LINES + line;
        const bool there = head < heads;
        const u16* from = q_latent + (there ? head : 0) * q_latent_head + at.request * q_latent_row + 16 * lane;
        u32 pairs[8];
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const words2 two = *(const words2*)(from + 4 * k);
          pairs[2 * k] = there ? two.x : 0;
          pairs[2 * k + 1] = there ? two.y : 0;
        }
        float inverse = 1.0f;
        if (MODE) {
          float top = 0.0f;
#pragma unroll
          for (int k = 0; k < 8; k++) top = fmaxf(top, fmaxf(fabsf(bf16_low(pairs[k])), fabsf(bf16_high(pairs[k]))));
          u32 unit = float_bits(warp_max(top)) & 0x7F800000u;
          if (unit == 0 || unit >= 0x7E800000u) unit = 0x3F800000u;
          inverse = bits_float(0x7F000000u - unit);
          if (lane == 0) query_units[line] = bits_float(unit);
#pragma unroll
          for (int k = 0; k < 8; k++) pairs[k] = half_pair(bf16_low(pairs[k]) * inverse, bf16_high(pairs[k]) * inverse);
        } else if (lane == 0) {
          query_units[line] = 1.0f;
        }
        u8* const to = queries + lane / 4 * TABLE;
        put(line_part(to, line, 2 * (lane % 4)), pairs[0], pairs[1], pairs[2], pairs[3]);
        put(line_part(to, line, 2 * (lane % 4) + 1), pairs[4], pairs[5], pairs[6], pairs[7]);
        if (lane < 16) {
          const words2 two = *(const words2*)(q_rope + (there ? head : 0) * q_rope_head + at.request * q_rope_row + 4 * lane);
          u32 own[2] = {there ? two.x : 0, there ? two.y : 0};
          const float factor = BYTES ? 0.5f * inverse : inverse;
#pragma unroll
          for (int k = 0; k < 2; k++) {
            const float low = bf16_low(own[k]) * factor, high = bf16_high(own[k]) * factor;
            own[k] = MODE == 1 ? half_pair(low, high) : bf16_pair(low, high);
          }
          *(words2*)(line_part(queries + (TABLES - 1) * TABLE, line, lane / 2) + lane % 2 * 8) = words2{own[0], own[1]};
        }
      }
      show_to_matrices();
      gate_wait(TOGETHER, ATTENDING);
      const float common = scale * LOG2_E * (BYTES ? 2.0f : 1.0f);
      const float units[2] = {query_units[row] * common, query_units[row + 8] * common};

      float sums[128];
#pragma unroll
      for (int i = 0; i < 128; i++) sums[i] = 0.0f;
      float largest[2] = {-infinity(), -infinity()}, total[2] = {0.0f, 0.0f};

      for (int piece = first; piece < last; piece++, used++) {
        u8* const buffer = buffers + (used & 1) * BUFFER;
        gate_wait(FULL + (used & 1), THREADS);
        float scores[16];
        matrices_fence();
#pragma unroll
        for (int s = 0; s < STEPS; s++)
          multiply_along<MODE != 0>(scores, along(queries + s / 4 * TABLE, s % 4),
                                    along(buffer + s / 4 * TABLE + group * TABLE / 2, s % 4), s > 0);
#pragma unroll
        for (int s = 0; s < ROPE_STEPS; s++)
          multiply_along<MODE == 1>(scores, along(queries + (TABLES - 1) * TABLE, s),
                                    along(buffer + (TABLES - 1) * TABLE + group * TABLE / 2, s), true);
        matrices_commit();
        matrices_wait<0>();

        float top[2] = {-infinity(), -infinity()};
        const bool whole = (piece + 1) * LINES <= length;
#pragma unroll
        for (int i = 0; i < 16; i++) {
          scores[i] *= units[i / 2 % 2];
          if (!whole && piece * LINES + 32 * group + i / 4 * 8 + 2 * t + i % 2 >= length) scores[i] = -infinity();
          top[i / 2 % 2] = fmaxf(top[i / 2 % 2], scores[i]);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
          top[i] = fmaxf(top[i], shuffle_xor(top[i], 1));
          top[i] = fmaxf(top[i], shuffle_xor(top[i], 2));
          if (t == 0) shared_tops[group * LINES + row + 8 * i] = top[i];
        }
        gate_wait(TOGETHER, ATTENDING);
#pragma unroll
        for (int i = 0; i < 2; i++)
          top[i] = fmaxf(top[i], shared_tops[(group ^ 1) * LINES + row + 8 * i]);
#pragma unroll
        for (int i = 0; i < 2; i++)
          if (!(top[i] > largest[i] + SLACK)) top[i] = largest[i];
        const float faded[2] = {exp2_near(largest[0] - top[0]), exp2_near(largest[1] - top[1])};
        const bool changed = warp_ballot(top[0] != largest[0] || top[1] != largest[1]);
        u32 weights[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          if (changed) total[i] *= faded[i];
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const float low = exp2_near(scores[4 * j + 2 * i] - top[i] + WEIGHT_LOG2);
            const float high = exp2_near(scores[4 * j + 2 * i + 1] - top[i] + WEIGHT_LOG2);
            total[i] += low + high;
            weights[j / 2][j % 2 * 2 + i] = MODE ? half_pair(low, high) : bf16_pair(low, high);
          }
          largest[i] = top[i];
        }
#pragma unroll
        for (int k = 0; k < 2; k++)
          shared_weights[(group * 2 + k) * 128 + thread] = words4{weights[k][0], weights[k][1], weights[k][2], weights[k][3]};
        if (changed) {
#pragma unroll
          for (int i = 0; i < 128; i++) sums[i] *= faded[i / 2 % 2];
        }
        gate_wait(TOGETHER, ATTENDING);
        u32 others[2][4];
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const words4 four = shared_weights[((group ^ 1) * 2 + k) * 128 + thread];
          others[k][0] = four.x;
          others[k][1] = four.y;
          others[k][2] = four.z;
          others[k][3] = four.w;
        }
        const u8* const values = buffer + group * (TABLES - 1) / 2 * TABLE;
        matrices_fence();
#pragma unroll
        for (int k = 0; k < 2; k++) {  // own positions, then the other group's
          multiply_across<MODE != 0>(sums, weights[k], across<TABLE>(values, 2 * group + k));
          multiply_across<MODE != 0>(sums, others[k], across<TABLE>(values, 2 * (group ^ 1) + k));
        }
        matrices_commit();
        matrices_wait<0>();
        gate_arrive(FREE + (used & 1), THREADS);
      }

      // --- the request's part ---
      const i64 part = ((i64)(blockIdx.x + at.request) * gridDim.y + row_tile) * LINES + row;
      const float back = BYTES ? 2.0f : 1.0f;
      gate_wait(TOGETHER, ATTENDING);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        total[i] += shuffle_xor(total[i], 1);
        total[i] += shuffle_xor(total[i], 2);
        if (t == 0) shared_tops[group * LINES + row + 8 * i] = total[i];
        float* to = parts + (part + 8 * i) * RANK + group * HELD + 2 * t;
#pragma unroll
        for (int j = 0; j < 32; j++)
          *(words2*)(to + 8 * j) = words2{float_bits(sums[4 * j + 2 * i] * back), float_bits(sums[4 * j + 2 * i + 1] * back)};
      }
      gate_wait(TOGETHER, ATTENDING);
      if (group == 0 && t == 0) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          marks[(part + 8 * i) * 2] = largest[i];
          marks[(part + 8 * i) * 2 + 1] = total[i] + shared_tops[LINES + row + 8 * i];
        }
      }
    }
  }
}
EXPORT(latent_wide)
