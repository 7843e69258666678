// Twins of copy_engine.cuh: copies are made at once, and tell their signal.
#pragma once

// A signal: arrivals that end a phase, those still missing, the parity of the phase under way, bytes still to come.
struct Signal {
  u8 arrivals, missing;
  u16 parity;
  int bytes;
};
static_assert(sizeof(Signal) == sizeof(u64));
static inline void signal_init(u64* signal, int arrivals) {
  Signal s{u8(arrivals), u8(arrivals), 0, 0};
  memcpy(signal, &s, sizeof s);
}
static inline void signal_change(u64* signal, int arrivals, int bytes) {
  Signal s;
  memcpy(&s, signal, sizeof s);
  if (s.missing < arrivals) emulation::fail("a signal that was not made, or has too many arrivals");
  s.missing -= arrivals, s.bytes += bytes;
  if (s.missing == 0 && s.bytes == 0) s.missing = s.arrivals, s.parity ^= 1;
  memcpy(signal, &s, sizeof s);
  emulation::cluster.progress++;
}
static inline void signal_arrive(u64* signal) { signal_change(signal, 1, 0); }
// `act` as block `rank` of the cluster would, with its own memory at that place.
template <class Act>
static inline void in_block(void* shared, int rank, Act act) {
  using namespace emulation;
  if (unsigned(rank) >= cluster.size) fail("a cluster has no such block");
  Block* self = block;
  const auto at = static_cast<u8*>(shared) - self->memory;
  block = &cluster.blocks[rank];
  act(block->memory + at);
  block = self;
}
static inline void signal_arrive_at(u64* signal, int rank) {
  in_block(signal, rank, [](u8* there) { signal_arrive(reinterpret_cast<u64*>(there)); });
}
static inline void signal_arrive_expecting(u64* signal, int bytes) { signal_change(signal, 1, bytes); }
static inline void signal_wait(u64* signal, int parity) {
  Signal s;
  while (memcpy(&s, signal, sizeof s), s.parity == parity) emulation::yield();
}
static inline void signals_made() {}

#define IN_PARAMETERS const
// What tests say of a tensor: where it is, bytes of an element, and for each of three axes, the last one dense, its
// length, the bytes from one to the next, and the length of a box.
struct tile_map {
  u64 base, item, size[3], stride[3], box[3], unused[5];
};
static inline void copy_box(void* shared, const tile_map& map, int first, int second, int third, u64* signal) {
  auto* to = static_cast<u8*>(shared);
  const u64 line = map.box[2] * map.item, from[3] = {u64(first), u64(second), u64(third)};
  if ((to - emulation::block->memory) % (map.item == 2 ? 1024 : 128)) emulation::fail("a box is not aligned");
  if (line % 16 || (map.item == 2 && line != 128)) emulation::fail("a box has no such width");
  for (u64 i = 0; i < map.box[0] * map.box[1]; i++)
    for (u64 c = 0; c < map.box[2]; c++) {
      const u64 at[3] = {from[0] + i / map.box[1], from[1] + i % map.box[1], from[2] + c};
      u8 value[8] = {};
      if (at[0] < map.size[0] && at[1] < map.size[1] && at[2] < map.size[2])
        memcpy(value, reinterpret_cast<const u8*>(map.base) + at[0] * map.stride[0] + at[1] * map.stride[1] + at[2] * map.item, map.item);
      u64 byte = c * map.item;
      if (map.item == 2) byte ^= i % 8 * 16;
      memcpy(to + i * line + byte, value, map.item);
    }
  signal_change(signal, 0, -int(map.box[0] * map.box[1] * line));
}
static inline void copy_tile(void* shared, const tile_map& map, int line, int column, u64* signal) {
  copy_box(shared, map, 0, line, column, signal);
}
static inline void copy_tile_to(void* shared, const tile_map& map, int line, int column, u64* signal, int blocks) {
  const auto apart = static_cast<u8*>(shared) - reinterpret_cast<u8*>(signal);
  for (int rank = 0; blocks >> rank; rank++)
    if (blocks >> rank & 1)
      in_block(signal, rank, [&](u8* there) { copy_tile(there + apart, map, line, column, reinterpret_cast<u64*>(there)); });
}
static inline void expect_boxes(const tile_map&) {}
