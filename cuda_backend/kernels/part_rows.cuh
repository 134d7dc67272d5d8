// Addresses in a PartLayout: a row by block, token and head, an element by its number, a scale.
// Device code of whatever writes or reads parts.
#pragma once

#include "cuda_backend/kernels/engine_params.h"
#include "cuda_backend/kernels/number_formats.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

__device__ __forceinline__ std::byte* part_row(const PartLayout& part, std::int64_t block,
                                               std::int64_t offset, std::int64_t head) {
  return part.base + block * part.block_stride + offset * part.token_stride +
         head * part.head_stride;
}

// Element `index` of a row; the elements up to the end of its piece follow it.
__device__ __forceinline__ std::byte* part_element(const PartLayout& part, std::byte* row,
                                                   std::int32_t index) {
  if (part.piece_elements >= part.head_size)
    return row + std::int64_t(index) * element_bytes(part.dtype);
  const std::int32_t piece = index / part.piece_elements;
  return row + piece * part.piece_stride +
         std::int64_t(index - piece * part.piece_elements) * element_bytes(part.dtype);
}

__device__ __forceinline__ float* part_scale(const PartLayout& part, std::int64_t block,
                                             std::int64_t offset, std::int64_t head) {
  return reinterpret_cast<float*>(part.scales + block * part.scale_block_stride +
                                  offset * part.scale_token_stride + head * part.scale_head_stride);
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
