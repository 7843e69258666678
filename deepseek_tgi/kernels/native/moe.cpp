// The experts of one layer for all tokens of a step: out[t] += sum of weight * down(silu(gate(x[t])) * up(x[t])).
//
// Tokens are sorted by expert, and only experts that some token chose are looked at. Stages, each spread over the
// threads: digits of x, once a token; rows gathered by expert; gate and up of all experts, in runs of output tiles of
// like cost; activation and digits; down, likewise; sums, by token in ascending order of its experts, the shared one
// last. Every row's arithmetic is that of the linear ops, so its bits depend on nothing else in the call.
//
// Choice: experts go through the stages in waves that take some 32 MB between them, each expert in one wave. Prevents:
// memory for every choice of every token of a long prompt (3 GB for DeepSeek-V3 at 4096 tokens). Rejected: cutting the
// tokens instead, which would read every expert once a cut.

#include <cassert>

#include "experts.h"
#include "pool.h"

namespace dstgi {
namespace {

constexpr size_t WAVE_BYTES = size_t{32} << 20;  // `WAVE_FLOATS` of kernels/expert_scratch.py
constexpr int64_t UNITS = 8;                     // runs of tiles a thread gets of a stage
constexpr int64_t ROW_WORTH = 4;                 // rows whose arithmetic takes as long as reading the weights
constexpr int64_t COLUMNS = 1024;                // of a row that is summed by one thread
constexpr int64_t GATHER_RUNS = 4;               // stretches of rows a thread gets

thread_local Scratch row_scratch;

float* row_buffer(int64_t floats) { return reinterpret_cast<float*>(row_scratch.get(sizeof(float) * floats)); }

class Moe {
 public:
  Moe(const Experts& e, const float* x, int64_t t, int64_t k, float* out, char* scratch)
      : e_(e), x_(x), tokens_(t), choices_(k), out_(out), arena_{scratch}, p_(e, t, k, arena_) {}

  void run(const int32_t* ids, const float* weights) {
    sort(ids, weights);
    take_digits();
    const int64_t experts = e_.count + e_.shared;
    for (int64_t expert = 0; expert < experts;) {
      expert = fill_wave(expert, experts);
      if (wave_ == 0) break;
      gather();
      multiply(&Active::gate_up, &Active::x);
      activate();
      multiply(&Active::down, &Active::inner);
      add();
    }
  }

 private:
  // A counting sort; the shared expert's pairs come last.
  void sort(const int32_t* ids, const float* weights) {
    const int64_t routed = tokens_ * choices_;
    std::fill(p_.first, p_.first + e_.count + 2, 0);
    for (int64_t i = 0; i < routed; ++i) {
      assert(ids[i] >= 0 && ids[i] < e_.count);
      ++p_.first[ids[i] + 2];
    }
    for (int64_t i = 2; i < e_.count + 2; ++i) p_.first[i] += p_.first[i - 1];
    for (int64_t i = 0; i < routed; ++i) {
      const int64_t pair = p_.first[ids[i] + 1]++;  // ends as the first of the next expert
      p_.token[pair] = static_cast<int32_t>(i / choices_);
      p_.share[pair] = weights[i];
    }
    for (int64_t i = 0; e_.shared && i < tokens_; ++i) {
      p_.token[routed + i] = static_cast<int32_t>(i);
      p_.share[routed + i] = 1.0f;
    }
    // Pairs ascend by expert, so each token meets its own in order.
    int32_t* met = reinterpret_cast<int32_t*>(p_.result);  // free until the first wave
    std::fill(met, met + tokens_, 0);
    for (int64_t pair = 0; pair < p_.count; ++pair) {
      const int32_t token = p_.token[pair];
      p_.own[token * p_.each + met[token]++] = static_cast<int32_t>(pair);
    }
  }

  int64_t pairs_before(int64_t expert) const { return expert <= e_.count ? p_.first[expert] : p_.count; }

