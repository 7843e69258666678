// Ranks on one machine meet in memory they share, and add up what each brings.
//
// In round r a rank writes its floats into half r & 1 of the slots, then r into its counter, and waits until no counter
// is below r. It writes into that half again in round r + 2, which it begins when every counter has shown r + 1; by then
// nobody reads round r any more. So one wait a round is enough.
// A waiting rank watches for some 20 us, then lets other threads run, then sleeps between looks: ranks may have to share
// cores with each other and with the router.

#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstring>

#include "api.h"
#include "simd.h"

namespace dstgi {
namespace {

constexpr int64_t LINE = 64;  // bytes: counters are a cache line apart
constexpr int64_t WATCH_NS = 20 * 1000, YIELD_NS = 300 * 1000, SLEEP_NS = 50 * 1000;

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

DSTGI_INLINE void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

using Counter = std::atomic<uint64_t>;
static_assert(Counter::is_always_lock_free, "counters are shared between processes");

Counter* counter(char* shared, int64_t rank) { return reinterpret_cast<Counter*>(shared + LINE * rank); }
Counter* left(char* shared, int64_t rank) { return counter(shared, rank) + 1; }

float* slot(char* shared, const RankRound& m, int64_t rank) {
  float* first = reinterpret_cast<float*>(shared + LINE * m.world);
  return first + ((m.round & 1) * m.world + rank) * m.slot_floats;
}

// The first rank that is not there when the time is over, `world` + it if it has left; -1 if all are.
int64_t await(char* shared, const RankRound& m, int64_t wait_ns) {
  const int64_t start = now_ns();
  for (int64_t rank = 0; rank < m.world; ++rank) {
    Counter* theirs = counter(shared, rank);
    for (int64_t looks = 0;; ++looks) {
      if (theirs->load(std::memory_order_acquire) >= m.round) break;
      pause_briefly();
      if (looks % 64 != 63) continue;
      // Looked at once more after the flag: who has left may have been here before.
      const bool gone = left(shared, rank)->load(std::memory_order_acquire) != 0;
      if (gone && theirs->load(std::memory_order_acquire) < m.round) return m.world + rank;
      const int64_t waited = now_ns() - start;
      if (waited > wait_ns) return rank;
      if (waited > YIELD_NS) {
        const timespec nap = {0, SLEEP_NS};
        nanosleep(&nap, nullptr);
      } else if (waited > WATCH_NS) {
        sched_yield();
      }
    }
  }
  return -1;
}

void add_up(char* shared, const RankRound& m, float* x, int64_t n) {
  for (int64_t rank = 0; rank < m.world; ++rank) {
    const float* own = slot(shared, m, rank);
    int64_t i = 0;
    if (rank == 0) {
      std::memcpy(x, own, n * sizeof(float));
      continue;
    }
    for (; i + simd::LANES <= n; i += simd::LANES) simd::store(x + i, simd::add(simd::load(x + i), simd::load(own + i)));
    for (; i < n; ++i) x[i] += own[i];
  }
}

}  // namespace
}  // namespace dstgi

DSTGI_API void dstgi_meet(char* shared, const RankRound* m, float* x, int64_t n, int64_t adds, int64_t wait_ns,
                          int64_t* late) {
  using namespace dstgi;
  Counter* own = counter(shared, m->rank);
  if (own->load(std::memory_order_relaxed) < m->round) {  // else this is the same call, waiting on
    std::memcpy(slot(shared, *m, m->rank), x, n * sizeof(float));
    own->store(m->round, std::memory_order_release);
  }
  *late = await(shared, *m, wait_ns);
  if (*late < 0 && adds) add_up(shared, *m, x, n);
}

DSTGI_API void dstgi_leave(char* shared, int64_t rank) {
  dstgi::left(shared, rank)->store(1, std::memory_order_release);
}
