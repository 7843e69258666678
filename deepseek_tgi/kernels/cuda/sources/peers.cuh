// What GPUs write into each other's memory, and words that a GPU shares with the host.
#pragma once
#include "device.cuh"

// Two words of which each is there whole or not at all; nothing orders one before the other.
struct __align__(16) packet {
  u64 first, second;
};

#ifdef DEEPSEEK_TGI_EMULATED
#include "peers.h"
#else

// Looks at memory between two at the clock and at words of the host, which are far away.
constexpr int PATIENCE = 4096;

DEVICE void store_packet(void* p, packet x) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(p), "l"(x.first), "l"(x.second) : "memory");
}
DEVICE packet load_packet(const void* p) {
  packet r;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(r.first), "=l"(r.second) : "l"(p) : "memory");
  return r;
}
// Of memory that the host and its GPUs see.
DEVICE void store_word(void* p, u32 x) { asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory"); }
DEVICE u32 load_word(const void* p) {
  u32 r;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
}
// Whoever reads this word by `load_acquire` sees what this thread wrote before, and what others wrote before a block_sync
// that it went through.
DEVICE void store_release(void* p, u32 x) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
DEVICE u32 load_acquire(const void* p) {
  u32 r;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
}
// Of a clock that all blocks see.
DEVICE u64 nanoseconds() {
  u64 r;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(r));
  return r;
}
// What is waited for may need the processor that waits.
DEVICE void let_others_run() {}

#endif  // DEEPSEEK_TGI_EMULATED
