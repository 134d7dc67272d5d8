// Fingerprints of whole pages, padding included: rule (3) of sim/protocol/backend.h. A sum over
// words keyed by their position: any launch shape gives the same 128 bits, and every swap, shift or
// stray byte changes them.
#pragma once

#include "cuda_backend/kernels/words.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

// Pages of a CTA: their words share keys, their loads overlap. A vector of keys costs a CPU as much
// as the terms of two pages.
inline constexpr int kPagesAtATime = KERNELS_HAVE_WIDE_WORDS ? 8 : 4;

// What a word's position makes of it.
struct WordKeys {
  std::uint64_t k, m;
  __device__ __forceinline__ explicit WordKeys(std::uint64_t index)
      : k(mix(2 * index)), m(mix(2 * index + 1)) {}
};

struct FingerprintSum {
  std::uint64_t a = 0, b = 0;

  __device__ __forceinline__ void add(std::uint64_t word, const WordKeys& keys) {
    const std::uint32_t low = std::uint32_t(word), high = std::uint32_t(word >> 32);
    a += std::uint64_t(low + std::uint32_t(keys.k)) * (high + std::uint32_t(keys.k >> 32)) + word;
    b += std::uint64_t(low + std::uint32_t(keys.m)) * (high + std::uint32_t(keys.m >> 32)) +
         (word << 32 | word >> 32);
  }
  __device__ __forceinline__ void add_to(unsigned long long* sum) const {
    add_to_sum(sum, a);
    add_to_sum(sum + 1, b);
  }
};

// One thread of the CPU adds words [first, last) of kPagesAtATime pages in place of many: multiples
// of kRun, whose keys are computed once for all pages.
inline constexpr std::int64_t kRun = 64;
#if KERNELS_HAVE_FOUR_WORDS
__forceinline__ void add_fours(FingerprintSum (&sums)[kPagesAtATime],
                               const simt::vec16* const (&pages)[kPagesAtATime], std::int64_t first,
                               std::int64_t last) {
  FourWords a[kPagesAtATime] = {}, b[kPagesAtATime] = {};
  for (; first < last; first += kRun) {
    // The next words, while the keys are made: a CPU does not foresee reads of pages in turns.
    for (int n = 0; n < kPagesAtATime; ++n)
      prefetch_row(reinterpret_cast<const std::byte*>(pages[n] + (first + kRun) / 2), 8 * kRun);
    std::uint64_t k[kRun], m[kRun];
    for (std::int64_t i = 0; i < kRun; ++i) {
      const WordKeys keys(std::uint64_t(first + i));
      k[i] = keys.k;
      m[i] = keys.m;
    }
    for (int n = 0; n < kPagesAtATime; ++n)
      for (std::int64_t i = 0; i < kRun; i += 4) {
        const FourWords four = load_four(pages[n] + (first + i) / 2);
        a[n] += product_of_halves(add_halves(four, load_four(k + i))) + four;
        b[n] += product_of_halves(add_halves(four, load_four(m + i))) + (four << 32 | four >> 32);
      }
  }
  for (int n = 0; n < kPagesAtATime; ++n) sums[n] = {sum_of(a[n]), sum_of(b[n])};
}
// The same loops: eight keys at a time.
[[maybe_unused]] LS_WIDE_WORDS static void add_fours_wide(
    FingerprintSum (&sums)[kPagesAtATime], const simt::vec16* const (&pages)[kPagesAtATime],
    std::int64_t first, std::int64_t last) {
  add_fours(sums, pages, first, last);
}
#endif

