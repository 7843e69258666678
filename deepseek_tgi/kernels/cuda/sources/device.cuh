// The hardware as kernels see it: every primitive that plain C++ has no word for, and nothing else.
//
// Kernels include this file only: no CUDA headers, so that NVRTC needs no toolkit on the user's machine. Each primitive
// has a twin in plain C++ in the tests' emulation.h, which DEEPSEEK_TGI_EMULATED puts in this file's place; so every
// kernel also runs, thread by thread, on a machine without a GPU.
//
// Fragments of the matrix instructions, with g = lane / 4 and t = lane % 4 (PTX ISA, "mma.m16n8k16", "mma.m16n8k32"):
//   16-bit A [16, 16]: a[0] row g, columns 2t, 2t+1; a[1] row g+8; a[2], a[3] the same rows, columns 2t+8, 2t+9
//   16-bit B [16, 8]:  b[0] rows 2t, 2t+1 of column g; b[1] rows 2t+8, 2t+9
//   8-bit A [16, 32]:  a[0] row g, columns 4t .. 4t+3; a[1] row g+8; a[2], a[3] the same rows, 16 columns on
//   8-bit B [32, 8]:   b[0] rows 4t .. 4t+3 of column g; b[1] 16 rows on
//   C [16, 8]:         c[0], c[1] row g, columns 2t, 2t+1; c[2], c[3] row g+8
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifdef DEEPSEEK_TGI_EMULATED
#define __align__(n) __attribute__((aligned(n)))
#endif

// 16-bit floats travel as bits: bf16 and half are told apart by the primitive that reads them.
struct __align__(16) words4 {
  u32 x, y, z, w;
};
struct __align__(8) words2 {
  u32 x, y;
};

#ifdef DEEPSEEK_TGI_EMULATED
#include "emulation.h"
#else

#define DEVICE __device__ __forceinline__
#define DEVICE_IN_CLASS __device__ __forceinline__
// Kernels are C functions; under emulation this also makes the door through which tests start them.
#define EXPORT(name)
// The same for one whose blocks come in clusters of `size` along the grid's second axis.
#define EXPORT_CLUSTER(name, size)

DEVICE int lane_id() { return threadIdx.x & 31; }
DEVICE void block_sync() { __syncthreads(); }
DEVICE void warp_sync() { __syncwarp(); }
// A barrier of its own number (from 1 on) for `threads`; who arrives only does not wait.
DEVICE void gate_wait(int number, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory"); }
DEVICE void gate_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
DEVICE u8* dynamic_shared() {
  extern __shared__ __align__(1024) u8 dynamic_shared_memory[];
  return dynamic_shared_memory;
}

// --- bits -----------------------------------------------------------------------------------------------------------
DEVICE u32 float_bits(float x) { return __float_as_uint(x); }
DEVICE float bits_float(u32 x) { return __uint_as_float(x); }
// Bitwise function of three words; `table` is the value of f(0xF0, 0xCC, 0xAA).
template <int table>
DEVICE u32 lop3(u32 a, u32 b, u32 c) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(r) : "r"(a), "r"(b), "r"(c), "n"(table));
  return r;
}
// Four bytes of the eight in (b, a), chosen by the four low nibbles of `selector`; a nibble above 7 asks for the byte's
// sign, eight times.
DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}

// --- conversions ----------------------------------------------------------------------------------------------------
DEVICE float bf16_float(u16 x) { return __uint_as_float((u32)x << 16); }
DEVICE float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float bf16_high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
// Two floats to a pair, to nearest even; `low` goes to the lower half.
DEVICE u32 bf16_pair(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DEVICE u16 float_bf16(float x) { return (u16)bf16_pair(x, 0.0f); }
DEVICE float half_float(u16 x) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
  return r;
}
DEVICE float half_low(u32 pair) { return half_float((u16)pair); }
DEVICE float half_high(u32 pair) { return half_float((u16)(pair >> 16)); }
DEVICE u16 float_half(float x) {
  u16 r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}
DEVICE u32 half_pair(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// Two e4m3 floats (low byte first) to a pair of halves, exactly; codes of NaN only where the hardware knows them.
DEVICE u32 fp8_halves(u16 pair) {
#if __CUDA_ARCH__ >= 890
  u32 r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(pair));
  return r;
#else
  u32 wide = __byte_perm(pair, 0, 0x1404), r = wide & 0x80008000u | (wide & 0x7F007F00u) >> 1;  // 2^-8 of each
  asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(r) : "r"(0x5C005C00u));
  return r;
