// The lanes of simd.h as GCC vectors, which the compiler lowers to whatever the machine has. Included by simd.h alone,
// inside its namespace.
#pragma once

constexpr int REGISTERS = 8;

typedef float F32 __attribute__((vector_size(64)));
typedef int32_t I32 __attribute__((vector_size(64)));
typedef uint32_t U32 __attribute__((vector_size(64)));
typedef int16_t S16 __attribute__((vector_size(64)));
typedef uint16_t U16 __attribute__((vector_size(64)));

DSTGI_INLINE F32 zero() { return F32{}; }
DSTGI_INLINE F32 set1(float x) { return F32{} + x; }
DSTGI_INLINE F32 load(const float* p) {
  F32 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
DSTGI_INLINE F32 load_n(const float* p, int n) {
  F32 x{};
  std::memcpy(&x, p, sizeof(float) * (n < LANES ? n : LANES));
  return x;
}
DSTGI_INLINE void store(float* p, F32 x) { std::memcpy(p, &x, sizeof x); }
DSTGI_INLINE void store_n(float* p, F32 x, int n) { std::memcpy(p, &x, sizeof(float) * (n < LANES ? n : LANES)); }
DSTGI_INLINE F32 add(F32 a, F32 b) { return a + b; }
DSTGI_INLINE F32 sub(F32 a, F32 b) { return a - b; }
DSTGI_INLINE F32 mul(F32 a, F32 b) { return a * b; }
DSTGI_INLINE F32 div(F32 a, F32 b) { return a / b; }
DSTGI_INLINE F32 fma(F32 a, F32 b, F32 c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__aarch64__)
  F32 r;
  for (int i = 0; i < LANES; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#else
  return a * b + c;
#endif
}
DSTGI_INLINE F32 max(F32 a, F32 b) { return a > b ? a : b; }
DSTGI_INLINE F32 min(F32 a, F32 b) { return a < b ? a : b; }
DSTGI_INLINE F32 to_float(I32 x) { return __builtin_convertvector(x, F32); }
DSTGI_INLINE F32 round_even(F32 x) {
  // Adding and taking away 1.5 * 2**23 rounds to nearest even for |x| < 2**22; larger values are whole already or are
  // saturated by the caller.
  const F32 magic = set1(12582912.0f);
  F32 r = (x + magic) - magic;
  F32 magnitude = x < 0.0f ? -x : x;
  return magnitude < 4194304.0f ? r : x;
}
DSTGI_INLINE I32 to_int(F32 x) { return __builtin_convertvector(round_even(x), I32); }
DSTGI_INLINE F32 as_float(I32 x) { return reinterpret_cast<F32>(x); }
DSTGI_INLINE I32 as_int(F32 x) { return reinterpret_cast<I32>(x); }

DSTGI_INLINE I32 izero() { return I32{}; }
DSTGI_INLINE I32 iset1(int32_t x) { return I32{} + x; }
DSTGI_INLINE I32 iload(const void* p) {
  I32 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
DSTGI_INLINE void istore(void* p, I32 x) { std::memcpy(p, &x, sizeof x); }
DSTGI_INLINE I32 iadd(I32 a, I32 b) { return a + b; }
DSTGI_INLINE I32 imul(I32 a, I32 b) { return a * b; }
DSTGI_INLINE I32 iand(I32 a, I32 b) { return a & b; }
DSTGI_INLINE I32 ior(I32 a, I32 b) { return a | b; }
DSTGI_INLINE I32 imax(I32 a, I32 b) { return a > b ? a : b; }
DSTGI_INLINE I32 imin(I32 a, I32 b) { return a < b ? a : b; }
DSTGI_INLINE I32 shl32(I32 x, int n) { return x << n; }
DSTGI_INLINE I32 shr32(I32 x, int n) { return reinterpret_cast<I32>(reinterpret_cast<U32>(x) >> n); }
DSTGI_INLINE I32 shl16(I32 x, int n) {
  return reinterpret_cast<I32>(reinterpret_cast<U16>(x) << static_cast<uint16_t>(n));
}
DSTGI_INLINE I32 shr16(I32 x, int n) {
  return reinterpret_cast<I32>(reinterpret_cast<U16>(x) >> static_cast<uint16_t>(n));
}
DSTGI_INLINE I32 sar16(I32 x, int n) {
  return reinterpret_cast<I32>(reinterpret_cast<S16>(x) >> static_cast<int16_t>(n));
}
DSTGI_INLINE I32 sub16(I32 a, I32 b) { return reinterpret_cast<I32>(reinterpret_cast<S16>(a) - reinterpret_cast<S16>(b)); }
DSTGI_INLINE I32 load_u8(const uint8_t* p) {
  I32 x;
  for (int i = 0; i < LANES; ++i) x[i] = p[i];
  return x;
}
DSTGI_INLINE I32 dot_pairs(I32 acc, I32 a, I32 b) {
#if defined(__AVX2__)
  __m256i x[2], y[2], s[2];
  std::memcpy(x, &a, sizeof a);
  std::memcpy(y, &b, sizeof b);
  for (int i = 0; i < 2; ++i) s[i] = _mm256_madd_epi16(x[i], y[i]);
  I32 sum;
  std::memcpy(&sum, s, sizeof sum);
  return acc + sum;
#elif defined(__SSE2__)
  __m128i x[4], y[4], s[4];
  std::memcpy(x, &a, sizeof a);
  std::memcpy(y, &b, sizeof b);
  for (int i = 0; i < 4; ++i) s[i] = _mm_madd_epi16(x[i], y[i]);
  I32 sum;
  std::memcpy(&sum, s, sizeof sum);
  return acc + sum;
#else
  I32 low = (a << 16 >> 16) * (b << 16 >> 16);
  return acc + low + (a >> 16) * (b >> 16);
#endif
}
DSTGI_INLINE void store_i16(int16_t* p, I32 x) {
  for (int i = 0; i < LANES; ++i) p[i] = static_cast<int16_t>(x[i] > 32767 ? 32767 : x[i] < -32768 ? -32768 : x[i]);
}
DSTGI_INLINE void store_u8(uint8_t* p, I32 x) {
  for (int i = 0; i < LANES; ++i) p[i] = static_cast<uint8_t>(x[i]);
}
DSTGI_INLINE float half_bits_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, rest = h & 0x7fff;
  uint32_t bits = rest << 13;
  float value;
  if (rest >= 0x7c00) {
    bits |= 0x7f800000;
  } else if (rest >= 0x0400) {
    bits += 112u << 23;
  } else {  // subnormal: rest * 2**-24, exact
    value = static_cast<float>(rest) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &value, 4);
  }
  bits |= sign;
  std::memcpy(&value, &bits, 4);
  return value;
}
DSTGI_INLINE F32 load_half(const uint16_t* p) {
  F32 x;
  for (int i = 0; i < LANES; ++i) x[i] = half_bits_to_float(p[i]);
  return x;
}
DSTGI_INLINE F32 load_e4m3(const uint8_t* p) {
  F32 x;
  for (int i = 0; i < LANES; ++i)
    x[i] = half_bits_to_float(static_cast<uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7));
  return x;
}
DSTGI_INLINE void load_e4m3_twice(const uint8_t* p, F32* x) {
  x[0] = load_e4m3(p);
  x[1] = load_e4m3(p + LANES);
}
DSTGI_INLINE F32 load_bf16(const uint16_t* p) {
  I32 x;
  for (int i = 0; i < LANES; ++i) x[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i]) << 16);
  return as_float(x);
}
DSTGI_INLINE I32 load_s8(const int8_t* p) {
  I32 x;
  for (int i = 0; i < LANES; ++i) x[i] = p[i];
  return x;
}
DSTGI_INLINE F32 lookup(F32 table, I32 index) {
  F32 x;
  for (int i = 0; i < LANES; ++i) x[i] = table[index[i] & 15];
  return x;
}
DSTGI_INLINE F32 if_above(F32 a, F32 b, F32 x, F32 other) { return a > b ? x : other; }
DSTGI_INLINE I32 count_above(I32 count, F32 a, F32 b) { return count - reinterpret_cast<I32>(a > b); }
DSTGI_INLINE F32 scale_by_power(F32 x, F32 n) {
  // In two halves, so that results near the ends of the exponent range stay right.
  I32 whole = to_int(n), half = whole >> 1, rest = whole - half;
  return x * as_float((half + 127) << 23) * as_float((rest + 127) << 23);
}
DSTGI_INLINE F32 keep_below(F32 x, int n, F32 other) {
  for (int i = 0; i < LANES; ++i) x[i] = i < n ? x[i] : other[i];
  return x;
}
