// Expanded latent attention of one request: keys and values of a window of the context are made first, for as many heads
// as there is room, then all query tokens attend to them; the next window follows.
//
// A head's keys come out transposed, [rotary part, rest][64] for each panel of positions, as the register tiles take
// them. A tile of query tokens keeps its sums, maxima and totals from window to window. Every product and every sum runs
// in one order, whatever the room.

#include <algorithm>

#include "latent_attention.h"
#include "transpose.h"

namespace dstgi {
namespace {

constexpr int64_t ROOM_FLOATS = int64_t{1} << 24;  // keys, values and sums at once: 64 MiB
constexpr int64_t TOKENS = 96;                     // query tokens of a unit
constexpr int64_t HEADS_AT_ONCE = 4;               // heads that share a turned panel of latents
constexpr int64_t PANELS = SEGMENT / PANEL;

struct Plan {
  const Step& s;
  int64_t request, tokens, context, heads, segments;  // heads and segments: of a window
  float *made, *state;

  int64_t panel_floats() const { return s.q_dim() * PANEL; }
  int64_t segment_floats() const { return PANELS * panel_floats() + SEGMENT * s.up.v_pad; }
  int64_t row_floats() const { return s.up.v_pad + 4; }
  int64_t tiles() const { return (tokens + TOKENS - 1) / TOKENS; }

