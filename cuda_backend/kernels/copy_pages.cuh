// Blocks of one cache to blocks of another, each with strides of its own: swaps between the device
// and pinned host memory, pages gathered into a contiguous buffer and back, hidden states taken out
// of padded pages. A byte is found by its block and its offset in the block; a cache is never taken
// for one long array (vLLM pull request 39949).
//
// 1. Padding on either side is neither read nor written. 2. Undefined bytes are copied as such.
// 3. Target blocks of one launch are distinct, and no target is a source.
#pragma once

#include "cuda_backend/kernels/engine_params.h"
#include "cuda_backend/kernels/words.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

template <class Unit>
__device__ __forceinline__ void copy_page_units(std::byte* target, const std::byte* source,
                                                std::int64_t size_bytes) {
  const std::int64_t count = size_bytes / std::int64_t(sizeof(Unit));
  for (std::int64_t i = std::int64_t(blockIdx.z) * blockDim.x + threadIdx.x; i < count;
       i += std::int64_t(gridDim.z) * blockDim.x) {
    if constexpr (sizeof(Unit) == 16) {
      simt::copy16(target + 16 * i, source + 16 * i);
    } else {
      simt::copy_value(reinterpret_cast<Unit*>(target) + i,
                       reinterpret_cast<const Unit*>(source) + i);
    }
  }
}

// Grid: x is the pair of blocks, y the region, z shares the region.
__global__ void copy_pages_kernel(CopyPagesParams p) {
  const BlockPair pair = p.pairs[blockIdx.x];
  const PageRegion region = p.regions[blockIdx.y];
  std::byte* target = region.target + pair.target * region.target_stride;
  const std::byte* source = region.source + pair.source * region.source_stride;
  switch (region.unit_bytes) {
    case 16:
      return copy_page_units<simt::vec16>(target, source, region.size_bytes);
    case 8:
      return copy_page_units<std::uint64_t>(target, source, region.size_bytes);
    case 4:
      return copy_page_units<std::uint32_t>(target, source, region.size_bytes);
    case 2:
      return copy_page_units<std::uint16_t>(target, source, region.size_bytes);
    default:
      return copy_page_units<std::uint8_t>(target, source, region.size_bytes);
  }
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