  // Digits of every token in each layout that a chosen expert wants.
  void take_digits() {
    digits_ = arena_.take<Activations>(e_.num_layouts);
    bool* wanted = arena_.take<bool>(e_.num_layouts);
    std::fill(wanted, wanted + e_.num_layouts, false);
    for (int64_t i = 0; i < e_.count + e_.shared; ++i)
      if (e_.experts[i].layout >= 0 && pairs_before(i) < pairs_before(i + 1)) wanted[e_.experts[i].layout] = true;
    for (int64_t i = 0; i < e_.num_layouts; ++i) {
      const QuantWeight& w = *e_.layouts[i];
      digits_[i] = lay_out(w, tokens_, 1, arena_.take<char>(digit_bytes(w, tokens_, 1)));
      if (wanted[i])
        by_rows(tokens_, e_.hidden, e_.num_threads, [&](int64_t t) { quant_row(w, x_ + t * e_.hidden, digits_[i], t); });
    }
  }

  // Chosen experts from `expert` on, as many as a wave holds; the first after them.
  int64_t fill_wave(int64_t expert, int64_t experts) {
    Arena memory = arena_;
    size_t used = 0;
    gathers_ = false;
    for (wave_ = 0; expert < experts; ++expert) {
      const int64_t first = pairs_before(expert), rows = pairs_before(expert + 1) - first;
      if (rows == 0) continue;
      const Expert& weights = e_.experts[expert];
      used += active_bytes(weights, rows);
      if (wave_ > 0 && used > WAVE_BYTES) break;
      Active& a = p_.active[wave_++];
      a = {&weights, {weights.gate_up, weights.gate_up_dense != 0}, {weights.down, weights.down_dense != 0}, first, rows};
      a.mid = reinterpret_cast<float*>(memory.take<char>(mid_bytes(weights, rows)));
      char* rest = memory.take<char>(active_bytes(weights, rows) - mid_bytes(weights, rows));
      a.inner = place(a.down, rows, rest);
      a.x = place(a.gate_up, rows, rest);
      a.gathers = rows > 1 || weights.order || (a.gate_up.quant && weights.layout < 0);
      gathers_ = gathers_ || a.gathers;
      if (!a.gathers) {
        const int64_t token = p_.token[first];
        a.x.floats = const_cast<float*>(x_) + token * e_.hidden;
        if (a.gate_up.quant) a.x.digits = one_token(*a.gate_up.quant, digits_[weights.layout], token);
      }
      for (int64_t r = 0; r < rows; ++r) p_.result[first + r] = a.mid + r * a.down.n();
    }
    return expert;
  }

  // `each(active, begin, end)` for stretches of rows that lie in one expert and one chunk.
  template <class F>
  void by_stretches(int64_t width, F&& each) {
    const int64_t first = p_.active[0].first, count = p_.active[wave_ - 1].first + p_.active[wave_ - 1].rows - first;
    const int64_t threads = count * width < PARALLEL_FROM ? 1 : e_.num_threads;
    const int64_t runs = std::min(count, GATHER_RUNS * threads);
    parallel(threads, runs, [&](int64_t run) {
      const int64_t begin = first + count * run / runs, end = first + count * (run + 1) / runs;
      for (int64_t i = 0; i < wave_; ++i) {
        const Active& a = p_.active[i];
        const int64_t chunk = even_chunk(a.rows), last = std::min(end - a.first, a.rows);
        for (int64_t row = std::max<int64_t>(begin - a.first, 0), next; row < last; row = next) {
          next = std::min(last, (row / chunk + 1) * chunk);
          each(a, row, next);
        }
      }
    });
  }

  void gather() {
    if (!gathers_) return;
    by_stretches(e_.hidden, [&](const Active& a, int64_t begin, int64_t end) {
      if (!a.gathers) return;
      const int32_t* token = p_.token + a.first;
      if (a.expert->layout >= 0)
        return copy_digits(*a.gate_up.quant, digits_[a.expert->layout], token, a.x.digits, begin, end);
      for (int64_t row = begin; row < end; ++row) {
        const float* from = x_ + token[row] * e_.hidden;
        float* to = a.gate_up.quant ? row_buffer(e_.hidden) : a.x.floats + row * e_.hidden;
        for (int64_t i = 0; i < e_.hidden; ++i) to[i] = from[a.expert->order ? a.expert->order[i] : i];
        if (a.gate_up.quant) quant_row(*a.gate_up.quant, to, a.x.digits, row);
      }
    });
  }

