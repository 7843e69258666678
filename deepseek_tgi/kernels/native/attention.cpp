// Causal grouped-query attention over pages, prefill and decode alike, in float32.
//
// The context is cut at fixed positions into segments of 256. A segment's softmax and weighted sum stand alone; segments
// are merged in ascending order. Every score is one running sum over d, every output one running sum over positions, so
// that a query's bits do not depend on its neighbours, on chunking, or on whether threads share its context.
//
// One unit of work is a KV head, a tile of query tokens (all their heads that read it) and a run of segments. Sixty-four
// keys at a time are transposed into an L1 panel, so that lanes are positions for the scores and elements for the sums.

#include "api.h"
#include "attention_tiles.h"
#include "pool.h"
#include "scratch.h"
#include "transpose.h"

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
  int64_t ratio, k_pad, v_pad;  // query heads a KV head; head sizes rounded up to 16
};

struct Unit {
  int64_t request, head, first_token, tokens, first_segment, segments;
};

// A unit's working memory; rows are (token, query head).
struct Work : Rows {
  float *keys, *values;
};

// `n` < 16 elements of a row's end, without reading past them.
template <int ITEM>
DSTGI_INLINE const char* padded_copy(const char* at, int n, char* room) {
  std::memset(room, 0, LANES * ITEM);
  std::memcpy(room, at, n * ITEM);
  return room;
}

// Sixteen elements at `at` (`n` of them real, the others 0) as float32; `scale` and `zero_point` serve int8.
template <int MODE>
DSTGI_INLINE F32 load_item(const char* at, int n, F32 scale, F32 zero_point) {
  constexpr int ITEM = MODE == 0 ? 4 : MODE == 3 ? 1 : 2;
  if (MODE == 0) {
    const float* x = reinterpret_cast<const float*>(at);
    return n < LANES ? load_n(x, n) : load(x);
  }
  char room[LANES * ITEM];
  if (n < LANES) at = padded_copy<ITEM>(at, n, room);
  if (MODE == 1) return load_bf16(reinterpret_cast<const uint16_t*>(at));
  if (MODE == 2) return load_half(reinterpret_cast<const uint16_t*>(at));
  const F32 x = fma(to_float(load_u8(reinterpret_cast<const uint8_t*>(at))), scale, zero_point);
  return n < LANES ? keep_below(x, n, zero()) : x;
}

// Sixteen neighbouring positions of one head: they lie in one page, since a block holds a multiple of sixteen.
struct Group {
  const char* rows;
  float scales[2 * LANES];  // scale, zero of each position
};

template <int MODE>
DSTGI_INLINE void find_group(const Call& c, const Unit& u, int64_t at, bool is_key, Group* g) {
  const Pages& p = *c.p;
  const int64_t page = c.block_tables[u.request * c.table_stride + at / p.block_size];
  const int64_t row = u.head * p.block_size + at % p.block_size, width = is_key ? p.k_dim : p.v_dim;
  constexpr int64_t ITEM = MODE == 0 ? 4 : MODE == 3 ? 1 : 2;
  g->rows = (is_key ? p.k : p.v) + page * p.page_stride + row * width * ITEM;
  if (MODE != 3) return;
  const uint16_t* pairs = reinterpret_cast<const uint16_t*>((is_key ? p.k_scale : p.v_scale) + page * p.page_stride);
  store(g->scales, load_half(pairs + row * 2));
  store(g->scales + LANES, load_half(pairs + row * 2 + LANES));
}

// Keys of positions [from, from + n) as [k_pad][PANEL]; what is beyond n is not looked at.
template <int MODE>
void load_keys(const Call& c, const Unit& u, int64_t from, int64_t n, float* panel) {
  constexpr int64_t ITEM = MODE == 0 ? 4 : MODE == 3 ? 1 : 2;
  const int64_t width = c.p->k_dim;
  for (int64_t block = 0; block < n; block += LANES) {
    const int64_t rows = n - block < LANES ? n - block : LANES;
    Group g;
    find_group<MODE>(c, u, from + block, true, &g);
    for (int64_t d = 0; d < width; d += LANES) {
      F32 lines[LANES];
      for (int64_t j = 0; j < LANES; ++j)
        lines[j] = j < rows ? load_item<MODE>(g.rows + (j * width + d) * ITEM, static_cast<int>(width - d),
                                              set1(g.scales[2 * j]), set1(g.scales[2 * j + 1]))
                            : zero();
      transpose16(lines, panel + d * PANEL + block, PANEL);
    }
  }
}

