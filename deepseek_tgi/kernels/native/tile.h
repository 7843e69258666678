// Small float32 products whose bits do not depend on how they are cut: every element is one running sum, k ascending.
#pragma once

#include "simd.h"

namespace dstgi {

using namespace simd;

// The left factor a[m][depth], one of whose axes is dense; the other one's stride is known at run time only.
struct RowMajor {
  const float* at;
  int64_t row;

  RowMajor from(int64_t r) const { return {at + r * row, row}; }
  const float* column(int64_t k) const { return at + k; }
  int64_t step() const { return row; }
};
struct ColumnMajor {
  const float* at;
  int64_t stride;

  ColumnMajor from(int64_t r) const { return {at + r, stride}; }
  const float* column(int64_t k) const { return at + k * stride; }
  int64_t step() const { return 1; }
};

// Memory that will be read soon: a product asks for it line by line on its way, so that arithmetic covers the wait.
struct Ahead {
  const char *at = nullptr, *end = nullptr;

  void ask() {
    if (at >= end) return;
    __builtin_prefetch(at);
    __builtin_prefetch(at + 64);
    at += 128;
  }
};

// c[m][n] from a[m][depth] and b[depth][n], n a multiple of 16. With `keep` [m], what c holds is scaled by it and added to.
// A: RowMajor or ColumnMajor; B: float or uint16_t, the bits of bfloat16.
template <class A, class B>
void product(A a, int64_t m, const B* b, int64_t b_row, int64_t n, int64_t depth, float* c, int64_t c_row,
                    const float* keep = nullptr, Ahead ahead = {});

}  // namespace dstgi
