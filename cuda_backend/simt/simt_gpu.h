// simt.h for nvcc: the vocabulary of simt:: spelled in CUDA. Include simt.h, not this file.
//
// Requires C++20 and sm_80 (conversions to bf16). No function here adds an instruction to what the
// CUDA spelling would give.
#pragma once

#include <cuda_runtime.h>

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define SIMT_HAVE_NVTX 1
#endif

#include <utility>

#define SIMT_UNROLL _Pragma("unroll")
#define SIMT_SHARED_ARRAY(T, name, N) __shared__ T name[N]
#define SIMT_DYNAMIC_SHARED(T, name)                                       \
  extern __shared__ __align__(16) unsigned char simt_dynamic_shared_raw[]; \
  T* name = reinterpret_cast<T*>(simt_dynamic_shared_raw)

namespace simt {
inline namespace simt_cuda {

using stream_t = cudaStream_t;
using error_t = cudaError_t;
inline constexpr error_t success = cudaSuccess;
inline constexpr error_t invalid_value = cudaErrorInvalidValue;
inline constexpr error_t invalid_configuration = cudaErrorInvalidConfiguration;
inline constexpr error_t out_of_memory = cudaErrorMemoryAllocation;
inline const char* error_string(error_t error) { return cudaGetErrorString(error); }

struct LaunchConfig {
  dim3 grid;
  dim3 block;
  std::size_t smem = 0;  // bytes of dynamic shared memory
  stream_t stream = nullptr;
  const char* name = "";      // of the range in a profile
  bool large_shared = false;  // opts in to more than 48 KiB of shared memory
};

// A range with the launch's name, for profilers.
class NamedRange {
 public:
#if SIMT_HAVE_NVTX
  explicit NamedRange(const char* name) { nvtxRangePushA(name); }
  ~NamedRange() { nvtxRangePop(); }
#else
  explicit NamedRange(const char*) {}
#endif
  NamedRange(const NamedRange&) = delete;
};

template <class... P, class... A>
inline error_t launch(const LaunchConfig& config, void (*kernel)(P...), A&&... args) {
  [[maybe_unused]] const NamedRange range(config.name);
  if (config.large_shared) {
    const error_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, int(config.smem));
    if (error != success) return error;
  }
  cudaLaunchConfig_t native{};
  native.gridDim = config.grid;
  native.blockDim = config.block;
  native.dynamicSmemBytes = config.smem;
  native.stream = config.stream;
  return cudaLaunchKernelEx(&native, kernel, static_cast<P>(std::forward<A>(args))...);
}

using vec16 = uint4;
__host__ __device__ __forceinline__ vec16 make_vec16(std::uint32_t a, std::uint32_t b,
                                                     std::uint32_t c, std::uint32_t d) {
  return make_uint4(a, b, c, d);
}
// Word i of 4; i must be a constant after unrolling.
__host__ __device__ __forceinline__ std::uint32_t word(vec16 v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

__device__ __forceinline__ void copy16(void* dst, const void* src) {
  *static_cast<vec16*>(dst) = *static_cast<const vec16*>(src);
}
template <class T>
__device__ __forceinline__ void copy_value(T* dst, const T* src) {
  *dst = *src;
}
template <class T>
__device__ __forceinline__ T load_any(const T* src) {
  return *src;
}

// Lanes that a thread runs (cpu_intrinsics.h).
inline constexpr int kLanesPerThread = 1;
__device__ __forceinline__ void sync_lanes() { __syncwarp(); }

// Reductions: every lane of a full warp calls, and all kLanes lanes of a segment get the same bits.
// The tree is the butterfly lane ^ kLanes / 2, .., 2, 1, on the CPU as well.
template <class T>
__device__ __forceinline__ T warp_sum(T value) {
  SIMT_UNROLL
  for (int offset = 16; offset > 0; offset >>= 1)
    value = value + __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}
template <class T, int kLanes = 32>
__device__ __forceinline__ T warp_max(T value) {
  SIMT_UNROLL
  for (int offset = kLanes / 2; offset > 0; offset >>= 1) {
    const T other = __shfl_xor_sync(0xffffffffu, value, offset);
    value = value < other ? other : value;
  }
  return value;
}

// The same for several values of each lane.
template <class T, int kCount>
__device__ __forceinline__ void warp_sum_each(T (&values)[kCount]) {
  SIMT_UNROLL
  for (int i = 0; i < kCount; ++i) values[i] = warp_sum(values[i]);
}
template <class T, int kCount>
__device__ __forceinline__ void warp_max_each(T (&values)[kCount]) {
  SIMT_UNROLL
  for (int i = 0; i < kCount; ++i) values[i] = warp_max(values[i]);
}
template <class T, int kCount>
__device__ __forceinline__ void warp_sum_each(T (&lanes)[kLanesPerThread][kCount]) {
  warp_sum_each(lanes[0]);
}
template <class T, int kCount>
__device__ __forceinline__ void warp_max_each(T (&lanes)[kLanesPerThread][kCount]) {
  warp_max_each(lanes[0]);
}

// The values of one lane in all of them.
template <class T, int kCount>
__device__ __forceinline__ void warp_copy_each(T (&values)[kCount], std::int32_t lane) {
  SIMT_UNROLL
  for (int i = 0; i < kCount; ++i) values[i] = __shfl_sync(0xffffffffu, values[i], lane);
}

}  // namespace simt_cuda
}  // namespace simt
