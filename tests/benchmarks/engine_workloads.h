// The work that engine kernels are timed on, in the shapes of real models: Llama 3's attention (8
// KV heads of 128), DeepSeek's MLA (512 + 64), Nemotron-H's Mamba2 (heads of 64, d_state 128),
// Qwen3-Next's delta rule (128 x 128). The same for a CPU executor and for a GPU, except
// for the sizes.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cuda_backend/device/device.h"
#include "cuda_backend/launch/kernel_table.h"

namespace lockstep::cuda {

struct Workload {
  std::string name;
  std::int64_t bytes;  // read and written by one run
  std::int64_t items;  // tokens, or keys times query heads, or pages
  std::function<int(const LaunchPlace&)> launch;
};

struct WorkloadSizes {
  std::int32_t prefill_tokens;   // of one chunk
  std::int32_t decode_requests;  // of one token each
  std::int32_t context_tokens;   // that a decode attends to
  std::int32_t state_heads;      // of a state layer
};
inline constexpr WorkloadSizes kCpuSizes{64, 2, 128, 2};
inline constexpr WorkloadSizes kGpuSizes{8192, 256, 4096, 64};

// Memory is taken from the device and stays there. Rows, states and queries are random numbers.
std::vector<Workload> engine_workloads(Device& device, const EngineKernels& kernels,
                                       const WorkloadSizes& sizes);
// Those of them that write caches.
std::vector<Workload> write_workloads(Device& device, const EngineKernels& kernels,
                                      std::int32_t num_tokens);

// The numbers 0 to count-1, shuffled.
std::vector<std::int64_t> scattered(std::int64_t count);

}  // namespace lockstep::cuda