  // Of a head and a segment, both counted from the window's first.
  float* keys(int64_t head, int64_t segment) const { return made + (head * segments + segment) * segment_floats(); }
  float* values(int64_t head, int64_t segment) const { return keys(head, segment) + PANELS * panel_floats(); }
  float* rows(int64_t head, int64_t token) const { return state + (head * tokens + token) * row_floats(); }
};

thread_local Scratch own_scratch;

// Latents and rotary keys of a panel with lanes as positions: `turned` [rank + padded rope][PANEL], absent ones 0.
void load_turned(const Step& s, const int32_t* table, int64_t from, int64_t n, float* panel, float* turned) {
  const int64_t pitch = s.pitch(), width = s.p.rank + padded16(s.p.rope_dim);
  for (int64_t j = 0; j < n; j += LANES)
    load_positions(s.p, table, from + j, std::min<int64_t>(LANES, n - j), panel + j * pitch, pitch);
  for (int64_t j = 0; j < PANEL; j += LANES)
    for (int64_t d = 0; d < width; d += LANES) {
      F32 lines[LANES];
      for (int64_t i = 0; i < LANES; ++i) lines[i] = j + i < n ? load(panel + (j + i) * pitch + d) : zero();
      transpose16(lines, turned + d * PANEL + j, PANEL);
    }
  if (s.p.mode == L_INT4) unrotate_columns(turned, s.p.rank, s.p.group, PANEL, PANEL);
}

DSTGI_INLINE const float* as_floats(const float* x, int64_t, float*) { return x; }
DSTGI_INLINE const float* as_floats(const uint16_t* x, int64_t n, float* room) {
  for (int64_t i = 0; i < n; i += LANES) store(room + i, load_bf16(x + i));
  return room;
}

// Keys and values of one head at the first n positions of a panel. `room` holds a tile of the up-projection.
template <class B>
void make_panel(const Step& s, int64_t head, int64_t n, const float* turned, float* keys, float* values, float* room) {
  const UpWeight& up = s.up;
  std::memcpy(keys, turned + up.rank * PANEL, sizeof(float) * s.p.rope_dim * PANEL);
  float* rest = keys + s.p.rope_dim * PANEL;
  std::fill(rest, rest + up.nope * PANEL, 0.0f);
  std::fill(room, room + up.nope, 1.0f);  // what is there is kept as it is
  for (int64_t tile = 0; tile * UP_TILE < up.rank; ++tile) {
    const int64_t width = tile_width(up.rank, tile);
    const B* from = static_cast<const B*>(up.keys) + key_tile(up, head, tile);
    const float* weight = as_floats(from, up.nope * width, room + padded16(up.nope));
    product(RowMajor{weight, width}, up.nope, turned + tile * UP_TILE * PANEL, PANEL, padded16(n), width,
            rest, PANEL, room);
  }
  for (int64_t tile = 0; tile * UP_TILE < up.v_pad; ++tile) {
    const int64_t width = tile_width(up.v_pad, tile);
    const B* weight = static_cast<const B*>(up.values) + value_tile(up, head, tile);
    product(ColumnMajor{turned, PANEL}, n, weight, width, width, up.rank, values + tile * UP_TILE, up.v_pad);
  }
}

// Keys and values of segments [first, first + count) of heads [from, from + heads).
template <class B>
void make_window(const Plan& plan, int64_t from, int64_t heads, int64_t first, int64_t count) {
  const Step& s = plan.s;
  const int64_t groups = (heads + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE, width = s.p.rank + padded16(s.p.rope_dim);
  const int64_t panel_floats = PANEL * s.pitch(), turned_floats = width * PANEL;
  const int64_t room_floats = padded16(s.up.nope) * (UP_TILE + 1);
  parallel(s.c.num_threads, groups * count * PANELS, [&](int64_t i) {
    const int64_t at = i % (count * PANELS), begin = first * SEGMENT + at * PANEL, group = i / (count * PANELS);
    const int64_t n = std::min(PANEL, plan.context - begin);
    if (n <= 0) return;
    const size_t bytes = static_cast<size_t>(panel_floats + turned_floats + room_floats) * sizeof(float);
    float* const panel = reinterpret_cast<float*>(own_scratch.get(bytes));
    float *const turned = panel + panel_floats, *const room = turned + turned_floats;
    load_turned(s, s.table(plan.request), begin, n, panel, turned);
    const int64_t segment = at / PANELS, part = at % PANELS;
    for (int64_t h = group * HEADS_AT_ONCE; h < std::min(heads, (group + 1) * HEADS_AT_ONCE); ++h)
      make_panel<B>(s, from + h, n, turned, plan.keys(h, segment) + part * plan.panel_floats(),
                    plan.values(h, segment) + part * PANEL * s.up.v_pad, room);
  });
}

// Head `head` (counted from `from`) and the tokens of a tile over the window's segments that are at hand.
void attend_window(const Plan& plan, int64_t from, int64_t head, int64_t tile, int64_t first, int64_t count) {
  const Step& s = plan.s;
  const int64_t token = tile * TOKENS, rows = std::min(TOKENS, plan.tokens - token), v_pad = s.up.v_pad;
  const int64_t position = s.c.cache_lens[plan.request] + token, q_stride = padded16(s.q_dim());
  const size_t floats = static_cast<size_t>(rows * (q_stride + SEGMENT + v_pad));
  Rows w;
  w.q = reinterpret_cast<float*>(own_scratch.get(floats * sizeof(float)));
  w.scores = w.q + rows * q_stride;
  w.sums = w.scores + rows * SEGMENT;
  w.out = plan.rows(head, token);
  w.max = w.out + rows * v_pad;
  w.total = w.max + 2 * rows;
  for (int64_t r = 0; r < rows; ++r) {
    const float* q = s.query(s.first(plan.request) + token + r, from + head);
    for (int64_t d = 0; d < s.q_dim(); d += LANES)
      store(w.q + r * q_stride + d,
            mul(load_n(q + d, static_cast<int>(s.q_dim() - d)), set1(static_cast<float>(s.c.scale))));
    if (first == 0) start_row(w.out + r * v_pad, w.max + r, w.total + r, v_pad);
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t first_limit = position + 1 - (first + i) * SEGMENT;
    if (first_limit + rows - 1 <= 0) break;
    const float *keys = plan.keys(head, i), *values = plan.values(head, i);
    attend_rows({rows, 1, first_limit, s.q_dim(), q_stride, v_pad}, w,
                [&](int64_t at, int64_t) { return KeyPanel{keys + at / PANEL * plan.panel_floats()}; },
                [&](int64_t at, int64_t n, const float** groups) {
                  for (int64_t j = 0; j < n; j += LANES) groups[j / LANES] = values + (at + j) * v_pad;
                });
  }
  if ((first + count) * SEGMENT < plan.context) return;
  for (int64_t r = 0; r < rows; ++r) {
    float* to = s.output(s.first(plan.request) + token + r, from + head);
    const F32 total = set1(w.total[r]);
    for (int64_t d = 0; d < s.up.v_dim; d += LANES)
      store_n(to + d, div(load(w.out + r * v_pad + d), total), static_cast<int>(s.up.v_dim - d));
  }
}

}  // namespace

void run_expanded(const Step& s, int64_t request) {
  static thread_local Scratch made, state;
  Plan plan{s, request, s.tokens(request), s.context(request), 1, 1, nullptr, nullptr};
  if (plan.tokens == 0) return;
  const int64_t all = (plan.context + SEGMENT - 1) / SEGMENT, head_state = plan.tokens * plan.row_floats();
  plan.heads = std::clamp<int64_t>(ROOM_FLOATS / (plan.segment_floats() + head_state), 1, s.up.heads);
  const int64_t left = std::max<int64_t>(0, ROOM_FLOATS - plan.heads * head_state);
  plan.segments = std::clamp<int64_t>(left / (plan.heads * plan.segment_floats()), 1, all);
  const int64_t made_floats = plan.heads * plan.segments * plan.segment_floats();
  plan.made = reinterpret_cast<float*>(made.get(static_cast<size_t>(made_floats) * sizeof(float)));
  plan.state = reinterpret_cast<float*>(state.get(static_cast<size_t>(plan.heads * head_state) * sizeof(float)));
  for (int64_t from = 0; from < s.up.heads; from += plan.heads) {
    const int64_t heads = std::min(plan.heads, s.up.heads - from);
    for (int64_t first = 0; first < all; first += plan.segments) {
      const int64_t count = std::min(plan.segments, all - first);
      if (s.up.kind == 0)
        make_window<float>(plan, from, heads, first, count);
      else
        make_window<uint16_t>(plan, from, heads, first, count);
      parallel(s.c.num_threads, heads * plan.tiles(), [&](int64_t i) {
        attend_window(plan, from, i % heads, plan.tiles() - 1 - i / heads, first, count);
      });
    }
  }
}

}  // namespace dstgi
