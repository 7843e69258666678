// Twins of device.cuh's primitives in plain C++, and the machine that runs kernels with them: a thread is a fiber, the
// threads of a block take turns, blocks run one after the other. Slow and exact about what matters: who waits for whom,
// what fragments mean, when background copies become visible. What it does not show: races between threads that a
// barrier should separate (fibers switch at collectives only), timing, alignment faults of vector loads (asserted where
// it can).
#pragma once

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)
#define __shared__ static
#define __constant__ static const
#define __noinline__
#define DEVICE static inline
#define DEVICE_IN_CLASS inline

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

namespace emulation {

constexpr int WARP = 32;
constexpr size_t STACK_BYTES = 256 << 10;
constexpr size_t SHARED_BYTES = 232448;
constexpr unsigned MAX_CLUSTER = 8;

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "emulation: %s\n", what);
  abort();
}

// --- fibers -----------------------------------------------------------------------------------------------------
extern "C" void emulation_switch(void** save, void* load);
asm(R"(
.text
.type emulation_switch,@function
emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

struct Copy {
  void* to;
  const void* from;
  bool wanted;
  int bytes;
};

struct Collective {
  int arrived = 0, generation = 0;
  const void* kind = nullptr;
  void (*finish)(Collective&, int) = nullptr;
  alignas(16) unsigned char in[WARP][64];
  alignas(16) unsigned char out[WARP][64];
};

struct Fiber {
  void* stack_pointer = nullptr;
  std::vector<unsigned char> stack;
  dim3 thread;
  int index = 0;
  bool done = false;
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open;
};

// A barrier with a number.
struct Gate {
  int arrived = 0, generation = 0;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Collective> warps;
  std::vector<int> live_in_warp;
  int live = 0, at_barrier = 0, barrier_generation = 0;
  int at_group[8] = {}, group_generation[8] = {};
  Gate gates[16];
  dim3 at;
  unsigned char* memory = nullptr;
  void* scheduler = nullptr;
  Fiber* current = nullptr;
  void (*body)(void*) = nullptr;
  void* argument = nullptr;
};

// Blocks that run together; alone, a block is a cluster of one.
struct Cluster {
  Block* blocks = nullptr;
  unsigned size = 0;
  int live = 0, at_barrier = 0, barrier_generation = 0;
  long progress = 0;
};

inline Block* block;
inline Cluster cluster;
alignas(128) inline unsigned char dynamic_memory[SHARED_BYTES];

}  // namespace emulation

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

inline void yield() {
  Fiber* self = block->current;
  emulation_switch(&self->stack_pointer, block->scheduler);
  threadIdx = self->thread;
}

inline void finish_warp(Collective& c, int live) {
  c.finish(c, live);
  c.arrived = 0;
  c.generation++;
  cluster.progress++;
}

inline void release_cluster() {
  cluster.at_barrier = 0;
  cluster.barrier_generation++;
  cluster.progress++;
}

inline void release_barrier() {
  block->at_barrier = 0;
  block->barrier_generation++;
  cluster.progress++;
}

// Every live lane of the warp brings `in` and leaves with `out`; `finish` works on all of them.
template <class In, class Out>
inline Out collective(const void* kind, const In& in, void (*finish)(Collective&, int)) {
  static_assert(sizeof(In) <= 64 && sizeof(Out) <= 64);
  Fiber* self = block->current;
  int warp = self->index / WARP, lane = self->index % WARP;
  Collective& c = block->warps[warp];
  if (c.arrived == 0) {
    c.kind = kind;
    c.finish = finish;
  } else if (c.kind != kind) {
    fail("lanes of one warp are at different collectives: divergent code");
  }
  memcpy(c.in[lane], &in, sizeof(In));
  int generation = c.generation;
  if (++c.arrived == block->live_in_warp[warp]) {
    finish_warp(c, block->live_in_warp[warp]);
  } else {
    while (c.generation == generation) yield();
  }
  Out out;
  memcpy(&out, c.out[lane], sizeof(Out));
  return out;
}