// Grid: x is kPagesAtATime pages, y shares their words. A last CTA repeats its first page in the
// place of those that it lacks.
[[maybe_unused]] static __global__ void page_fingerprint_kernel(FingerprintParams p) {
  const std::int32_t first_page = std::int32_t(blockIdx.x) * kPagesAtATime;
  const std::int32_t left = p.num_items - first_page;
  const std::int32_t num_pages = left < kPagesAtATime ? left : kPagesAtATime;
  const std::int64_t first = std::int64_t(blockIdx.y) * blockDim.x + threadIdx.x;
  const std::int64_t step = std::int64_t(gridDim.y) * blockDim.x;
  const simt::vec16* pages[kPagesAtATime];
  std::int64_t shared = 0;  // vectors that every page has
  SIMT_UNROLL
  for (int n = 0; n < kPagesAtATime; ++n) {
    const FingerprintItem item = p.items[first_page + (n < num_pages ? n : 0)];
    const BlockRegion page = p.tensors[item.tensor];
    pages[n] = reinterpret_cast<const simt::vec16*>(page.base + item.block * page.block_stride);
    const std::int64_t vectors = page.unit_bytes == 16 ? page.size_bytes / 16 : 0;
    shared = n == 0 || vectors < shared ? vectors : shared;
  }
  FingerprintSum sums[kPagesAtATime];
  std::int64_t begin = first;
#if KERNELS_HAVE_FOUR_WORDS
  if (blockDim.x == 1 && wants_wide_words()) {
    const std::int64_t runs = 2 * shared / kRun;
    const auto first_word = [&](std::int64_t share) { return runs * share / gridDim.y * kRun; };
    const auto add = has_wide_words() ? add_fours_wide : add_fours;
    add(sums, pages, first_word(blockIdx.y), first_word(std::int64_t(blockIdx.y) + 1));
    begin += runs * kRun / 2;
  }
#endif
  for (std::int64_t i = begin; i < shared; i += step) {
    simt::vec16 vectors[kPagesAtATime];
    SIMT_UNROLL
    for (int n = 0; n < kPagesAtATime; ++n) vectors[n] = simt::load_any(pages[n] + i);
    const WordKeys low(2 * std::uint64_t(i)), high(2 * std::uint64_t(i) + 1);
    SIMT_UNROLL
    for (int n = 0; n < kPagesAtATime; ++n) {
      sums[n].add(low_word(vectors[n]), low);
      sums[n].add(high_word(vectors[n]), high);
    }
  }
  SIMT_UNROLL
  for (int n = 0; n < kPagesAtATime; ++n)
    if (n < num_pages) sums[n].add_to(p.sums + 2 * std::int64_t(first_page + n));
  // The words that are left, of longer pages and of narrow units.
  for (std::int32_t n = first_page; n < first_page + num_pages; ++n) {
    const FingerprintItem item = p.items[n];
    const BlockRegion page = p.tensors[item.tensor];
    if (16 * shared == page.size_bytes) continue;
    const std::byte* at = page.base + item.block * page.block_stride;
    FingerprintSum rest;
    for (std::int64_t word = 2 * shared + first; 8 * word < page.size_bytes; word += step) {
      const std::int64_t bytes = page.size_bytes - 8 * word;
      rest.add(load_word<true>(at + 8 * word, std::int32_t(bytes < 8 ? bytes : 8), page.unit_bytes),
               WordKeys(std::uint64_t(word)));
    }
    rest.add_to(p.sums + 2 * std::int64_t(n));
  }
}

// What attention would read, as an exact number: rule (4) of sim/protocol/backend.h. Every K and V
// row of the probed positions is read through the block table, and one changed bit anywhere changes
// the digest.

__device__ __forceinline__ std::uint64_t digest_word(std::uint64_t word, std::uint64_t index) {
  return mix(word ^ (index + 1) * kGolden);
}

#if KERNELS_HAVE_WIDE_WORDS
// Words [0, 8 * eights) of a row.
[[maybe_unused]] LS_WIDE_WORDS static std::uint64_t digest_eights(const std::byte* row,
                                                                  std::int32_t eights) {
  constexpr WideWords kFirst{1, 2, 3, 4, 5, 6, 7, 8};
  WideWords sum{}, place = kFirst * kGolden;
  for (std::int32_t i = 0; i < eights; ++i, place += 8 * kGolden)
    sum += mix8(load_wide(row + 64 * i) ^ place);
  return sum_of(sum);
}
#endif

__device__ __forceinline__ std::uint64_t row_digest(const std::byte* row, const RowCache& cache) {
  std::uint64_t sum = 0;
  if (cache.unit_bytes == 16) {
    const auto* vectors = reinterpret_cast<const simt::vec16*>(row);
    std::int32_t i = 0;
#if KERNELS_HAVE_WIDE_WORDS
    if (cache.row_bytes >= 64 && has_wide_words()) {
      sum = digest_eights(row, cache.row_bytes / 64);
      i = cache.row_bytes / 64 * 4;
    }
#endif
    for (; i < cache.row_bytes / 16; ++i) {
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

__device__ __forceinline__ void prefetch_position(const RowCache& cache, std::int32_t row,
                                                  std::int32_t position) {
  const std::byte* key = key_of_position(cache, row, std::uint32_t(position));
  for (std::int32_t head = 0; head < cache.num_kv_heads; ++head, key += cache.head_stride)
    for (std::int32_t part = 0; part < cache.num_parts; ++part)
      prefetch_row(key + part * cache.part_stride, cache.row_bytes);
}

// Grid: one CTA for each piece of a probe; its threads share the piece's positions.
[[maybe_unused]] static __global__ void attention_digest_kernel(DigestParams p) {
  const DigestPiece piece = p.pieces[blockIdx.x];
  if (piece.row < 0) return;
  const RowCache cache = p.layers[piece.layer_index];
  std::uint64_t sum = 0;
  for (std::int32_t i = piece.first + std::int32_t(threadIdx.x); i < piece.last; i += blockDim.x) {
    constexpr std::int32_t kAhead = 8;  // positions; their rows are rarely in a CPU's caches
    if (KERNELS_HAVE_WIDE_WORDS && i + kAhead < piece.last)
      prefetch_position(cache, piece.row, i + kAhead);
    sum += position_digest(cache, piece.row, std::uint32_t(i));
  }
  add_to_sum(p.digests + piece.probe, sum);
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
