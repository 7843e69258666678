// Copies to shared memory in the background that one thread asks for, and signals that tell when they are there (sm_90).
#pragma once
#include "device.cuh"

#ifdef DEEPSEEK_TGI_EMULATED
#include "copy_engine.h"
#else

// Of a tile_map among a kernel's parameters.
#define IN_PARAMETERS const __grid_constant__

// Signals: counts of arrivals and of copied bytes, in shared memory.
// After a block_sync each `arrivals` arrivals, and the bytes expected, end a phase; phases have parities 0, 1, 0, ...
DEVICE void signal_init(u64* signal, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(signal)), "r"(arrivals) : "memory");
}
// What this thread read and wrote before is done for whoever waited for the phase.
DEVICE void signal_arrive(u64* signal) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(signal)) : "memory");
}
// The signal at that place in block `rank` of the cluster, where this block's writes do not count: what it read is done
// with.
DEVICE void signal_arrive_at(u64* signal, int rank) {
  asm volatile(
      "{ .reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(shared_address(signal)),
      "r"(rank)
      : "memory");
}
// The same as signal_arrive, and so many bytes are to be copied.
DEVICE void signal_arrive_expecting(u64* signal, int bytes) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(shared_address(signal)),
               "r"(bytes)
               : "memory");
}
// Until the phase of that parity has ended; a phase is waited for before the next one ends. None has ended at first:
// parity 1 does not wait.
DEVICE void signal_wait(u64* signal, int parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(shared_address(signal)),
      "r"(parity)
      : "memory");
}
// After signals were made: the copy engine sees them.
DEVICE void signals_made() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// The copy engine: one thread asks, `signal` is told the bytes.
// A tensor as the driver describes it: `Tiles` of kernels/cuda/program.py.
struct __align__(64) tile_map {
  u64 opaque[16];
};
// The map itself will be read soon.
DEVICE void expect_boxes(const tile_map& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// The box that begins there, to a place aligned to 128 bytes, of 16-bit elements to 1024. What lies outside the tensor
// becomes zeros and counts as copied.
DEVICE void copy_tile(void* shared, const tile_map& map, int line, int column, u64* signal) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(shared)),
      "l"(&map), "r"(column), "r"(line), "r"(shared_address(signal))
      : "memory");
}
// The same to the same place in several blocks of the cluster, bit r of `blocks` is block r; each one's own signal is told.
DEVICE void copy_tile_to(void* shared, const tile_map& map, int line, int column, u64* signal, int blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], "
      "[%4], %5;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(column), "r"(line), "r"(shared_address(signal)), "h"((u16)blocks)
      : "memory");
}
DEVICE void copy_box(void* shared, const tile_map& map, int first, int second, int third, u64* signal) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
          shared_address(shared)),
      "l"(&map), "r"(third), "r"(second), "r"(first), "r"(shared_address(signal))
      : "memory");
}

#endif  // DEEPSEEK_TGI_EMULATED