inline void on_exit(Fiber* self) {
  int warp = self->index / WARP;
  self->done = true;
  block->live--;
  cluster.live--;
  block->live_in_warp[warp]--;
  cluster.progress++;
  Collective& c = block->warps[warp];
  if (c.arrived && c.arrived == block->live_in_warp[warp]) finish_warp(c, block->live_in_warp[warp]);
  if (block->at_barrier && block->at_barrier == block->live) release_barrier();
  if (cluster.at_barrier && cluster.at_barrier == cluster.live) release_cluster();
}

inline void fiber_main() {
  threadIdx = block->current->thread;
  block->body(block->argument);
  on_exit(block->current);
  while (true) emulation_switch(&block->current->stack_pointer, block->scheduler);
}

inline void prepare(Fiber& fiber) {
  fiber.stack.resize(STACK_BYTES);
  auto top = reinterpret_cast<uintptr_t>(fiber.stack.data() + STACK_BYTES) & ~uintptr_t(63);
  auto* frame = reinterpret_cast<uintptr_t*>(top) - 8;
  // six saved registers, then the return address; the stack is where a call would have left it
  for (int i = 0; i < 6; i++) frame[i] = 0;
  frame[6] = reinterpret_cast<uintptr_t>(&fiber_main);
  frame[7] = 0;
  fiber.stack_pointer = frame;
}

inline void start_block(Block& b, dim3 at, unsigned char* memory) {
  unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  b.at = at;
  b.memory = memory;
  b.fibers.resize(threads);
  b.warps.assign((threads + WARP - 1) / WARP, Collective());
  b.live_in_warp.assign(b.warps.size(), 0);
  b.live = int(threads);
  b.at_barrier = 0;
  memset(memory, 0xFF, SHARED_BYTES);  // NaN in every float format: unwritten memory shows
  for (unsigned i = 0; i < threads; i++) {
    Fiber& fiber = b.fibers[i];
    fiber.thread = dim3{i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
    fiber.index = int(i);
    fiber.done = false;
    fiber.groups.clear();
    fiber.open.clear();
    b.live_in_warp[i / WARP]++;
    prepare(fiber);
  }
}

// Blocks `at`, `at` + 1, ... along the second axis, which take turns like the threads of one block.
inline void run_cluster(dim3 at, unsigned size, void (*body)(void*), void* argument) {
  static std::vector<Block> blocks(MAX_CLUSTER);
  static std::vector<unsigned char> others((MAX_CLUSTER - 1) * SHARED_BYTES + 128);
  unsigned char* more = others.data() + 127 - (reinterpret_cast<uintptr_t>(others.data()) + 127) % 128;
  cluster = Cluster{blocks.data(), size};
  for (unsigned i = 0; i < size; i++) {
    start_block(blocks[i], dim3{at.x, at.y + i, at.z}, i ? more + (i - 1) * SHARED_BYTES : dynamic_memory);
    blocks[i].body = body;
    blocks[i].argument = argument;
    cluster.live += blocks[i].live;
  }
  while (cluster.live) {
    long before = cluster.progress;
    for (unsigned i = 0; i < size; i++)
      for (auto& fiber : blocks[i].fibers) {
        if (fiber.done) continue;
        block = &blocks[i];
        blockIdx = block->at;
        block->current = &fiber;
        emulation_switch(&block->scheduler, fiber.stack_pointer);
      }
    if (cluster.live && cluster.progress == before) fail("deadlock: every thread waits");
  }
}

template <class... A, size_t... I>
inline void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_reference_t<A>*>(arguments[I])...);
}

template <class... A>
struct Launch {
  void (*kernel)(A...);
  void** arguments;
  static void body(void* self) {
    auto* launch = static_cast<Launch*>(self);
    call(launch->kernel, launch->arguments, std::index_sequence_for<A...>());
  }
};

