// Matrix instructions of a warpgroup, four consecutive warps (sm_90a), as latent attention uses them:
// D [64, N] += A [64, 16] B [16, N]; warp w holds rows 16 w .. 16 w + 15 of D, as N / 8 of mma.m16n8k16's C side by side.
//
// Operands in shared memory are tables of lines of 64 elements (128 bytes), at a multiple of 1024 bytes, the 16-byte
// parts of line r in the order part ^ (r % 8). A table serves both ways: as rows whose elements are summed over
// (`along`), or as rows that are summed over (`across`), tables of further columns lying `TABLE` bytes on.
#pragma once
#include "device.cuh"

#ifdef DEEPSEEK_TGI_EMULATED
#include "latent_matrices.h"
#else

constexpr u64 SWIZZLED = 1ull << 62, EIGHT_LINES = 1024 / 16;

DEVICE u64 place_of(const void* shared) { return (shared_address(shared) & 0x3FFFF) >> 4; }
// From column 16 `step` on.
DEVICE u64 along(const void* table, int step) {
  return SWIZZLED | EIGHT_LINES << 32 | 1ull << 16 | (place_of(table) + 2 * step);
}
// From line 16 `step` on.
template <int table_bytes>
DEVICE u64 across(const void* table, int step) {
  return SWIZZLED | EIGHT_LINES << 32 | (u64)(table_bytes / 16) << 16 | (place_of(table) + 128 * step);
}

// Before the first product, and after registers of A or D were written by other instructions.
DEVICE void matrices_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void matrices_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
DEVICE void matrices_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// What this thread wrote to shared memory is seen by matrix instructions after the next barrier.
DEVICE void show_to_matrices() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int count>
DEVICE void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
DEVICE void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

#define SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_16(d, i) SUMS_4(d, i), SUMS_4(d, i + 4), SUMS_4(d, i + 8), SUMS_4(d, i + 12)
#define SUMS_64(d, i) SUMS_16(d, i), SUMS_16(d, i + 16), SUMS_16(d, i + 32), SUMS_16(d, i + 48)

// N = 32, both operands along lines; D begins anew unless `adds`.
#define MULTIPLY_ALONG(type)                                                                                         \
  asm volatile(                                                                                                      \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"                                                                    \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " "                                                 \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, 0, 0;\n}"           \
      : SUMS_16(d, 0)                                                                                                \
      : "l"(a), "l"(b), "r"((int)adds))
template <bool half>
DEVICE void multiply_along(float (&d)[16], u64 a, u64 b, bool adds) {
  if (half) {
    MULTIPLY_ALONG("f16");
  } else {
    MULTIPLY_ALONG("bf16");
  }
}

// N = 256, A in registers as mma.m16n8k16's, B across lines.
#define MULTIPLY_ACROSS(type)                                                                                        \
  asm volatile(                                                                                                      \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " "                                                \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                       \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                              \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                              \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                              \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                              \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                              \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "                  \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "             \
      "{%128, %129, %130, %131}, %132, 1, 1, 1, 1;"                                                                   \
      : SUMS_64(d, 0), SUMS_64(d, 64)                                                                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
template <bool half>
DEVICE void multiply_across(float (&d)[128], const u32 (&a)[4], u64 b) {
  if (half) {
    MULTIPLY_ACROSS("f16");
  } else {
    MULTIPLY_ACROSS("bf16");
  }
}

#endif  // DEEPSEEK_TGI_EMULATED