  void activate() {
    by_stretches(p_.active[0].down.k(), [&](const Active& a, int64_t begin, int64_t end) {
      const int64_t width = a.down.k();
      for (int64_t row = begin; row < end; ++row) {
        const float* gate = a.mid + row * a.gate_up.n();
        float* to = a.down.quant ? row_buffer(width) : a.inner.floats + row * width;
        silu_row(gate, gate + width, width, to);
        if (a.down.quant) quant_row(*a.down.quant, to, a.inner.digits, row);
      }
    });
  }

  // One of the products of every expert of the wave, into `mid`.
  void multiply(Matrix Active::*matrix, Input Active::*input) {
    const auto cost = [&](const Active& a) { return (a.*matrix).tiles() * (a.*matrix).k() * (ROW_WORTH + a.rows); };
    int64_t total = 0, units = 0;
    for (int64_t i = 0; i < wave_; ++i) total += cost(p_.active[i]);
    const int64_t share = total / (UNITS * e_.num_threads) + 1;
    for (int64_t i = 0; i < wave_; ++i) {
      Active& a = p_.active[i];
      a.first_unit = units;
      a.units = std::clamp<int64_t>((cost(a) + share - 1) / share, 1, (a.*matrix).tiles());
      units += a.units;
    }
    parallel(e_.num_threads, units, [&](int64_t unit) {
      const Active *begins = p_.active, *ends = begins + wave_;
      const auto before = [](int64_t u, const Active& b) { return u < b.first_unit; };
      const Active& a = *(std::upper_bound(begins, ends, unit, before) - 1);
      const Matrix& m = a.*matrix;
      const Input& in = a.*input;
      const int64_t i = unit - a.first_unit, begin = m.tiles() * i / a.units, last = m.tiles() * (i + 1) / a.units;
      if (m.quant) return quant_tiles(*m.quant, in.digits, a.rows, begin, last, a.mid);
      dense_tiles(*m.dense, in.floats, a.rows, begin, last, a.mid);
    });
  }

  // The wave's results to their tokens; a product and a sum, rounded one after the other.
  void add() {
    const Active& last = p_.active[wave_ - 1];
    const int32_t first = static_cast<int32_t>(p_.active[0].first), end = static_cast<int32_t>(last.first + last.rows);
    const int64_t pieces = (e_.hidden + COLUMNS - 1) / COLUMNS;
    by_rows(tokens_ * pieces, std::min(COLUMNS, e_.hidden) * p_.each, e_.num_threads, [&](int64_t i) {
      const int64_t token = i / pieces, begin = i % pieces * COLUMNS, width = std::min(COLUMNS, e_.hidden - begin);
      float* out = out_ + token * e_.hidden + begin;
      for (int64_t j = 0; j < p_.each; ++j) {
        const int32_t pair = p_.own[token * p_.each + j];
        if (pair < first || pair >= end) continue;
        const float* y = p_.result[pair] + begin;
        const float share = p_.share[pair];
        for (int64_t c = 0; c < width; ++c) out[c] += share * y[c];
      }
    });
  }

  const Experts& e_;
  const float* x_;
  const int64_t tokens_, choices_;
  float* out_;
  Arena arena_;
  Pairs p_;
  Activations* digits_ = nullptr;
  int64_t wave_ = 0;  // experts at work
  bool gathers_ = false;  // one of them does
};

}  // namespace
}  // namespace dstgi

// x [t, hidden], ids and weights [t, k], out [t, hidden] apart from x; ids within the experts. `scratch` as
// kernels/expert_scratch.py has it.
DSTGI_API void dstgi_moe(const Experts* e, const float* x, const int32_t* ids, const float* weights, int64_t t,
                         int64_t k, float* out, char* scratch) {
  if (t > 0) dstgi::Moe(*e, x, t, k, out, scratch).run(ids, weights);
}