template <class... A>
inline int run(void (*kernel)(A...), const unsigned* grid, const unsigned* block_shape, void** arguments, int count,
               unsigned cluster_size = 1) {
  if (count != int(sizeof...(A))) return int(sizeof...(A));
  const bool backwards = getenv("EMULATED_BLOCKS_BACKWARDS") != nullptr;  // no order is promised
  if (grid[1] % cluster_size || cluster_size > MAX_CLUSTER) fail("the grid is not made of whole clusters");
  Launch<A...> launch{kernel, arguments};
  gridDim = dim3{grid[0], grid[1], grid[2]};
  blockDim = dim3{block_shape[0], block_shape[1], block_shape[2]};
  for (unsigned z = 0; z < grid[2]; z++)
    for (unsigned y = 0; y < grid[1]; y += cluster_size)
      for (unsigned i = 0; i < grid[0]; i++) {
        const unsigned x = backwards ? grid[0] - 1 - i : i;
        run_cluster(dim3{x, y, z}, cluster_size, &Launch<A...>::body, &launch);
      }
  return -1;
}

}  // namespace emulation

#define EXPORT_CLUSTER(name, size)                                                                                   \
  extern "C" int emulate_##name(const unsigned* grid, const unsigned* block, void** arguments, int count) {          \
    return emulation::run(&name, grid, block, arguments, count, size);                                               \
  }
#define EXPORT(name) EXPORT_CLUSTER(name, 1)

static inline int lane_id() { return int(threadIdx.x & 31); }
static inline void block_sync() {
  using namespace emulation;
  int generation = block->barrier_generation;
  if (++block->at_barrier == block->live) {
    release_barrier();
  } else {
    while (block->barrier_generation == generation) yield();
  }
}
static inline int gate_arrive(int number, int threads) {
  auto& gate = emulation::block->gates[number];
  int generation = gate.generation;
  if (++gate.arrived == threads) {
    gate.arrived = 0;
    gate.generation++;
    emulation::cluster.progress++;
  }
  return generation;
}
static inline void gate_wait(int number, int threads) {
  int generation = gate_arrive(number, threads);
  while (emulation::block->gates[number].generation == generation) emulation::yield();
}
static inline void warp_sync() {
  static const char kind = 0;
  emulation::collective<int, int>(&kind, 0, [](emulation::Collective&, int) {});
}
static inline void cluster_sync() {
  using namespace emulation;
  int generation = cluster.barrier_generation;
  if (++cluster.at_barrier == cluster.live) {
    release_cluster();
  } else {
    while (cluster.barrier_generation == generation) yield();
  }
}
static inline u8* dynamic_shared() { return emulation::block->memory; }
template <int START>
static inline u32 load_shared(u32 at) {
  return *(const u32*)(emulation::block->memory + at);
}
template <class T>
static inline T cluster_load(const T* shared, int rank) {
  using namespace emulation;
  const auto* at = reinterpret_cast<const unsigned char*>(shared);
  if (at < block->memory || at >= block->memory + SHARED_BYTES || unsigned(rank) >= cluster.size)
    fail("a cluster has no such place");
  T r;
  memcpy(&r, cluster.blocks[rank].memory + (at - block->memory), sizeof r);
  return r;
}

static inline u32 float_bits(float x) {
  u32 r;
  memcpy(&r, &x, 4);
  return r;
}
static inline float bits_float(u32 x) {
  float r;
  memcpy(&r, &x, 4);
  return r;
}
template <int table>
static inline u32 lop3(u32 a, u32 b, u32 c) {
  u32 r = 0;
  for (int i = 0; i < 32; i++) {
    int at = int((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1));
    r |= u32(table >> at & 1) << i;
  }
  return r;
}
static inline u32 permute_bytes(u32 a, u32 b, u32 selector) {
  u64 all = u64(b) << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) {
    u32 pick = selector >> (4 * i) & 15;
    u32 byte = u32(all >> (8 * (pick & 7))) & 0xFF;
    if (pick & 8) byte = byte & 0x80 ? 0xFF : 0;
    r |= byte << (8 * i);
  }
  return r;
}

