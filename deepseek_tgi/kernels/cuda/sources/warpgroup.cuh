// Matrix instructions of a warpgroup, four consecutive warps (sm_90a): D [64, N] += A [64, 16] B [16, N]. Warp w of the
// four holds rows 16 w .. 16 w + 15 of A and D; A is laid out as for mma.m16n8k16, D as N / 8 of its C side by side.
//
// B lies in shared memory as N lines of 64 columns, 128 bytes each, in a place aligned to 1024 bytes; the 16-byte parts
// of line r stand in the order part ^ (r % 8). `matrix_lines` names it from column `16 step` on. Without `add` D's old
// values do not count.
#pragma once
#include "device.cuh"

#ifndef DEEPSEEK_TGI_EMULATED

DEVICE u64 matrix_lines(const void* shared, int step) {
  const u64 swizzle_128 = 1ull << 62, eight_lines = 1024 / 16;
  return swizzle_128 | eight_lines << 32 | 1ull << 16 | ((shared_address(shared) + step * 32) & 0x3FFFF) >> 4;
}
// The same `bytes`, a multiple of 16, further on.
DEVICE u64 lines_on(u64 lines, int bytes) { return lines & ~0xFFFFFFFFull | ((u32)lines + (bytes >> 4)); }
// Before the first product, and after registers of A or D were written by other instructions.
DEVICE void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most `pending` groups are under way: A's registers and B's memory of the others may be written again.
template <int pending>
DEVICE void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// What ordinary stores and copies wrote to shared memory is seen by matrix instructions after the next barrier.
DEVICE void fence_for_matrices() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The 128 threads of warpgroup `which` of the block, from 0.
DEVICE void warpgroup_sync(int which) { asm volatile("bar.sync %0, 128;" ::"r"(which + 1) : "memory"); }
// All four warps: registers of a thread from here on, a multiple of 8; what some give up others may take.
template <int count>
DEVICE void registers_fewer() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
DEVICE void registers_more() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

#define SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_16(d, i) SUMS_4(d, i), SUMS_4(d, i + 4), SUMS_4(d, i + 8), SUMS_4(d, i + 12)
#define SUMS_64(d, i) SUMS_16(d, i), SUMS_16(d, i + 16), SUMS_16(d, i + 32), SUMS_16(d, i + 48)

template <bool add = true>
DEVICE void warpgroup_mma(float (&d)[8], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, %12, %13, 1, 1, 0;"
      : SUMS_4(d, 0), SUMS_4(d, 4)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(add));
}
template <bool add = true>
DEVICE void warpgroup_mma(float (&d)[16], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, %21, 1, 1, 0;"
      : SUMS_16(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(add));
}
template <bool add = true>
DEVICE void warpgroup_mma(float (&d)[32], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, %37, 1, 1, 0;"
      : SUMS_16(d, 0), SUMS_16(d, 16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(add));
}
template <bool add = true>
DEVICE void warpgroup_mma(float (&d)[64], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, %69, 1, 1, 0;"
      : SUMS_64(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(add));
}
template <bool add = true>
DEVICE void warpgroup_mma(float (&d)[128], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "{%128, %129, %130, %131}, %132, %133, 1, 1, 0;"
      : SUMS_64(d, 0), SUMS_64(d, 64)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(add));
}

#endif  // DEEPSEEK_TGI_EMULATED