// Values of positions [from, from + n) as rows v_pad apart; `groups` says where each sixteen begin: in the page itself if
// nothing has to be converted, else in the panel.
template <int MODE>
void load_values(const Call& c, const Unit& u, int64_t from, int64_t n, float* panel, const float** groups) {
  constexpr int64_t ITEM = MODE == 0 ? 4 : MODE == 3 ? 1 : 2;
  const int64_t width = c.p->v_dim;
  for (int64_t block = 0; block < n; block += LANES) {
    const int64_t rows = n - block < LANES ? n - block : LANES;
    Group g;
    find_group<MODE>(c, u, from + block, false, &g);
    groups[block / LANES] = panel + block * c.v_pad;
    if (MODE == 0 && width == c.v_pad) {
      groups[block / LANES] = reinterpret_cast<const float*>(g.rows);
      continue;
    }
    for (int64_t j = 0; j < rows; ++j)
      for (int64_t d = 0; d < width; d += LANES)
        store(panel + (block + j) * c.v_pad + d,
              load_item<MODE>(g.rows + (j * width + d) * ITEM, static_cast<int>(width - d), set1(g.scales[2 * j]),
                              set1(g.scales[2 * j + 1])));
  }
}

#define DSTGI_BY_MODE(FUNCTION, ...)                \
  switch (c.p->mode) {                              \
    case 0:                                         \
      FUNCTION<0>(__VA_ARGS__);                     \
      break;                                        \
    case 1:                                         \
      FUNCTION<1>(__VA_ARGS__);                     \
      break;                                        \
    case 2:                                         \
      FUNCTION<2>(__VA_ARGS__);                     \
      break;                                        \
    default:                                        \
      FUNCTION<3>(__VA_ARGS__);                     \
  }

// One segment for all rows of the unit, merged into w.out.
void attend_segment(const Call& c, const Unit& u, int64_t segment, const Work& w) {
  const int64_t start = segment * SEGMENT, first_limit = c.cache_lens[u.request] + u.first_token + 1 - start;
  attend_rows({u.tokens * c.ratio, c.ratio, first_limit, c.p->k_dim, c.k_pad, c.v_pad}, w,
              [&](int64_t at, int64_t n) -> const float* {
                DSTGI_BY_MODE(load_keys, c, u, start + at, n, w.keys)
                return w.keys;
              },
              [&](int64_t at, int64_t n, const float** groups) {
                DSTGI_BY_MODE(load_values, c, u, start + at, n, w.values, groups)
              });
}

size_t work_floats(const Call& c, int64_t rows) {
  return static_cast<size_t>(rows * c.k_pad + c.k_pad * PANEL + PANEL * c.v_pad + rows * SEGMENT +
                             2 * rows * c.v_pad + 4 * rows + 64);
}

Work lay_out(const Call& c, int64_t rows, float* p) {
  Work w;
  w.keys = p;
  w.values = w.keys + c.k_pad * PANEL;
  w.scores = w.values + PANEL * c.v_pad;
  w.q = w.scores + rows * SEGMENT;
  w.sums = w.q + rows * c.k_pad;
  w.out = w.sums + rows * c.v_pad;
  w.max = w.out + rows * c.v_pad;
  w.total = w.max + 2 * rows;
  return w;
}

thread_local Scratch own_scratch, shared_scratch;

// Runs the unit's segments; leaves the merged rows in the returned work memory.
Work attend(const Call& c, const Unit& u) {
  const int64_t rows = u.tokens * c.ratio;
  const Work w = lay_out(c, rows, reinterpret_cast<float*>(own_scratch.get(work_floats(c, rows) * sizeof(float))));
  const int64_t token = c.cu_seqlens[u.request] + u.first_token;
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = c.q + (token + r / c.ratio) * c.q_row + (u.head * c.ratio + r % c.ratio) * c.p->k_dim;
    for (int64_t d = 0; d < c.p->k_dim; d += LANES)
      store(w.q + r * c.k_pad + d, mul(load_n(from + d, static_cast<int>(c.p->k_dim - d)), set1(c.scale)));
    start_row(w.out + r * c.v_pad, w.max + r, w.total + r, c.v_pad);
  }
  for (int64_t s = u.first_segment; s < u.first_segment + u.segments; ++s) attend_segment(c, u, s, w);
  return w;
}

void write_rows(const Call& c, const Unit& u, const float* out, const float* total) {
  const int64_t rows = u.tokens * c.ratio, token = c.cu_seqlens[u.request] + u.first_token, v_dim = c.p->v_dim;
  for (int64_t r = 0; r < rows; ++r) {
    float* to = c.out + ((token + r / c.ratio) * c.heads + u.head * c.ratio + r % c.ratio) * v_dim;
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
  const int64_t threads = positions * (c.k_pad + c.v_pad) < 65536 ? 1 : num_threads;
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
DSTGI_API void dstgi_paged_attention(const Pages* pages, const float* q, float* out, const int32_t* cu_seqlens,
                                     const int32_t* block_tables, const int32_t* cache_lens, int64_t requests,
                                     int64_t table_stride, int64_t heads, int64_t q_row, float scale,
                                     int64_t num_threads) {
  using namespace dstgi;
  const auto pad = [](int64_t n) { return (n + LANES - 1) / LANES * LANES; };
  const Call c{pages,    q,            out,   cu_seqlens, block_tables,          cache_lens,        requests,
               table_stride, heads, q_row, scale,      heads / pages->heads, pad(pages->k_dim), pad(pages->v_dim)};
  run(c, num_threads);
}