static inline float bf16_float(u16 x) { return bits_float(u32(x) << 16); }
static inline float bf16_low(u32 pair) { return bits_float(pair << 16); }
static inline float bf16_high(u32 pair) { return bits_float(pair & 0xFFFF0000u); }
static inline u16 float_bf16(float x) {
  u32 bits = float_bits(x);
  if (std::isnan(x)) return 0x7FFF;
  return u16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
static inline u32 bf16_pair(float low, float high) { return u32(float_bf16(high)) << 16 | float_bf16(low); }
static inline float half_float(u16 x) {
  _Float16 h;
  memcpy(&h, &x, 2);
  return float(h);
}
static inline float half_low(u32 pair) { return half_float(u16(pair)); }
static inline float half_high(u32 pair) { return half_float(u16(pair >> 16)); }
static inline u16 float_half(float x) {
  _Float16 h = _Float16(x);
  u16 r;
  memcpy(&r, &h, 2);
  return r;
}
static inline u32 half_pair(float low, float high) { return u32(float_half(high)) << 16 | float_half(low); }
static inline float fp8_float(u8 x) {
  int exponent = x >> 3 & 15, mantissa = x & 7;
  float value = exponent ? std::ldexp(1.0f + float(mantissa) / 8, exponent - 7) : std::ldexp(float(mantissa), -9);
  if ((x & 0x7F) == 0x7F) value = NAN;
  return x & 0x80 ? -value : value;
}
static inline u8 float_fp8(float x) {
  if (std::isnan(x)) return 0x7F;
  u8 sign = std::signbit(x) ? 0x80 : 0, best = 0;
  float magnitude = std::fmin(std::fabs(x), 448.0f), least = INFINITY;
  for (int code = 0; code < 0x7F; code++) {  // ties go to the even code, which is the even mantissa
    float distance = std::fabs(fp8_float(u8(code)) - magnitude);
    if (distance < least || (distance == least && code % 2 == 0)) least = distance, best = u8(code);
  }
  return sign | best;
}
static inline u32 fp8_halves(u16 pair) { return half_pair(fp8_float(u8(pair)), fp8_float(u8(pair >> 8))); }
static inline u16 fp8_pair(float low, float high) { return u16(float_fp8(high) << 8 | float_fp8(low)); }

static inline u16 half_towards(float x, bool up) {
  u16 r = float_half(x);
  if (up ? half_float(r) >= x : half_float(r) <= x) return r;
  if ((r & 0x7FFF) == 0) return up ? 0x0001 : 0x8001;
  bool away = ((r & 0x8000) != 0) != up;
  return u16(away ? r + 1 : r - 1);
}
static inline u16 half_above(float x) { return half_towards(x, true); }
static inline u16 half_below(float x) { return half_towards(x, false); }
static inline float times(float a, float b) { return a * b; }
static inline float plus(float a, float b) { return a + b; }
static inline float minus(float a, float b) { return a - b; }

static inline u32 bf16_fma(u32 a, u32 b, u32 c) {
  return bf16_pair(float(double(bf16_low(a)) * bf16_low(b) + bf16_low(c)),
                   float(double(bf16_high(a)) * bf16_high(b) + bf16_high(c)));
}
static inline u32 bf16_sub(u32 a, u32 b) { return bf16_fma(b, 0xBF80BF80u, a); }
static inline u32 bf16_mul(u32 a, u32 b) { return bf16_fma(a, b, 0x80008000u); }
static inline u32 half_fma(u32 a, u32 b, u32 c) {
  return half_pair(float(double(half_low(a)) * half_low(b) + half_low(c)),
                   float(double(half_high(a)) * half_high(b) + half_high(c)));
}
static inline u32 half_sub(u32 a, u32 b) { return half_pair(half_low(a) - half_low(b), half_high(a) - half_high(b)); }
static inline u32 half_mul(u32 a, u32 b) { return half_pair(half_low(a) * half_low(b), half_high(a) * half_high(b)); }

static inline float exp2_near(float x) { return exp2f(x); }
static inline float log2_near(float x) { return log2f(x); }
static inline float exp_near(float x) { return exp2_near(x * 1.4426950408889634f); }
static inline float reciprocal(float x) { return 1.0f / x; }
static inline float rsqrt_near(float x) { return 1.0f / sqrtf(x); }
static inline float infinity() { return INFINITY; }
static inline float __fdividef(float a, float b) { return a / b; }

template <class T>
static inline T load_aligned(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T)) emulation::fail("a vector load is not aligned");
  T r;
  memcpy(&r, p, sizeof r);
  return r;
}
static inline words4 load_once(const void* p) { return load_aligned<words4>(p); }
static inline words2 load_once8(const void* p) { return load_aligned<words2>(p); }
static inline u32 load_once4(const void* p) { return load_aligned<u32>(p); }
static inline u16 load_once2(const void* p) { return load_aligned<u16>(p); }
static inline words4 load_early(const void* p) { return load_aligned<words4>(p); }
static inline u32 load_kept1(const void* p) { return load_aligned<u8>(p); }
static inline u32 load_kept2(const void* p) { return load_aligned<u16>(p); }
static inline u32 load_kept4(const void* p) { return load_aligned<u32>(p); }
static inline words2 load_kept8(const void* p) { return load_aligned<words2>(p); }
static inline words4 load_fresh(const void* p) { return load_aligned<words4>(p); }
static inline float load_fresh_float(const void* p) { return load_aligned<float>(p); }
static inline void copy_async(void* shared, const void* global, bool wanted = true) {
  if (reinterpret_cast<uintptr_t>(shared) % 16 || (wanted && reinterpret_cast<uintptr_t>(global) % 16))
    emulation::fail("a background copy is not aligned to 16 bytes");
  emulation::block->current->open.push_back({shared, global, wanted, 16});
}
static inline void copy_async8(void* shared, const void* global) {
  if (reinterpret_cast<uintptr_t>(shared) % 8 || reinterpret_cast<uintptr_t>(global) % 8)
    emulation::fail("a background copy is not aligned to 8 bytes");
  emulation::block->current->open.push_back({shared, global, true, 8});
}
static inline void copy_commit() {
  auto* self = emulation::block->current;
  self->groups.push_back(std::move(self->open));
  self->open.clear();
}
template <int pending>
static inline void copy_wait() {
  auto& groups = emulation::block->current->groups;
  while (groups.size() > size_t(pending)) {
    for (auto& copy : groups.front()) {
      if (copy.wanted) {
        memcpy(copy.to, copy.from, copy.bytes);
      } else {
        memset(copy.to, 0, 16);
      }
    }
    groups.erase(groups.begin());
  }
}
static inline int atomic_add(int* p, int value) {
  int old = *p;
  *p += value;
  return old;
}
static inline float atomic_add(float* p, float value) {
  float old = *p;
  *p += value;
  return old;
}
static inline void memory_fence() {}

