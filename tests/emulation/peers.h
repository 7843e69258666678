// Twins of peers.cuh for ranks that are processes which share memory.
#pragma once

#include <sched.h>
#include <time.h>

constexpr int PATIENCE = 16;

static inline void store_packet(void* p, packet x) {
  auto* words = static_cast<u64*>(p);
  if (reinterpret_cast<uintptr_t>(p) % sizeof x) emulation::fail("a packet is not aligned");
  __atomic_store_n(words, x.first, __ATOMIC_RELAXED);
  __atomic_store_n(words + 1, x.second, __ATOMIC_RELAXED);
}
static inline packet load_packet(const void* p) {
  const auto* words = static_cast<const u64*>(p);
  if (reinterpret_cast<uintptr_t>(p) % sizeof(packet)) emulation::fail("a packet is not aligned");
  return {__atomic_load_n(words, __ATOMIC_RELAXED), __atomic_load_n(words + 1, __ATOMIC_RELAXED)};
}
static inline void store_word(void* p, u32 x) { __atomic_store_n(static_cast<u32*>(p), x, __ATOMIC_RELAXED); }
static inline u32 load_word(const void* p) { return __atomic_load_n(static_cast<const u32*>(p), __ATOMIC_RELAXED); }
static inline void store_release(void* p, u32 x) { __atomic_store_n(static_cast<u32*>(p), x, __ATOMIC_RELEASE); }
static inline u32 load_acquire(const void* p) { return __atomic_load_n(static_cast<const u32*>(p), __ATOMIC_ACQUIRE); }
static inline u64 nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return u64(now.tv_sec) * 1000000000 + u64(now.tv_nsec);
}
static inline void let_others_run() { sched_yield(); }
