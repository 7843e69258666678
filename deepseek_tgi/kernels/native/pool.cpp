#include "pool.h"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "api.h"
#include "scratch.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dstgi {
namespace {

// The whole of a job's bookkeeping in one word, so that a claim and its limit are read together:
// generation (24 bits), number of tasks (20 bits), next task (20 bits).
constexpr int BITS = 20;
constexpr uint64_t FIELD = (uint64_t{1} << BITS) - 1;
constexpr int64_t MAX_TASKS = int64_t{1} << (BITS - 1);  // leaves room for claims made in vain
constexpr std::chrono::microseconds WATCH{50};
constexpr int PATIENCE = 2000;  // looks before the caller lets others run

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct alignas(64) Shared {
  std::atomic<uint64_t> state{0};
  alignas(64) std::atomic<int64_t> done{0};
  alignas(64) Body body = nullptr;
  void* context = nullptr;
  std::atomic<int> width{0};
  std::atomic<int> sleepers{0};
  std::mutex caller;  // held by the thread whose job runs
  std::mutex sleep;
  std::condition_variable wake;
  int helpers = 0;
};

// Never destroyed: helpers outlive every static of the process.
Shared* shared = new Shared;

thread_local bool inside = false;

bool open(uint64_t state) { return (state & FIELD) < (state >> BITS & FIELD); }

// Takes a task of the current job; -1 if none is left.
int64_t claim() {
  if (!open(shared->state.load(std::memory_order_relaxed))) return -1;
  const uint64_t taken = shared->state.fetch_add(1, std::memory_order_acq_rel);
  return open(taken) ? static_cast<int64_t>(taken & FIELD) : -1;
}

// A task in hand pins the job: its fields cannot change before the task is counted as done.
void take_part() {
  const int64_t first = claim();
  if (first < 0) return;
  Tasks tasks(first);
  inside = true;
  shared->body(shared->context, tasks);
  inside = false;
}

void wait_for_work() {
  const auto until = std::chrono::steady_clock::now() + WATCH;
  do {
    for (int i = 0; i < 64; ++i) {
      if (open(shared->state.load(std::memory_order_relaxed))) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() < until);
  std::unique_lock<std::mutex> lock(shared->sleep);
  shared->sleepers.fetch_add(1);
  shared->wake.wait(lock, [] { return open(shared->state.load()); });
  shared->sleepers.fetch_sub(1);
}

void help(int index) {
  for (;;) {
    wait_for_work();
    if (index < shared->width.load(std::memory_order_relaxed)) {
      take_part();
    } else {
      std::this_thread::yield();
    }
  }
}

void grow(int helpers) {
  for (; shared->helpers < helpers; ++shared->helpers) std::thread(help, shared->helpers).detach();
}

// A forked child has no helpers: it starts over with none.
const int forget_helpers = pthread_atfork(nullptr, nullptr, [] { shared = new Shared; });

}  // namespace

int64_t Tasks::next() {
  if (end_ >= 0) return next_ < end_ ? next_++ : -1;
  // The next task is claimed before the last one is counted: until then the job cannot give way to another.
  const int64_t task = next_ >= 0 ? next_ : claim();
  next_ = -1;
  if (holds_) shared->done.fetch_add(1, std::memory_order_release);
  holds_ = task >= 0;
  return task;
}

void run_tasks(int threads, int64_t count, Body body, void* context) {
  std::unique_lock<std::mutex> job(shared->caller, std::defer_lock);
  if (inside || count >= MAX_TASKS || !job.try_lock()) {
    Tasks all(0, count);
    return body(context, all);
  }
  grow(threads - 1);
  shared->body = body;
  shared->context = context;
  shared->width.store(threads - 1, std::memory_order_relaxed);
  shared->done.store(0, std::memory_order_relaxed);
  const uint64_t generation = (shared->state.load(std::memory_order_relaxed) >> (2 * BITS)) + 1;
  shared->state.store(generation << (2 * BITS) | static_cast<uint64_t>(count) << BITS);
  if (shared->sleepers.load() > 0) {
    std::lock_guard<std::mutex> lock(shared->sleep);
    shared->wake.notify_all();
  }
  take_part();
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < count; ++spins) {
    relax();
    if (spins > PATIENCE) std::this_thread::yield();
  }
}

}  // namespace dstgi

// Bytes that the process keeps between calls: see scratch.h.
DSTGI_API void dstgi_scratch_bytes(int64_t* bytes) { *bytes = dstgi::scratch_bytes.load(); }