#endif
}
DEVICE u32 fp8_code(float x) {
  float magnitude = fminf(fabsf(x), 448.0f);
  u32 bits = __float_as_uint(magnitude), code = (u32)rintf(magnitude * 512.0f);
  if (magnitude >= 0.015625f) code = (bits + 0x7FFFFu + (bits >> 20 & 1) >> 20) - (120 << 3);
  return x != x ? 0x7F : __float_as_uint(x) >> 24 & 0x80 | code;
}
// Two floats to e4m3, to nearest even, beyond 448 saturating.
DEVICE u16 fp8_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
#else
  return (u16)(fp8_code(high) << 8 | fp8_code(low));
#endif
}
// To the half at or above, or at or below.
DEVICE u16 half_above(float x) {
  u16 r;
  asm("cvt.rp.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}
DEVICE u16 half_below(float x) {
  u16 r;
  asm("cvt.rm.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}

// --- one operation, one rounding: what bytes of a format depend on --------------------------------------------------
DEVICE float times(float a, float b) { return __fmul_rn(a, b); }
DEVICE float plus(float a, float b) { return __fadd_rn(a, b); }
DEVICE float minus(float a, float b) { return __fsub_rn(a, b); }

// --- arithmetic on pairs --------------------------------------------------------------------------------------------
DEVICE u32 bf16_fma(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
// a - b and a * b: as fused operations with exact constants, which sm_80 has too. A product with -0 keeps its sign.
DEVICE u32 bf16_sub(u32 a, u32 b) { return bf16_fma(b, 0xBF80BF80u, a); }
DEVICE u32 bf16_mul(u32 a, u32 b) { return bf16_fma(a, b, 0x80008000u); }
DEVICE u32 half_fma(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
DEVICE u32 half_sub(u32 a, u32 b) {
  u32 r;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEVICE u32 half_mul(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// --- mathematics ----------------------------------------------------------------------------------------------------
DEVICE float exp2_near(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
DEVICE float log2_near(float x) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
DEVICE float exp_near(float x) { return exp2_near(x * 1.4426950408889634f); }
DEVICE float reciprocal(float x) { return __fdividef(1.0f, x); }
DEVICE float rsqrt_near(float x) { return rsqrtf(x); }
DEVICE float infinity() { return __uint_as_float(0x7F800000u); }

// --- memory ---------------------------------------------------------------------------------------------------------
// Weights and pages: read once, kept out of L1, asked from memory by whole lines.
DEVICE words4 load_once(const void* p) {
  words4 r;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p));
  return r;
}
DEVICE words2 load_once8(const void* p) {
  words2 r;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(p));
  return r;
}
DEVICE u32 load_once4(const void* p) {
  u32 r;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(r) : "l"(p));
  return r;
}
DEVICE u16 load_once2(const void* p) {
  u16 r;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u16 %0, [%1];" : "=h"(r) : "l"(p));
  return r;
}
// Weights that are to be under way before wait_for_earlier: what a compiler takes for constant (ld.global.nc too), it may
// read behind that.
DEVICE words4 load_early(const void* p) {
  words4 r;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p)
               : "memory");
  return r;
}
// Small things that several loads share a line of.
DEVICE u32 load_kept1(const void* p) {
  u16 r;
  asm volatile("ld.global.nc.u8 %0, [%1];" : "=h"(r) : "l"(p));
  return r;
}
DEVICE u32 load_kept2(const void* p) {
  u16 r;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(r) : "l"(p));
  return r;
}
DEVICE u32 load_kept4(const void* p) {
  u32 r;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(r) : "l"(p));
  return r;
}
DEVICE words2 load_kept8(const void* p) {
  words2 r;
  asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(p));
  return r;
}
// What other blocks of this launch wrote, once a fence and a counter say that it is there.
DEVICE words4 load_fresh(const void* p) {
  words4 r;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
  return r;
}
DEVICE float load_fresh_float(const void* p) {
  float r;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(r) : "l"(p));
  return r;
}
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// The word `at` bytes behind the start of dynamic shared memory. A START that is not 0 says where that is, in a kernel that
// has no other shared memory and whose blocks do not come in clusters: it is part of the instruction then, where an
// address in a register costs an addition.
template <int START>
DEVICE u32 load_shared(u32 at) {
  if constexpr (START != 0) {
    u32 r;
    asm volatile("ld.shared.u32 %0, [%1+%2];" : "=r"(r) : "r"(at), "n"(START));
    return r;
  } else {
    return *(const u32*)(dynamic_shared() + at);
  }
}
// 16 bytes to shared memory in the background; nothing is read and zeros are written where `wanted` is false.
DEVICE void copy_async(void* shared, const void* global, bool wanted = true) {
  int bytes = wanted ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes));
}
DEVICE void copy_async8(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(shared)), "l"(global));
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;"); }
// Until at most `pending` of this thread's groups are under way; others' copies need a block_sync as well.
template <int pending>
DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
DEVICE int atomic_add(int* p, int value) { return atomicAdd(p, value); }
DEVICE float atomic_add(float* p, float value) { return atomicAdd(p, value); }
DEVICE void memory_fence() { __threadfence(); }

