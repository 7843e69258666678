// Absorbed latent attention: queries go into latent space, and all heads attend to the latents themselves.
//
// Three passes over the tokens at hand: queries times the heads' up_k; attention, whose weighted sums of latents take
// the queries' place; sums times up_v. In the second, a unit of work is a tile of tokens with all their heads and a run
// of segments. Sixty-four positions at a time are turned into float32 once and serve every row as keys and as values;
// lanes are rows (token, head) for the scores, elements for the sums. Inside a segment the softmax is kept up panel by
// panel; segments stand alone and are merged in ascending order. Panels and segments lie at fixed positions and each
// sum runs in one order, so a row's bits do not depend on its neighbours, on chunking, or on threads.

#include <algorithm>
#include <cmath>
#include <vector>

#include "latent_attention.h"
#include "transpose.h"

namespace dstgi {
namespace {

constexpr int64_t UNIT_ROWS = 128;
constexpr int64_t QUERY_FLOATS = int64_t{1} << 23;    // queries in latent space at once: 32 MiB
constexpr int64_t PARTIAL_FLOATS = int64_t{1} << 23;  // segments' results waiting to be merged
constexpr int64_t FEW_PRODUCTS = int64_t{1} << 17;    // below this, waking threads costs more than it gives
constexpr float LOWEST = -3.0e38f;

// Tokens of one request; `row` counts rows (token, head) from the start of the queries at hand.
struct Unit {
  int64_t request, token, position, tokens, row, segments;
};

// Neighbouring tokens whose queries are made in one product.
struct Run {
  int64_t token, tokens, row;
};

struct Work {
  float *q, *panel, *scores, *sums, *out;                        // q [rank + rope][pad], scores [PANEL][pad], sums, out [pad][rank]
  float *limit, *top, *total, *keep, *out_top, *out_total;       // [pad] each
};

thread_local Scratch own_scratch;

Work lay_out(const Step& s, int64_t pad) {
  const int64_t depth = s.p.rank + s.p.rope_dim;
  const int64_t sizes[] = {depth * pad, PANEL * s.pitch(), PANEL * pad, pad * s.p.rank, pad * s.p.rank, pad, pad, pad, pad, pad, pad};
  int64_t total = 0;
  for (const int64_t size : sizes) total += padded16(size);
  float* at = reinterpret_cast<float*>(own_scratch.get(static_cast<size_t>(total) * sizeof(float)));
  Work w;
  float** const parts[] = {&w.q, &w.panel, &w.scores, &w.sums, &w.out, &w.limit, &w.top, &w.total, &w.keep, &w.out_top, &w.out_total};
  for (int i = 0; i < 11; ++i) {
    *parts[i] = at;
    at += padded16(sizes[i]);
  }
  return w;
}

// Sixteen columns of sixteen rows into their places, [element][row]; absent rows are zero.
DSTGI_INLINE void transpose_rows(const float* const* rows, int64_t count, int64_t at, int n, F32 scale, float* to, int64_t pad) {
  F32 lines[LANES];
  for (int64_t i = 0; i < LANES; ++i) lines[i] = i < count ? mul(load_n(rows[i] + at, n), scale) : zero();
  if (n >= LANES) return transpose16(lines, to, pad);
  float whole[LANES * LANES];
  transpose16(lines, whole, LANES);
  for (int i = 0; i < n; ++i) store(to + i * pad, load(whole + i * LANES));
}

// Rows of the unit, scaled: w.q [latent, rotary part][row].
void load_queries(const Step& s, const Unit& u, const float* queries, int64_t pad, const Work& w) {
  const int64_t heads = s.up.heads, rows = u.tokens * heads;
  const F32 scale = set1(static_cast<float>(s.c.scale));
  for (int64_t r = 0; r < rows; r += LANES) {
    const float *latent[LANES], *rotary[LANES];
    const int64_t count = std::min<int64_t>(LANES, rows - r);
    for (int64_t i = 0; i < count; ++i) {
      latent[i] = queries + (u.row + r + i) * s.p.rank;
      rotary[i] = s.query(u.token + (r + i) / heads, (r + i) % heads);
    }
    for (int64_t d = 0; d < s.p.rank; d += LANES) transpose_rows(latent, count, d, LANES, scale, w.q + d * pad + r, pad);
    for (int64_t d = 0; d < s.p.rope_dim; d += LANES)
      transpose_rows(rotary, count, d, static_cast<int>(s.p.rope_dim - d), scale, w.q + (s.p.rank + d) * pad + r, pad);
  }
  if (s.p.mode == L_INT4) rotate_queries(w.q, s.p.rank, s.p.group, pad, pad);
  for (int64_t r = 0; r < pad; ++r) w.limit[r] = r < rows ? static_cast<float>(u.position + r / heads + 1) : 0.0f;
}

// Scores [n][pad] of a panel become weights; top, total follow, and `keep` is what the sums so far are scaled by.
// `start` is the panel's first position; rows see those below their limit.
void soften_panel(const Work& w, int64_t pad, int64_t start, int64_t n, bool all_seen) {
  for (int64_t r = 0; r < pad; r += LANES) {
    const F32 limit = load(w.limit + r), before = load(w.top + r);
    F32 top = before;
    for (int64_t j = 0; j < n; ++j) {
      float* at = w.scores + j * pad + r;
      F32 score = load(at);
      if (!all_seen) {
        score = if_above(limit, set1(static_cast<float>(start + j)), score, set1(-INFINITY));
        store(at, score);
      }
      top = max(top, score);
    }
    const F32 base = max(set1(LOWEST), top);
    const F32 keep = exp(sub(before, base));
    F32 total = mul(load(w.total + r), keep);
    for (int64_t j = 0; j < n; ++j) {
      float* at = w.scores + j * pad + r;
      const F32 weight = exp(sub(load(at), base));
      store(at, weight);
      total = add(total, weight);
    }
    store(w.top + r, top);
    store(w.total + r, total);
    store(w.keep + r, keep);
  }
}

// One segment for all rows of the unit: sums, top and total of it alone.
void attend_segment(const Step& s, const Unit& u, int64_t segment, int64_t pad, const Work& w) {
  const int64_t rows = u.tokens * s.up.heads, rank = s.p.rank, pitch = s.pitch(), begin = segment * SEGMENT;
  const int64_t last = u.position + u.tokens, end = std::min(begin + SEGMENT, last);
  const int32_t* table = s.table(u.request);
  for (int64_t i = 0; i < rows * rank; i += LANES) store(w.sums + i, zero());
  for (int64_t r = 0; r < pad; r += LANES) {
    store(w.top + r, set1(-INFINITY));
    store(w.total + r, zero());
  }
  for (int64_t at = begin; at < end; at += PANEL) {
    const int64_t n = std::min(PANEL, end - at);
    for (int64_t j = 0; j < n; j += LANES) {
      const int64_t count = std::min<int64_t>(LANES, n - j), next = at + j + PANEL;
      load_positions(s.p, table, at + j, count, w.panel + j * pitch, pitch);
      Ahead ahead;
      if (next < last) ahead = positions_ahead(s.p, table, next, std::min<int64_t>(LANES, last - next));
      product(RowMajor{w.panel + j * pitch, pitch}, count, w.q, pad, pad, rank + s.p.rope_dim, w.scores + j * pad, pad,
              nullptr, ahead);
    }
    soften_panel(w, pad, at, n, at + n <= u.position + 1);
    product(ColumnMajor{w.scores, pad}, rows, w.panel, pitch, rank, n, w.sums, rank, w.keep);
  }
}

// True if row r of the unit sees anything of a segment.
DSTGI_INLINE bool sees(const Step& s, const Unit& u, int64_t row, int64_t segment) {
  return u.position + row / s.up.heads >= segment * SEGMENT;
}

void start_rows(const Step& s, int64_t rows, const Work& w) {
  for (int64_t r = 0; r < rows; ++r) start_row(w.out + r * s.p.rank, w.out_top + r, w.out_total + r, s.p.rank);
}

// What was merged, divided by its total, in place of the unit's queries.
void finish_rows(const Step& s, const Unit& u, const Work& w, float* queries) {
  const int64_t rows = u.tokens * s.up.heads, rank = s.p.rank;
  for (int64_t r = 0; r < rows; ++r) {
    const F32 total = set1(w.out_total[r]);
    for (int64_t d = 0; d < rank; d += LANES) store(w.out + r * rank + d, div(load(w.out + r * rank + d), total));
  }
  if (s.p.mode == L_INT4) unrotate_rows(w.out, rows, rank, s.p.group);
  std::memcpy(queries + u.row * rank, w.out, sizeof(float) * rows * rank);
}

void run_whole(const Step& s, const std::vector<Unit>& units, float* queries, int64_t threads) {
  parallel(threads, static_cast<int64_t>(units.size()), [&](int64_t i) {
    const Unit& u = units[i];
    const int64_t rows = u.tokens * s.up.heads, pad = padded16(rows), rank = s.p.rank;
    const Work w = lay_out(s, pad);
    load_queries(s, u, queries, pad, w);
    start_rows(s, rows, w);
    for (int64_t segment = 0; segment < u.segments; ++segment) {
      attend_segment(s, u, segment, pad, w);
      for (int64_t r = 0; r < rows; ++r)
        if (sees(s, u, r, segment))
          merge(w.out + r * rank, w.out_top + r, w.out_total + r, w.sums + r * rank, w.top[r], w.total[r], rank);
    }
    finish_rows(s, u, w, queries);
  });
}

// Few units, long contexts: every segment is a task of its own. A unit's segments are merged in order once they are
// done; `partial` holds as many at a time as fit, [rows][rank] and top and total of each row.
void run_split(const Step& s, const Unit& u, float* queries, int64_t threads) {
  static thread_local Scratch partials, merged;
  const int64_t rows = u.tokens * s.up.heads, pad = padded16(rows), rank = s.p.rank, stride = rows * (rank + 2);
  const int64_t at_once = std::max<int64_t>(1, std::min(u.segments, PARTIAL_FLOATS / stride));
  float* const partial = reinterpret_cast<float*>(partials.get(static_cast<size_t>(at_once * stride) * sizeof(float)));
  float* const state = reinterpret_cast<float*>(merged.get(static_cast<size_t>(pad * (rank + 2)) * sizeof(float)));
  float *const top = state + pad * rank, *const total = top + pad;
  for (int64_t r = 0; r < rows; ++r) start_row(state + r * rank, top + r, total + r, rank);
  for (int64_t first = 0; first < u.segments; first += at_once) {
    const int64_t count = std::min(at_once, u.segments - first);
    parallel(threads, count, [&](int64_t i) {
      const Work w = lay_out(s, pad);
      load_queries(s, u, queries, pad, w);
      attend_segment(s, u, first + i, pad, w);
      float* to = partial + i * stride;
      std::memcpy(to, w.sums, sizeof(float) * rows * rank);
      std::memcpy(to + rows * rank, w.top, sizeof(float) * rows);
      std::memcpy(to + rows * rank + rows, w.total, sizeof(float) * rows);
    });
    parallel(threads, rows, [&](int64_t r) {
      for (int64_t i = 0; i < count; ++i) {
        const float* from = partial + i * stride;
        if (sees(s, u, r, first + i))
          merge(state + r * rank, top + r, total + r, from + r * rank, from[rows * rank + r],
                from[rows * rank + rows + r], rank);
      }
    });
  }
  Work w;
  w.out = state;
  w.out_total = total;
  finish_rows(s, u, w, queries);
}

template <class B>
void make_queries(const Step& s, const std::vector<Run>& runs, float* queries, int64_t threads) {
  const int64_t tiles = (s.up.rank + UP_TILE - 1) / UP_TILE, stride = s.up.heads * s.up.rank;
  parallel(threads, s.up.heads * tiles, [&](int64_t i) {
    const int64_t head = i / tiles, tile = i % tiles, width = tile_width(s.up.rank, tile);
    const B* keys = static_cast<const B*>(s.up.keys) + key_tile(s.up, head, tile);
    for (const Run& run : runs)
      product(RowMajor{s.query(run.token, head) + s.p.rope_dim, s.c.q_row}, run.tokens, keys, width, width, s.up.nope,
              queries + (run.row + head) * s.up.rank + tile * UP_TILE, stride);
  });
}

template <class B>
void make_outputs(const Step& s, const std::vector<Run>& runs, const float* sums, int64_t threads) {
  const int64_t tiles = (s.up.v_pad + UP_TILE - 1) / UP_TILE, stride = s.up.heads * s.up.rank;
  constexpr int64_t AT_ONCE = 48;
  parallel(threads, s.up.heads * tiles, [&](int64_t i) {
    const int64_t head = i / tiles, tile = i % tiles, width = tile_width(s.up.v_pad, tile);
    const B* values = static_cast<const B*>(s.up.values) + value_tile(s.up, head, tile);
    alignas(64) float part[AT_ONCE * UP_TILE];
    for (const Run& run : runs)
      for (int64_t t = 0; t < run.tokens; t += AT_ONCE) {
        const int64_t count = std::min(AT_ONCE, run.tokens - t);
        const float* from = sums + (run.row + t * s.up.heads + head) * s.up.rank;
        product(RowMajor{from, stride}, count, values, width, width, s.up.rank, part, UP_TILE);
        for (int64_t j = 0; j < count; ++j) {
          float* to = s.output(run.token + t + j, head) + tile * UP_TILE;
          for (int64_t d = 0; d < width; d += LANES)
            store_n(to + d, load(part + j * UP_TILE + d), static_cast<int>(s.up.v_dim - tile * UP_TILE - d));
        }
      }
  });
}

// Tokens [from, to) of a request in units, the last first: it sees the most.
void add_units(const Step& s, int64_t request, int64_t from, int64_t to, int64_t row, std::vector<Unit>& units) {
  const int64_t heads = s.up.heads, tile = heads >= UNIT_ROWS ? 1 : UNIT_ROWS / heads;
  for (int64_t t = from + (to - from - 1) / tile * tile; t >= from; t -= tile) {
    const int64_t tokens = std::min(tile, to - t), position = s.c.cache_lens[request] + t;
    units.push_back({request, s.first(request) + t, position, tokens, row + (t - from) * heads,
                     (position + tokens + SEGMENT - 1) / SEGMENT});
  }
}

void run_wave(const Step& s, const std::vector<Run>& runs, const std::vector<Unit>& units, float* queries) {
  int64_t longest = 0, segments = 0, rows = 0;
  for (const Unit& u : units) {
    longest = std::max(longest, u.segments);
    segments += u.segments;
    rows += u.tokens * s.up.heads * u.segments;
  }
  const int64_t count = static_cast<int64_t>(units.size());
  const int64_t products = rows * (SEGMENT * (2 * s.p.rank + s.p.rope_dim) / 2 + s.p.rank * (s.up.nope + s.up.v_dim) / 8);
  const int64_t threads = products < FEW_PRODUCTS ? 1 : s.c.num_threads;
  if (s.up.kind == 0)
    make_queries<float>(s, runs, queries, threads);
  else
    make_queries<uint16_t>(s, runs, queries, threads);
  if (threads > 1 && segments > count && (count < 2 * threads || longest * threads > segments))
    for (const Unit& u : units) run_split(s, u, queries, threads);
  else
    run_whole(s, units, queries, threads);
  if (s.up.kind == 0)
    make_outputs<float>(s, runs, queries, threads);
  else
    make_outputs<uint16_t>(s, runs, queries, threads);
}

}  // namespace

// Every request that is not expanded, as many tokens at a time as there is room for their queries.
void run_absorbed(const Step& s) {
  static thread_local Scratch scratch;
  static thread_local std::vector<Run> runs;
  static thread_local std::vector<Unit> units;
  const int64_t heads = s.up.heads, room = std::max<int64_t>(1, QUERY_FLOATS / (heads * s.up.rank));
  int64_t held = 0;
  const auto flush = [&] {
    if (held > 0) {
      const size_t bytes = static_cast<size_t>(held * heads * s.up.rank) * sizeof(float);
      run_wave(s, runs, units, reinterpret_cast<float*>(scratch.get(bytes)));
    }
    runs.clear();
    units.clear();
    held = 0;
  };
  flush();
  for (int64_t b = 0; b < s.c.requests; ++b) {
    if (s.expanded(b)) continue;
    for (int64_t t = 0; t < s.tokens(b);) {
      const int64_t count = std::min(room - held, s.tokens(b) - t), token = s.first(b) + t;
      if (!runs.empty() && runs.back().token + runs.back().tokens == token)
        runs.back().tokens += count;
      else
        runs.push_back({token, count, held * heads});
      add_units(s, b, t, t + count, held * heads, units);
      held += count;
      t += count;
      if (held == room) flush();
    }
  }
  flush();
}

}  // namespace dstgi
