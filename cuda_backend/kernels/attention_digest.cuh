// What attention would read, as an exact number: rule (4) of sim/protocol/backend.h. Every K and V
// row of the probed positions is read through the block table, and one changed bit anywhere changes
// the digest.
#pragma once

#include "cuda_backend/kernels/words.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

__device__ __forceinline__ std::uint64_t digest_word(std::uint64_t word, std::uint64_t index) {
  return mix(word ^ (index + 1) * kGolden);
}

__device__ __forceinline__ std::uint64_t row_digest(const std::byte* row, const RowCache& cache) {
  std::uint64_t sum = 0;
  if (cache.unit_bytes == 16) {
    const auto* vectors = reinterpret_cast<const simt::vec16*>(row);
    for (std::int32_t i = 0; i < cache.row_bytes / 16; ++i) {
      const simt::vec16 vector = vectors[i];
      sum += digest_word(low_word(vector), 2 * i) + digest_word(high_word(vector), 2 * i + 1);
    }
    return sum;
  }
  for (std::int32_t i = 0; 8 * i < cache.row_bytes; ++i) {
    const std::int32_t left = cache.row_bytes - 8 * i;
    sum += digest_word(load_word(row + 8 * i, left < 8 ? left : 8, cache.unit_bytes), i);
  }
  return sum;
}

// Both rows of every head at one position.
__device__ __forceinline__ std::uint64_t position_digest(const RowCache& cache, std::int32_t row,
                                                         std::uint32_t position) {
  const std::byte* key = key_of_position(cache, row, position);
  std::uint64_t sum = 0;
  for (std::int32_t head = 0; head < cache.num_kv_heads; ++head, key += cache.head_stride) {
    const std::uint64_t place = std::uint64_t(position) << 16 | std::uint64_t(head);
    sum += mix(row_digest(key, cache) ^ mix(place));
    if (cache.num_parts == 2)
      sum += mix(row_digest(key + cache.part_stride, cache) ^ mix(place | 1 << 15));
  }
  return sum;
}

// Grid: one CTA for each piece of a probe; its threads share the piece's positions.
[[maybe_unused]] static __global__ void attention_digest_kernel(DigestParams p) {
  const DigestPiece piece = p.pieces[blockIdx.x];
  if (piece.row < 0) return;
  const RowCache cache = p.layers[piece.layer_index];
  std::uint64_t sum = 0;
  for (std::int32_t i = piece.first + std::int32_t(threadIdx.x); i < piece.last; i += blockDim.x)
    sum += position_digest(cache, piece.row, std::uint32_t(i));
  add_to_sum(p.digests + piece.probe, sum);
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
