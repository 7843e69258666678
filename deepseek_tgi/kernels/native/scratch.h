// Memory that a thread keeps between calls, so that a step allocates nothing once warm.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace dstgi {

// Bytes that all scratch of the process holds now.
inline std::atomic<int64_t> scratch_bytes{0};

class Scratch {
 public:
  ~Scratch() {
    scratch_bytes -= static_cast<int64_t>(size_);
    std::free(data_);
  }

  // At least `bytes` bytes on a 64-byte boundary, contents undefined; grows, never shrinks.
  char* get(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      scratch_bytes -= static_cast<int64_t>(size_);
      size_ = (bytes + 4095) / 4096 * 4096;
      data_ = static_cast<char*>(std::aligned_alloc(4096, size_));
      if (data_ == nullptr) std::abort();
      scratch_bytes += static_cast<int64_t>(size_);
    }
    return data_;
  }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

inline size_t align64(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace dstgi
