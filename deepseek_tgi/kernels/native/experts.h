// What the grouped experts (moe.cpp) work on: an expert's matrices, its rows on their way through, and all the choices of
// a call, cut from the caller's scratch.
#pragma once

#include <algorithm>

#include "linear.h"

namespace dstgi {

struct Matrix {
  const QuantWeight* quant;
  const DenseWeight* dense;

  Matrix() = default;
  Matrix(const void* weight, bool is_dense)
      : quant(is_dense ? nullptr : static_cast<const QuantWeight*>(weight)),
        dense(is_dense ? static_cast<const DenseWeight*>(weight) : nullptr) {}
  int64_t n() const { return quant ? quant->n : dense->n; }
  int64_t k() const { return quant ? quant->k : dense->k; }
  int64_t tiles() const { return (n() + TILE - 1) / TILE; }
  size_t input_bytes(int64_t rows) const {
    return quant ? digit_bytes(*quant, rows, even_chunk(rows)) : align64(sizeof(float) * rows * k());
  }
};

// Rows on their way into a product: digits, or floats for a dense weight.
struct Input {
  Activations digits;
  float* floats;
};

// An expert at work. `mid` holds gate_up's rows, then down's.
struct Active {
  const Expert* expert;
  Matrix gate_up, down;
  int64_t first, rows;  // its pairs
  Input x, inner;
  float* mid;
  int64_t first_unit, units;  // of the product under way
  bool gathers;               // false: its one row of x is used where it lies
};

static_assert(sizeof(Active) <= 256, "expert_scratch.py counts 64 floats");

struct Arena {
  char* at;
  template <class T>
  T* take(int64_t count) {
    T* here = reinterpret_cast<T*>(at);
    at += align64(sizeof(T) * count);
    return here;
  }
};

// All (token, expert) of the call, by expert and then by token.
struct Pairs {
  int64_t count, each;   // `each`: of one token
  int64_t* first;        // [experts + 2]
  int32_t *token, *own;  // [count]; [tokens][each]: a token's pairs, ascending
  float *share, **result;
  Active* active;

  Pairs(const Experts& e, int64_t t, int64_t k, Arena& arena)
      : count(t * (k + e.shared)),
        each(k + e.shared),
        first(arena.take<int64_t>(e.count + 2)),
        token(arena.take<int32_t>(count)),
        own(arena.take<int32_t>(count)),
        share(arena.take<float>(count)),
        result(arena.take<float*>(count)),
        active(arena.take<Active>(std::min(count, e.count + 1))) {}
};

inline Input place(const Matrix& m, int64_t rows, char* memory) {
  Input input{};
  if (m.quant) input.digits = lay_out(*m.quant, rows, even_chunk(rows), memory);
  input.floats = reinterpret_cast<float*>(memory);
  return input;
}

// Bytes an expert works in: x and the activation share theirs, as do gate_up's and down's results.
inline size_t mid_bytes(const Expert& e, int64_t rows) {
  const Matrix gate_up(e.gate_up, e.gate_up_dense), down(e.down, e.down_dense);
  return align64(sizeof(float) * rows * std::max(gate_up.n(), down.n()));
}

inline size_t active_bytes(const Expert& e, int64_t rows) {
  const Matrix gate_up(e.gate_up, e.gate_up_dense), down(e.down, e.down_dense);
  return mid_bytes(e, rows) + std::max(gate_up.input_bytes(rows), down.input_bytes(rows));
}

// Rows `begin` .. `end` - 1, all of one chunk of `to`, from the digits of all tokens, one a chunk.
inline void copy_digits(const QuantWeight& w, const Activations& from, const int32_t* token, const Activations& to,
                        int64_t begin, int64_t end) {
  const int64_t pairs = w.width / 2, chunk = to.chunk, rows = end - begin;
  for (int64_t b = 0; b < w.blocks; ++b) {
    const int64_t at = begin / chunk * w.blocks + b, row = begin % chunk;
    for (int64_t d = 0; d < w.digits; ++d) {
      const int32_t* source[CHUNK_ROWS];
      for (int64_t r = 0; r < rows; ++r) source[r] = from.pairs[d] + (token[begin + r] * w.blocks + b) * pairs;
      int32_t* place = to.pairs[d] + at * pairs * chunk + row;
      for (int64_t p = 0; p < pairs; ++p, place += chunk)
        for (int64_t r = 0; r < rows; ++r) place[r] = source[r][p];
      for (int64_t r = 0; r < rows; ++r)
        to.sum[d][at * chunk + row + r] = from.sum[d][token[begin + r] * w.blocks + b];
    }
    for (int64_t r = 0; r < rows; ++r)
      to.scale[at * chunk + row + r] = from.scale[token[begin + r] * w.blocks + b];
  }
}

// The digits of one token as those of a chunk of one row.
inline Activations one_token(const QuantWeight& w, Activations a, int64_t token) {
  for (int64_t d = 0; d < 2; ++d) {
    a.pairs[d] += token * w.blocks * (w.width / 2);
    if (a.sum[d]) a.sum[d] += token * w.blocks;
  }
  a.scale += token * w.blocks;
  return a;
}

}  // namespace dstgi
