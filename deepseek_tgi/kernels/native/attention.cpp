// Causal grouped-query attention over pages, prefill and decode alike, in float32.
//
// The context is cut at fixed positions into segments of 256. A segment's softmax and weighted sum stand alone; segments
// are merged in ascending order. Every score is one running sum over d, every output one running sum over positions, so
// that a query's bits do not depend on its neighbours, on chunking, or on whether threads share its context.
//
// One unit of work is a KV head, a tile of query tokens (all their heads that read it) and a run of segments. Sixty-four
// keys at a time are transposed into an L1 panel, so that lanes are positions for the scores and elements for the sums.

#include "api.h"
#include "page_panels.h"
#include "pool.h"
#include "scratch.h"

namespace dstgi {
namespace {

constexpr int64_t TILE_ROWS = 96;  // query rows (token, head) of a unit, about
constexpr size_t MAX_PARTIAL_BYTES = size_t{64} << 20;

struct Call {
  const Pages* p;
  const float* q;
  float* out;
  const int32_t *cu_seqlens, *block_tables, *cache_lens;
  int64_t requests, table_stride, heads, q_row;
  float scale;
  int64_t ratio, v_pad;  // query heads a KV head; size of a value rounded up to 16
  int64_t q_pad;         // floats of a query row: its size and what meets the keys' centre, rounded up to 16
  const Frame* frame;
  const float* turns;  // see HeadPages; null if keys have no centre
  int64_t rotary;
};

struct Unit {
  int64_t request, head, first_token, tokens, first_segment, segments;
};

// A unit's working memory; rows are (token, query head).
struct Work : Rows {
  float *keys, *values;
};

#define DSTGI_BY_MODE(FUNCTION, ...)          \
  switch (c.p->mode) {                        \
    case H_FLOAT32:                           \
      FUNCTION<H_FLOAT32>(__VA_ARGS__);       \
      break;                                  \
    case H_BFLOAT16:                          \
      FUNCTION<H_BFLOAT16>(__VA_ARGS__);      \
      break;                                  \
    case H_FLOAT16:                           \
      FUNCTION<H_FLOAT16>(__VA_ARGS__);       \
      break;                                  \
    case H_INT8:                              \
      FUNCTION<H_INT8>(__VA_ARGS__);          \
      break;                                  \
    case H_FP8:                               \
      FUNCTION<H_FP8>(__VA_ARGS__);           \
      break;                                  \
    default:                                  \
      FUNCTION<H_INT4>(__VA_ARGS__);          \
  }

HeadPages head_pages(const Call& c, const Unit& u) {
  HeadPages h{c.p, c.block_tables + u.request * c.table_stride, u.head, nullptr, c.rotary, nullptr, 0};
  if (c.turns == nullptr) return h;
  const int32_t* pairs = c.frame->pairs + u.head * c.frame->pair_stride;
  h.turns = c.turns;
  h.num_pairs = pairs[0];
  h.pairs = pairs + 1;
  return h;
}

// One segment for all rows of the unit, merged into w.out.
void attend_segment(const Call& c, const Unit& u, int64_t segment, const Work& w) {
  const int64_t start = segment * SEGMENT, first_limit = c.cache_lens[u.request] + u.first_token + 1 - start;
  const HeadPages h = head_pages(c, u);
  CentrePanel centre;
  attend_rows({u.tokens * c.ratio, c.ratio, first_limit, c.p->k_dim, c.q_pad, c.v_pad}, w,
              [&](int64_t at, int64_t n) {
                KeyPanel panel;
                DSTGI_BY_MODE(load_keys, h, start + at, n, w.keys, centre, panel)
                return panel;
              },
              [&](int64_t at, int64_t n, const float** groups) {
                DSTGI_BY_MODE(load_values, h, c.v_pad, start + at, n, w.values, groups)
              });
}

size_t work_floats(const Call& c, int64_t rows) {
  return static_cast<size_t>(rows * c.q_pad + c.q_pad * PANEL + PANEL * c.v_pad + rows * SEGMENT +
                             2 * rows * c.v_pad + 4 * rows + 64);
}

Work lay_out(const Call& c, int64_t rows, float* p) {
  Work w;
  w.keys = p;
  w.values = w.keys + c.q_pad * PANEL;
  w.scores = w.values + PANEL * c.v_pad;
  w.q = w.scores + rows * SEGMENT;
  w.sums = w.q + rows * c.q_pad;
  w.out = w.sums + rows * c.v_pad;
  w.max = w.out + rows * c.v_pad;
  w.total = w.max + 2 * rows;
  return w;
}

thread_local Scratch own_scratch, shared_scratch;

// One query row [q_pad], scaled, behind what meets the centre: q R_p c is the sum over pairs (i, i + h) of
// cos_i(p) (q_i c_i + q_i+h c_i+h) + sin_i(p) (q_i+h c_i - q_i c_i+h), and the elements that do not rotate.
void load_query(const Call& c, const HeadPages& h, const float* from, float* q) {
  const int64_t width = c.p->k_dim, half = c.rotary / 2;
  if (h.turns != nullptr) {
    const float* centre = c.frame->centre + h.head * width;
    for (int64_t i = 0; i < h.num_pairs; ++i) {
      const int64_t a = h.pairs[i], b = a + half;
      *q++ = (from[a] * centre[a] + from[b] * centre[b]) * c.scale;
      *q++ = (from[b] * centre[a] - from[a] * centre[b]) * c.scale;
    }
    float rest = 0.0f;
    for (int64_t d = c.rotary; d < width; ++d) rest += from[d] * centre[d];
    if (c.rotary < width) *q++ = rest * c.scale;
  }
  for (int64_t d = 0; d < width; d += LANES)
    store(q + d, mul(load_n(from + d, static_cast<int>(width - d)), set1(c.scale)));
  if (c.p->mode == H_INT4) unrotate_vector(q, width);
}

// Runs the unit's segments; leaves the merged rows in the returned work memory.
Work attend(const Call& c, const Unit& u) {
  const int64_t rows = u.tokens * c.ratio;
  const Work w = lay_out(c, rows, reinterpret_cast<float*>(own_scratch.get(work_floats(c, rows) * sizeof(float))));
  const int64_t token = c.cu_seqlens[u.request] + u.first_token;
  const HeadPages h = head_pages(c, u);
  for (int64_t r = 0; r < rows; ++r) {
    load_query(c, h, c.q + (token + r / c.ratio) * c.q_row + (u.head * c.ratio + r % c.ratio) * c.p->k_dim,
               w.q + r * c.q_pad);
    start_row(w.out + r * c.v_pad, w.max + r, w.total + r, c.v_pad);
  }
  for (int64_t s = u.first_segment; s < u.first_segment + u.segments; ++s) attend_segment(c, u, s, w);
  return w;
}

void write_rows(const Call& c, const Unit& u, float* out, const float* total) {
  const int64_t rows = u.tokens * c.ratio, token = c.cu_seqlens[u.request] + u.first_token, v_dim = c.p->v_dim;
  for (int64_t r = 0; r < rows; ++r) {
    float* to = c.out + ((token + r / c.ratio) * c.heads + u.head * c.ratio + r % c.ratio) * v_dim;
    if (c.p->mode == H_INT4) unrotate_vector(out + r * c.v_pad, v_dim);
    const F32 whole = set1(total[r]);
    for (int64_t d = 0; d < v_dim; d += LANES)
      store_n(to + d, div(load(out + r * c.v_pad + d), whole), static_cast<int>(v_dim - d));
  }
}

int64_t tile_tokens(const Call& c) { return c.ratio >= TILE_ROWS ? 1 : TILE_ROWS / c.ratio; }

// Units with all their segments, longest first within a request; returns how many (`units` may be null to count).
int64_t list_units(const Call& c, Unit* units) {
  int64_t count = 0;
  for (int64_t b = 0; b < c.requests; ++b) {
    const int64_t tokens = c.cu_seqlens[b + 1] - c.cu_seqlens[b], tile = tile_tokens(c);
    for (int64_t t = (tokens + tile - 1) / tile - 1; t >= 0; --t)
      for (int64_t head = 0; head < c.p->heads; ++head, ++count) {
        if (units == nullptr) continue;
        const int64_t first = t * tile, n = tokens - first < tile ? tokens - first : tile;
        units[count] = {b, head, first, n, 0, (c.cache_lens[b] + first + n + SEGMENT - 1) / SEGMENT};
      }
  }
  return count;
}

// Few units, long contexts: every segment is a unit of its own, merged in order afterwards. `offsets` [count + 1] says
// where a unit's segments begin.
void run_split(const Call& c, const Unit* units, int64_t count, const int64_t* offsets, int64_t stride, float* partial,
               int64_t threads) {
  parallel(threads, offsets[count], [&](int64_t i) {
    int64_t n = 0;
    while (offsets[n + 1] <= i) ++n;
    Unit u = units[n];
    u.first_segment = i - offsets[n];
    u.segments = 1;
    const Work w = attend(c, u);
    const int64_t rows = u.tokens * c.ratio;
    float* to = partial + i * stride;
    std::memcpy(to, w.out, sizeof(float) * rows * c.v_pad);
    std::memcpy(to + rows * c.v_pad, w.max, sizeof(float) * rows);
    std::memcpy(to + rows * c.v_pad + rows, w.total, sizeof(float) * rows);
  });
  parallel(threads, count, [&](int64_t n) {
    const int64_t rows = units[n].tokens * c.ratio;
    const Work w = lay_out(c, rows, reinterpret_cast<float*>(own_scratch.get(work_floats(c, rows) * sizeof(float))));
    for (int64_t r = 0; r < rows; ++r) start_row(w.out + r * c.v_pad, w.max + r, w.total + r, c.v_pad);
    for (int64_t i = offsets[n]; i < offsets[n + 1]; ++i) {
      const float* from = partial + i * stride;
      for (int64_t r = 0; r < rows; ++r) {
        const float part_total = from[rows * c.v_pad + rows + r];
        if (part_total == 0.0f) continue;  // the row sees nothing of this segment
        merge(w.out + r * c.v_pad, w.max + r, w.total + r, from + r * c.v_pad, from[rows * c.v_pad + r], part_total,
              c.v_pad);
      }
    }
    write_rows(c, units[n], w.out, w.total);
  });
}

void run_whole(const Call& c, const Unit* units, int64_t count, int64_t threads) {
  parallel(threads, count, [&](int64_t i) {
    const Work w = attend(c, units[i]);
    write_rows(c, units[i], w.out, w.total);
  });
}

void run(const Call& c, int64_t num_threads) {
  const int64_t count = list_units(c, nullptr);
  if (count == 0) return;
  char* memory = shared_scratch.get(align64(count * sizeof(Unit)) + align64((count + 1) * sizeof(int64_t)));
  Unit* units = reinterpret_cast<Unit*>(memory);
  int64_t* offsets = reinterpret_cast<int64_t*>(memory + align64(count * sizeof(Unit)));
  list_units(c, units);
  offsets[0] = 0;
  int64_t most_rows = 0, positions = 0;
  for (int64_t i = 0; i < count; ++i) {
    offsets[i + 1] = offsets[i] + units[i].segments;
    const int64_t rows = units[i].tokens * c.ratio;
    most_rows = rows > most_rows ? rows : most_rows;
    positions += rows * units[i].segments * SEGMENT;
  }
  const int64_t threads = positions * (c.q_pad + c.v_pad) < 65536 ? 1 : num_threads;
  const int64_t stride = most_rows * (c.v_pad + 2);
  const size_t partial_bytes = static_cast<size_t>(offsets[count] * stride) * sizeof(float);
  if (threads > 1 && count < 4 * threads && offsets[count] > count && partial_bytes <= MAX_PARTIAL_BYTES) {
    static thread_local Scratch partials;
    return run_split(c, units, count, offsets, stride, reinterpret_cast<float*>(partials.get(partial_bytes)), threads);
  }
  run_whole(c, units, count, threads);
}

}  // namespace
}  // namespace dstgi

