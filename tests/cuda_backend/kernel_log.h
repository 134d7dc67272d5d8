// Which kernels a test launched with every access watched: written to the file that an environment
// variable names, for kernel_coverage_test.cpp. Without the variable nothing is written.
#pragma once

#include <cstdlib>
#include <fstream>
#include <vector>

#include "sim/protocol/backend.h"

namespace lockstep {

inline constexpr const char* kKernelLogVariable = "LOCKSTEP_KERNEL_LOG";

inline void log_kernels(const std::vector<KernelStatistics>& kernels) {
  const char* path = std::getenv(kKernelLogVariable);
  if (path == nullptr) return;
  std::ofstream file(path, std::ios::app);
  for (const KernelStatistics& kernel : kernels)
    if (kernel.accesses > 0) file << kernel.kernel << '\n';
}

}  // namespace lockstep
