#include "tests/benchmarks/gpu_stopwatch.h"

#include <cuda_runtime.h>

namespace lockstep::cuda {

float gpu_milliseconds(void* stream, void* scratch, std::int64_t cold,
                       const std::function<void()>& work) {
  const auto on = static_cast<cudaStream_t>(stream);
  cudaEvent_t begin = nullptr, end = nullptr;
  float milliseconds = -1.0f;
  if (cudaEventCreate(&begin) == cudaSuccess && cudaEventCreate(&end) == cudaSuccess) {
    cudaMemsetAsync(scratch, 1, static_cast<std::size_t>(cold), on);
    cudaEventRecord(begin, on);
    work();
    cudaEventRecord(end, on);
    if (cudaEventSynchronize(end) != cudaSuccess ||
        cudaEventElapsedTime(&milliseconds, begin, end) != cudaSuccess)
      milliseconds = -1.0f;
  }
  if (begin != nullptr) cudaEventDestroy(begin);
  if (end != nullptr) cudaEventDestroy(end);
  return milliseconds;
}

std::int64_t free_memory_bytes() {
  std::size_t free_bytes = 0, all_bytes = 0;
  if (cudaMemGetInfo(&free_bytes, &all_bytes) != cudaSuccess) return 0;
  return static_cast<std::int64_t>(free_bytes);
}

int copy_on_device(void* stream, void* target, const void* source, std::int64_t size_bytes) {
  return cudaMemcpyAsync(target, source, static_cast<std::size_t>(size_bytes),
                         cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream));
}

}  // namespace lockstep::cuda