// q rows [heads][k_dim] lie `q_row` floats apart; out [t][heads][v_dim] dense. `block_tables` rows `table_stride` apart.
// `frame` may be null; `turns` [positions / 64][rotary][64] is given if it has a centre.
DSTGI_API void dstgi_paged_attention(const Pages* pages, const float* q, float* out, const int32_t* cu_seqlens,
                                     const int32_t* block_tables, const int32_t* cache_lens, int64_t requests,
                                     int64_t table_stride, int64_t heads, int64_t q_row, float scale,
                                     int64_t num_threads, const Frame* frame, const float* turns, int64_t rotary) {
  using namespace dstgi;
  const auto pad = [](int64_t n) { return (n + LANES - 1) / LANES * LANES; };
  const bool centred = pages->mode >= H_INT8 && frame != nullptr && frame->centre != nullptr;
  const int64_t k_dim = pages->k_dim, extra = centred ? rotary + (rotary < k_dim ? 1 : 0) : 0;
  Call c;
  c.p = pages;
  c.q = q;
  c.out = out;
  c.cu_seqlens = cu_seqlens;
  c.block_tables = block_tables;
  c.cache_lens = cache_lens;
  c.requests = requests;
  c.table_stride = table_stride;
  c.heads = heads;
  c.q_row = q_row;
  c.scale = scale;
  c.ratio = heads / pages->heads;
  c.v_pad = pad(pages->v_dim);
  c.q_pad = pad(pad(k_dim) + extra);
  c.frame = frame;
  c.turns = centred ? turns : nullptr;
  c.rotary = rotary;
  run(c, num_threads);
}
