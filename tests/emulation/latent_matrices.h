// Twins of latent_matrices.cuh: products are made at once, by each thread for its own elements; gates count arrivals.
#pragma once

static inline u32 shared_address(const void* p) {
  return u32(static_cast<const unsigned char*>(p) - emulation::dynamic_memory);
}

struct MatrixTable {
  u32 address;
  int step, table_bytes;  // bytes from a table to the next; 0: lines run along the sum
};
static inline MatrixTable along(const void* table, int step) { return {shared_address(table), step, 0}; }
template <int table_bytes>
static inline MatrixTable across(const void* table, int step) {
  return {shared_address(table), step, table_bytes};
}
static inline void matrices_fence() {}
static inline void matrices_commit() {}
template <int pending>
static inline void matrices_wait() {}
static inline void show_to_matrices() {}
template <int count>
static inline void more_registers() {}
template <int count>
static inline void fewer_registers() {}

// Element `column` of line `line` of a table.
template <bool half>
static inline float matrix_element(u32 table, int line, int column) {
  if (table % 1024 && (table % 1024) % 128) emulation::fail("a table of lines is not aligned");
  u32 from = table + line * 128 + (((column / 8) ^ (line & 7)) << 4) + column % 8 * 2;
  u16 bits;
  memcpy(&bits, emulation::dynamic_memory + from, 2);
  return half ? half_float(bits) : bf16_float(bits);
}
template <bool half>
static inline void multiply_along(float (&d)[16], MatrixTable a, MatrixTable b, bool adds) {
  int lane = lane_id(), warp = int(threadIdx.x / 32 % 4);
  for (int i = 0; i < 16; i++) {
    int row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    double sum = adds ? d[i] : 0.0f;
    for (int k = 0; k < 16; k++)
      sum += double(matrix_element<half>(a.address, row, a.step * 16 + k)) *
             double(matrix_element<half>(b.address, column, b.step * 16 + k));
    d[i] = float(sum);
  }
}
template <bool half>
static inline void multiply_across(float (&d)[128], const u32 (&a)[4], MatrixTable b) {
  int lane = lane_id();
  float rows[2][16];
  for (int k = 0; k < 16; k++)
    for (int upper = 0; upper < 2; upper++) {
      u32 pair = shuffle(a[k / 8 * 2 + upper], lane / 4 * 4 + k % 8 / 2);
      rows[upper][k] = half ? (k % 2 ? half_high(pair) : half_low(pair)) : (k % 2 ? bf16_high(pair) : bf16_low(pair));
    }
  for (int i = 0; i < 128; i++) {
    int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    double sum = d[i];
    for (int k = 0; k < 16; k++)
      sum += double(rows[i / 2 % 2][k]) *
             double(matrix_element<half>(b.address + column / 64 * b.table_bytes, b.step * 16 + k, column % 64));
    d[i] = float(sum);
  }
}
