// Fingerprints of whole pages, padding included: rule (3) of sim/protocol/backend.h. A sum over
// words keyed by their position: any launch shape gives the same 128 bits, and every swap, shift or
// stray byte changes them.
#pragma once

#include "cuda_backend/kernels/words.cuh"

namespace lockstep::cuda {

namespace SIMT_VARIANT {

struct FingerprintSum {
  std::uint64_t a = 0, b = 0;

  __device__ __forceinline__ void add(std::uint64_t word, std::uint64_t index) {
    const std::uint64_t k = mix(2 * index), m = mix(2 * index + 1);
    const std::uint32_t low = std::uint32_t(word), high = std::uint32_t(word >> 32);
    a += std::uint64_t(low + std::uint32_t(k)) * (high + std::uint32_t(k >> 32)) + word;
    b += std::uint64_t(low + std::uint32_t(m)) * (high + std::uint32_t(m >> 32)) +
         (word << 32 | word >> 32);
  }
  __device__ __forceinline__ void add(simt::vec16 vector, std::int64_t index) {
    add(low_word(vector), 2 * std::uint64_t(index));
    add(high_word(vector), 2 * std::uint64_t(index) + 1);
  }
};

// Four loads are in flight at a time: a single one would not hide the latency of memory.
__device__ __forceinline__ FingerprintSum sum_vectors(const simt::vec16* page, std::int64_t first,
                                                      std::int64_t count, std::int64_t step) {
  FingerprintSum sum;
  std::int64_t i = first;
  for (; i + 3 * step < count; i += 4 * step) {
    simt::vec16 vectors[4];
    SIMT_UNROLL
    for (int k = 0; k < 4; ++k) vectors[k] = simt::load_any(page + i + k * step);
    SIMT_UNROLL
    for (int k = 0; k < 4; ++k) sum.add(vectors[k], i + k * step);
  }
  for (; i < count; i += step) sum.add(simt::load_any(page + i), i);
  return sum;
}

// Grid: x is the page, y shares its words.
[[maybe_unused]] static __global__ void page_fingerprint_kernel(FingerprintParams p) {
  const FingerprintItem item = p.items[blockIdx.x];
  const BlockRegion page = p.tensors[item.tensor];
  const std::byte* at = page.base + item.block * page.block_stride;
  const std::int64_t first = std::int64_t(blockIdx.y) * blockDim.x + threadIdx.x;
  const std::int64_t step = std::int64_t(gridDim.y) * blockDim.x;
  FingerprintSum sum;
  if (page.unit_bytes == 16) {
    sum = sum_vectors(reinterpret_cast<const simt::vec16*>(at), first, page.size_bytes / 16, step);
  } else {
    for (std::int64_t i = first; 8 * i < page.size_bytes; i += step) {
      const std::int64_t left = page.size_bytes - 8 * i;
      sum.add(load_any_word(at + 8 * i, std::int32_t(left < 8 ? left : 8), page.unit_bytes),
              std::uint64_t(i));
    }
  }
  add_to_sum(p.sums + 2 * std::int64_t(blockIdx.x), sum.a);
  add_to_sum(p.sums + 2 * std::int64_t(blockIdx.x) + 1, sum.b);
}

}  // namespace SIMT_VARIANT

// What attention would read, as an exact number: rule (4) of sim/protocol/backend.h. Every K and V
// row of the probed positions is read through the block table, and one changed bit anywhere changes
// the digest.

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
