// The threads that share a kernel's work.
//
// Choice: work is cut into tasks that whoever is running takes; the caller takes them too and waits for tasks, never for
// threads. A helper that the system has put aside (the router shares the cores) holds up at most the one task it is in.
// Helpers watch for new work for some 50 us, which covers the gaps inside a decode step, then sleep. Rejected: OpenMP,
// whose regions end only when every thread has arrived (on busy cores a 5 us product then takes milliseconds), and whose
// helpers spin for milliseconds or not at all, by an environment variable read before torch is imported.
#pragma once

#include <atomic>
#include <cstdint>

namespace dstgi {

// One participant's view of a job: gives out task indices until none is left.
class Tasks {
 public:
  explicit Tasks(int64_t first) : next_(first) {}              // a share of the job that runs
  Tasks(int64_t first, int64_t end) : next_(first), end_(end) {}  // all of a job nobody helps with
  // The next task, or -1. A task counts as done when the next one is asked for.
  int64_t next();

 private:
  int64_t next_;
  int64_t end_ = -1;
  bool holds_ = false;
};

using Body = void (*)(void* context, Tasks& tasks);

// Runs `body` on this thread and up to `threads - 1` helpers until tasks 0 .. count - 1 are done. Called from a body, or
// while another thread's job runs, it does all the work on the calling thread.
void run_tasks(int threads, int64_t count, Body body, void* context);

template <class F>
inline void parallel(int64_t threads, int64_t count, F&& each) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) each(i);
    return;
  }
  const Body body = [](void* context, Tasks& tasks) {
    for (int64_t i; (i = tasks.next()) >= 0;) (*static_cast<F*>(context))(i);
  };
  run_tasks(static_cast<int>(threads), count, body, const_cast<void*>(static_cast<const void*>(&each)));
}

constexpr int64_t PARALLEL_FROM = 8192;  // elements below which waking other threads costs more than it gives
constexpr int64_t ROW_RUNS = 4;          // tasks a thread gets of work by rows

// `each(i)` for rows 0 .. rows - 1 of `width` elements, none of which needs another.
template <class F>
inline void by_rows(int64_t rows, int64_t width, int64_t threads, F&& each) {
  if (rows * width < PARALLEL_FROM) threads = 1;
  const int64_t runs = rows < ROW_RUNS * threads ? rows : ROW_RUNS * threads;
  parallel(threads, runs, [&](int64_t run) {
    for (int64_t i = rows * run / runs; i < rows * (run + 1) / runs; ++i) each(i);
  });
}

}  // namespace dstgi
