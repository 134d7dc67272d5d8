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
}  // namespace lockstep::cuda