template <class T>
struct Shuffled {
  T value;
  int lane;
};
template <class T>
static inline T shuffle(T x, int lane) {
  static const char kind = 0;
  return emulation::collective<Shuffled<T>, T>(&kind, {x, lane}, [](emulation::Collective& c, int) {
    for (int i = 0; i < emulation::WARP; i++) {
      Shuffled<T> own, other;
      memcpy(&own, c.in[i], sizeof own);
      memcpy(&other, c.in[own.lane & 31], sizeof other);
      memcpy(c.out[i], &other.value, sizeof(T));
    }
  });
}
template <class T>
static inline T shuffle_xor(T x, int mask) {
  return shuffle(x, lane_id() ^ mask);
}
static inline u32 warp_ballot(bool x) {
  static const char kind = 0;
  int warp = emulation::block->current->index / emulation::WARP;
  (void)warp;
  return emulation::collective<u32, u32>(&kind, x, [](emulation::Collective& c, int live) {
    u32 bits = 0, own;
    for (int i = 0; i < live; i++) {
      memcpy(&own, c.in[i], 4);
      bits |= own << i;
    }
    for (int i = 0; i < emulation::WARP; i++) memcpy(c.out[i], &bits, 4);
  });
}
static inline u32 warp_most(u32 x) {
  for (int mask = 16; mask; mask >>= 1) x = std::max(x, shuffle_xor(x, mask));
  return x;
}
static inline u32 warp_least(u32 x) { return ~warp_most(~x); }
static inline int count_bits(u32 x) { return __builtin_popcount(x); }
static inline int first_bit(u32 x) { return __builtin_ffs(int(x)) - 1; }

