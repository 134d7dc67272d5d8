// Whole pools under the kernels of the protocol: pages zeroed, copied, poisoned and fingerprinted,
// as a verification of all of them does. The same for a CPU executor and for a GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda_backend/launch/kernel_table.h"
#include "tests/benchmarks/engine_workloads.h"

namespace lockstep::cuda {

struct PoolSize {
  std::int32_t num_pages;
  std::int64_t page_bytes;
};
inline constexpr PoolSize kCpuPool{8, 16 << 10};

// One tensor of pages, and half of it copied to the other half.
std::vector<Workload> pool_workloads(Device& device, const KernelTable& kernels, PoolSize size);

}  // namespace lockstep::cuda
