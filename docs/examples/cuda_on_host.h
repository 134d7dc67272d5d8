// What device code needs and a host compiler has not: thread indices, which are variables here, and
// the intrinsics that FlashInfer's headers name. A kernel without barriers or shuffles then runs as
// a loop over its grid. To be included before the kernels; needs CUDA's headers, and no nvcc.
// Not watched: bounds and races of single threads (cuda_backend/simt does that).
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

struct host_index {
  uint32_t x = 0, y = 0, z = 0;
};
inline host_index threadIdx, blockIdx, blockDim, gridDim;

template <class T>
T __ldg(const T* address) {
  return *address;
}
// Byte i of the result is byte (selector >> 4 * i) & 7 of the eight of x and y.
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i)
    result |= uint32_t(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xFF) << (8 * i);
  return result;
}
inline float __frcp_rn(float x) { return 1.0f / x; }
using std::isfinite, std::isinf, std::max, std::min, std::signbit;

// Calls kernel() once for every thread of the grid.
template <class Kernel>
void run_grid(dim3 grid, dim3 block, Kernel kernel) {
  gridDim = {grid.x, grid.y, grid.z};
  blockDim = {block.x, block.y, block.z};
  for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x)
        for (threadIdx.z = 0; threadIdx.z < block.z; ++threadIdx.z)
          for (threadIdx.y = 0; threadIdx.y < block.y; ++threadIdx.y)
            for (threadIdx.x = 0; threadIdx.x < block.x; ++threadIdx.x) kernel();
}