struct Fragments {
  u32 a[4], b[2], c[4];
};
struct Sums {
  u32 c[4];
};

// D = A B + C of one warp; an element of A or B is the `of`-th of the `per` in a register.
template <int per, class Sum, class Element>
static inline void multiply_fragments(emulation::Collective& c, Element element) {
  Fragments f[emulation::WARP];
  for (int lane = 0; lane < emulation::WARP; lane++) memcpy(&f[lane], c.in[lane], sizeof(Fragments));
  constexpr int depth = 8 * per, half = depth / 2;
  auto at = [&](bool is_a, int line, int k) {
    int lane = line % 8 * 4 + k % half / per;
    int reg = is_a ? (line / 8) + 2 * (k / half) : k / half;
    return element(is_a ? f[lane].a[reg] : f[lane].b[reg], k % per);
  };
  for (int row = 0; row < 16; row++)
    for (int column = 0; column < 8; column++) {
      int lane = row % 8 * 4 + column / 2, reg = row / 8 * 2 + column % 2;
      Sum sum;
      memcpy(&sum, &f[lane].c[reg], 4);
      double total = double(sum);
      for (int k = 0; k < depth; k++) total += double(at(true, row, k)) * double(at(false, column, k));
      sum = Sum(total);
      memcpy(c.out[lane] + 4 * reg, &sum, 4);
    }
}
template <class Sum>
static inline void mma_collective(const void* kind, Sum (&c)[4], const u32 (&a)[4], const u32 (&b)[2],
                                  void (*finish)(emulation::Collective&, int)) {
  Fragments in;
  memcpy(in.a, a, 16);
  memcpy(in.b, b, 8);
  memcpy(in.c, c, 16);
  Sums out = emulation::collective<Fragments, Sums>(kind, in, finish);
  memcpy(c, out.c, 16);
}
static inline void mma_bf16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  static const char kind = 0;
  mma_collective(&kind, c, a, b, [](emulation::Collective& w, int) {
    multiply_fragments<2, float>(w, [](u32 r, int i) { return i ? bf16_high(r) : bf16_low(r); });
  });
}
static inline void mma_half(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  static const char kind = 0;
  mma_collective(&kind, c, a, b, [](emulation::Collective& w, int) {
    multiply_fragments<2, float>(w, [](u32 r, int i) { return i ? half_high(r) : half_low(r); });
  });
}
static inline void mma_int8(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  static const char kind = 0;
  mma_collective(&kind, c, a, b, [](emulation::Collective& w, int) {
    multiply_fragments<4, int>(w, [](u32 r, int i) { return int(i8(r >> (8 * i))); });
  });
}
static inline void mma_fp8(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  static const char kind = 0;
  mma_collective(&kind, c, a, b, [](emulation::Collective& w, int) {
    multiply_fragments<4, float>(w, [](u32 r, int i) { return fp8_float(u8(r >> (8 * i))); });
  });
}