// --- warps ----------------------------------------------------------------------------------------------------------
template <class T>
DEVICE T shuffle(T x, int lane) {
  return __shfl_sync(0xFFFFFFFFu, x, lane);
}
template <class T>
DEVICE T shuffle_xor(T x, int mask) {
  return __shfl_xor_sync(0xFFFFFFFFu, x, mask);
}
DEVICE u32 warp_ballot(bool x) { return __ballot_sync(0xFFFFFFFFu, x); }
// The largest or the least of the warp's, in every lane.
DEVICE u32 warp_most(u32 x) { return __reduce_max_sync(0xFFFFFFFFu, x); }
DEVICE u32 warp_least(u32 x) { return __reduce_min_sync(0xFFFFFFFFu, x); }
DEVICE int count_bits(u32 x) { return __popc(x); }
DEVICE int first_bit(u32 x) { return __ffs(x) - 1; }

// --- matrix instructions --------------------------------------------------------------------------------------------
DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEVICE void mma_half(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEVICE void mma_int8(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// sm_89 and newer.
DEVICE void mma_fp8(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Four 8 x 8 tiles of 16-bit elements: lane l gives the start of row l % 8 of tile l / 8; r[i] of a lane is row lane / 4,
// columns 2 (lane % 4), +1 of tile i.
DEVICE void load_tiles(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}
// The same, each tile turned over its diagonal.
DEVICE void load_tiles_turned(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

// An 8 x 8 tile of 16-bit elements, held as load_tiles gives it, turned over its diagonal.
DEVICE u32 turn_tile(u32 x) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}

// --- clusters (sm_90 and newer): blocks that run together and read each other's shared memory ------------------------
// Every thread of the cluster's blocks; what was written to shared memory before is seen by all after. Where the compiler
// knows fences of shared memory alone (CUDA 12.8), nobody waits for what was written to global memory.
DEVICE void cluster_sync() {
#if __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208
  asm volatile(
      "fence.release.sync_restrict::shared::cta.cluster;\n"
      "barrier.cluster.arrive.relaxed.aligned;\n barrier.cluster.wait.aligned;\n"
      "fence.acquire.sync_restrict::shared::cluster.cluster;" ::
          : "memory");
#elif __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// The float at the place that `shared` has in this block, in block `rank` of the cluster.
DEVICE float cluster_load(const float* shared, int rank) {
  float r = 0.0f;
#if __CUDA_ARCH__ >= 900
  u32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(shared)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(r) : "r"(remote) : "memory");
#endif
  return r;
}
// The same for 16 bytes, aligned to as many.
DEVICE words4 cluster_load(const words4* shared, int rank) {
  words4 r = {0, 0, 0, 0};
#if __CUDA_ARCH__ >= 900
  u32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(shared)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(remote)
               : "memory");
#endif
  return r;
}

// --- launches that overlap (sm_90; elsewhere both do nothing) -------------------------------------------------------
// What earlier kernels of the stream wrote may be read only after this, if the launch was made to overlap.
// Pointers to that are not `const __restrict__`: what a compiler takes for constant, it may read before, and behind this
// what was to be under way early.
DEVICE void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel may start on multiprocessors that have room.
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

#endif  // DEEPSEEK_TGI_EMULATED

// --- made of the above, the same on both sides ----------------------------------------------------------------------
DEVICE float warp_sum(float x) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) x += shuffle_xor(x, mask);
  return x;
}
DEVICE float warp_max(float x) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) x = fmaxf(x, shuffle_xor(x, mask));
  return x;
}
// Sum over the block, the same in every thread; `scratch` holds 32 floats in shared memory and may be used again after
// the next block_sync. The order of the sum depends on the block's size alone.
DEVICE float block_sum(float x, float* scratch) {
  x = warp_sum(x);
  int warps = (blockDim.x + 31) / 32;
  if (lane_id() == 0) scratch[threadIdx.x / 32] = x;
  block_sync();
  float total = 0.0f;
  for (int i = 0; i < warps; i++) total += scratch[i];
  return total;
}
