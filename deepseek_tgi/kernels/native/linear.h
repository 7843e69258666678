// Parts of a product, for ops made of several: the caller prepares the rows and spreads the tiles over threads.
#pragma once

#include "activations.h"

namespace dstgi {

constexpr int TILE = 32;  // outputs of a tile, two vectors

// Row `row` of x, [k], as the digits that `w` wants.
void quant_row(const QuantWeight& w, const float* x, const Activations& a, int64_t row);

// Outputs of tiles begin .. end - 1 of `rows` rows; `out` [rows, n] is dense. Chunks are `even_chunk(rows)` long.
void quant_tiles(const QuantWeight& w, const Activations& a, int64_t rows, int64_t begin, int64_t end, float* out);

// The same of dense x [rows, k].
void dense_tiles(const DenseWeight& w, const float* x, int64_t rows, int64_t begin, int64_t end, float* out);

}  // namespace dstgi