static inline void read_tiles(emulation::Collective& c, bool turned) {
  u16 tiles[4][8][8];
  for (int lane = 0; lane < emulation::WARP; lane++) {
    const void* row;
    memcpy(&row, c.in[lane], sizeof row);
    if (reinterpret_cast<uintptr_t>(row) % 16) emulation::fail("a row of a tile is not aligned to 16 bytes");
    memcpy(tiles[lane / 8][lane % 8], row, 16);
  }
  for (int lane = 0; lane < emulation::WARP; lane++)
    for (int i = 0; i < 4; i++) {
      int line = lane / 4, at = lane % 4 * 2;
      u16 low = turned ? tiles[i][at][line] : tiles[i][line][at];
      u16 high = turned ? tiles[i][at + 1][line] : tiles[i][line][at + 1];
      u32 pair = u32(high) << 16 | low;
      memcpy(c.out[lane] + 4 * i, &pair, 4);
    }
}
static inline void load_tiles(u32 (&r)[4], const void* row) {
  static const char kind = 0;
  Sums out = emulation::collective<const void*, Sums>(
      &kind, row, [](emulation::Collective& c, int) { read_tiles(c, false); });
  memcpy(r, out.c, 16);
}
static inline void load_tiles_turned(u32 (&r)[4], const void* row) {
  static const char kind = 0;
  Sums out = emulation::collective<const void*, Sums>(
      &kind, row, [](emulation::Collective& c, int) { read_tiles(c, true); });
  memcpy(r, out.c, 16);
}

static inline u32 turn_tile(u32 x) {
  static const char kind = 0;
  return emulation::collective<u32, u32>(&kind, x, [](emulation::Collective& c, int) {
    u16 tile[8][8];
    for (int lane = 0; lane < emulation::WARP; lane++) memcpy(&tile[lane / 4][lane % 4 * 2], c.in[lane], 4);
    for (int lane = 0; lane < emulation::WARP; lane++) {
      u32 pair = u32(tile[lane % 4 * 2 + 1][lane / 4]) << 16 | tile[lane % 4 * 2][lane / 4];
      memcpy(c.out[lane], &pair, 4);
    }
  });
}

static inline void wait_for_earlier() {}
static inline void let_next_start() {}

// Warpgroups: what the four warps bring is independent, so each warp computes its own 16 rows, at once.
static inline u64 matrix_lines(const void* shared, int step) {
  const auto* at = reinterpret_cast<const unsigned char*>(shared);
  if ((at - emulation::block->memory) % 1024) emulation::fail("a matrix operand is not aligned to 1024 bytes");
  return u64(at - emulation::block->memory) + u64(step) * 32;
}
static inline u64 lines_on(u64 lines, int bytes) { return lines + u64(bytes); }
static inline void warpgroup_sync(int which) {
  using namespace emulation;
  int generation = block->group_generation[which];
  if (++block->at_group[which] == 4 * WARP) {
    block->at_group[which] = 0;
    block->group_generation[which]++;
    cluster.progress++;
  } else {
    while (block->group_generation[which] == generation) yield();
  }
}
template <int count>
static inline void registers_fewer() {}
template <int count>
static inline void registers_more() {}
static inline void warpgroup_fence() {}
static inline void warpgroup_commit() {}
template <int pending>
static inline void warpgroup_wait() {}
static inline void fence_for_matrices() {}
template <bool add = true, int count>
static inline void warpgroup_mma(float (&d)[count], const u32 (&a)[4], u64 b) {
  const int lane = lane_id(), g = lane / 4, t = lane % 4;
  double rows[2][16];
  for (int from = 0; from < 4; from++)
    for (int i = 0; i < 4; i++) {
      u32 pair = shuffle(a[i], g * 4 + from);
      rows[i % 2][i / 2 * 8 + from * 2] = bf16_low(pair);
      rows[i % 2][i / 2 * 8 + from * 2 + 1] = bf16_high(pair);
    }
  for (int i = 0; i < count; i++) {
    u64 line = u64(i / 4 * 8 + t * 2 + i % 2);
    double total = add ? d[i] : 0.0;
    for (int k = 0; k < 16; k++) {
      u64 at = b + line * 128 + u64(k) * 2;
      at ^= (at >> 7 & 7) << 4;
      u16 value;
      memcpy(&value, emulation::block->memory + at, 2);
      total += rows[i / 2 % 2][k] * double(bf16_float(value));
    }
    d[i] = float(total);
  }
}
