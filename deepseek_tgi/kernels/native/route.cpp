// Routing: scores of a token's experts, the best groups, the best experts of those, their weights.
//
// A row is one thread's work and is computed alone, so its bits depend on nothing else. Lanes are summed in one fixed
// tree. Choices go by insertion into a short sorted list: most experts fail its last place and cost one comparison.

#include <limits>

#include "api.h"
#include "pool.h"
#include "rows.h"
#include "scratch.h"

namespace dstgi {
namespace {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();
constexpr float SMALLEST_SUM = 1e-20f;  // as published: keeps a sum of nothing but zeros from dividing

// What a row needs: its scores, what experts are ranked by, and the best so far.
struct Row {
  float *scores, *ranked, *best;
  int32_t* ids;
};

// Puts `value` of `id` into `best` [count], falling, equal ones in the order they come. `ids` goes along.
DSTGI_INLINE void insert(float value, int32_t id, float* best, int32_t* ids, int64_t count) {
  if (!(value > best[count - 1])) return;
  int64_t at = count - 1;
  for (; at > 0 && value > best[at - 1]; --at) {
    best[at] = best[at - 1];
    ids[at] = ids[at - 1];
  }
  best[at] = value;
  ids[at] = id;
}

DSTGI_INLINE void clear(float* best, int32_t* ids, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    best[i] = LOWEST;
    ids[i] = 0;
  }
}

// Scores of a row, and false if a logit is not finite.
bool score(const RouteCall& r, const float* logits, float* scores) {
  const int64_t n = r.experts;
  float largest = LOWEST;
  bool finite = true;
  for (int64_t e = 0; e < n; ++e) {
    finite = finite && logits[e] - logits[e] == 0.0f;
    largest = logits[e] > largest ? logits[e] : largest;
  }
  if (!finite) return false;
  F32 sum = zero();
  for (int64_t e = 0; e < n; e += LANES) {
    const int left = static_cast<int>(n - e);
    const F32 x = load_n(logits + e, left);
    if (r.sigmoid) {
      store_n(scores + e, div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))), left);
    } else {
      const F32 power = exp(sub(x, set1(largest)));
      store_n(scores + e, power, left);
      sum = add(sum, load_n(scores + e, left));  // lanes past the end count nothing
    }
  }
  if (!r.sigmoid) {
    const F32 total = set1(sum_lanes(sum));
    for (int64_t e = 0; e < n; e += LANES)
      store_n(scores + e, div(load_n(scores + e, static_cast<int>(n - e)), total), static_cast<int>(n - e));
  }
  return true;
}

// Experts outside the best groups lose their rank.
void drop_groups(const RouteCall& r, const Row& row) {
  const int64_t size = r.experts / r.groups;
  clear(row.best, row.ids, r.top_groups);
  for (int64_t g = 0; g < r.groups; ++g) {
    float first = LOWEST, second = LOWEST;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      const float value = row.ranked[e];
      second = value > first ? first : value > second ? value : second;
      first = value > first ? value : first;
    }
    insert(r.counted == 2 && size > 1 ? first + second : first, static_cast<int32_t>(g), row.best, row.ids,
           r.top_groups);
  }
  for (int64_t g = 0; g < r.groups; ++g) {
    bool kept = false;
    for (int64_t i = 0; i < r.top_groups; ++i) kept = kept || row.ids[i] == g;
    for (int64_t e = g * size; !kept && e < (g + 1) * size; ++e) row.ranked[e] = LOWEST;
  }
}

void choose(const RouteCall& r, const float* bias, const Row& row, int32_t* ids, float* weights) {
  for (int64_t e = 0; e < r.experts; ++e) row.ranked[e] = bias == nullptr ? row.scores[e] : row.scores[e] + bias[e];
  if (r.counted > 0) drop_groups(r, row);
  clear(row.best, ids, r.top_k);
  for (int64_t e = 0; e < r.experts; ++e) insert(row.ranked[e], static_cast<int32_t>(e), row.best, ids, r.top_k);
  float sum = 0.0f;
  for (int64_t i = 0; i < r.top_k; ++i) sum += row.scores[ids[i]];
  for (int64_t i = 0; i < r.top_k; ++i) {
    const float own = row.scores[ids[i]];
    weights[i] = (r.normalise ? own / (sum + SMALLEST_SUM) : own) * static_cast<float>(r.scale);
  }
}

thread_local Scratch row_scratch;

Row lay_out(const RouteCall& r) {
  const int64_t most = r.top_k > r.top_groups ? r.top_k : r.top_groups;
  const size_t wide = align64(r.experts * sizeof(float)), narrow = align64(most * sizeof(float));
  char* p = row_scratch.get(2 * wide + 2 * narrow);
  return {reinterpret_cast<float*>(p), reinterpret_cast<float*>(p + wide), reinterpret_cast<float*>(p + 2 * wide),
          reinterpret_cast<int32_t*>(p + 2 * wide + narrow)};
}

}  // namespace
}  // namespace dstgi

// logits [t, experts], bias [experts] or null; ids and weights [t, top_k] are written.
DSTGI_API void dstgi_route(const RouteCall* r, const float* logits, const float* bias, int64_t t, int32_t* ids,
                           float* weights) {
  using namespace dstgi;
  by_rows(t, r->experts, r->num_threads, [&](int64_t i) {
    const Row row = lay_out(*r);
    int32_t* chosen = ids + i * r->top_k;
    float* shares = weights + i * r->top_k;
    if (score(*r, logits + i * r->experts, row.scores)) return choose(*r, bias, row, chosen, shares);
    for (int64_t j = 0; j < r->top_k; ++j) {
      chosen[j] = static_cast<int32_t>(j);
      shares[j] = std::numeric_limits<float>::quiet_NaN();
    }
  });
}
