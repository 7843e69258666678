// How register tiles are cut to the registers a machine has.
#pragma once

#include "simd.h"

namespace dstgi {

using namespace simd;

constexpr bool MANY_REGISTERS = REGISTERS >= 32;

// Vectors beside each other, of 4, 2 and 1, in a tile of `rows` rows of sums. A single row's right factors need no
// register: each is used once, from memory.
constexpr int tile_vectors(int rows, int most = 4) {
  return most == 1 || rows * most + (rows > 1 ? most : 0) + 1 <= REGISTERS ? most : tile_vectors(rows, most / 2);
}

template <int N>
struct Count {
  static constexpr int value = N;
};

// `each(Count<n>)` for an n from 1 to MOST that is known at run time only.
template <int MOST, class F>
DSTGI_INLINE void with_count(int64_t n, F&& each) {
  if constexpr (MOST > 1)
    if (n < MOST) return with_count<MOST - 1>(n, each);
  each(Count<MOST>{});
}

}  // namespace dstgi
