// Where dynamic shared memory begins in a kernel that has no other: told once, for kernels that are compiled with it.
#include "device.cuh"

extern "C" __global__ void shared_start(int* out) {
  if (threadIdx.x == 0) *out = (int)shared_address(dynamic_shared());
}
EXPORT(shared_start)
