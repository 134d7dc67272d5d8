// threadIdx, blockIdx, blockDim and gridDim of the simulated thread that runs. Kernel files see the
// same objects as constants (simt_cpu.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda_backend/simt/cpu_types.h"

extern __thread uint3 simt_current_thread_idx asm("simt_thread_idx");
extern __thread uint3 simt_current_block_idx asm("simt_block_idx");
extern __thread uint3 simt_current_block_dim asm("simt_block_dim");
extern __thread uint3 simt_current_grid_dim asm("simt_grid_dim");

namespace simt {

// g++ hooks no reads of them, clang does.
inline bool is_thread_index(std::uintptr_t address) {
  for (const uint3* index : {&simt_current_thread_idx, &simt_current_block_idx,
                             &simt_current_block_dim, &simt_current_grid_dim})
    if (address - reinterpret_cast<std::uintptr_t>(index) < sizeof(uint3)) return true;
  return false;
}

}  // namespace simt
