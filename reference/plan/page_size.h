// How many bytes one block of a layer takes: the arithmetic of KVCacheSpec.
//
// 1. real_page_size_bytes counts what is written; page_size_bytes adds inline scales and padding.
// 2. page_size_bytes >= real_page_size_bytes; a padded page smaller than its content is a
//    programmer error here and is refused with a reason where a user can cause it (planner.h).
// 3. Every count is in 64 bits.
// Rules: vllm/v1/kv_cache_interface.py.
#pragma once

#include <cstdint>

#include "reference/types/kv_cache_spec.h"
#include "reference/types/token_rows.h"

namespace lockstep {

constexpr std::int64_t cdiv(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return cdiv(a, b) * b; }

// a * b, or the largest number there is: a need that large is refused like any other.
constexpr std::int64_t saturating_product(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

// Rows that a block stores: block_size, divided by the compress ratio of an MLA cache.
std::int64_t storage_block_size(const KVCacheSpec& spec);
// Elements of V's row (head_size where the spec does not say otherwise).
std::int64_t head_size_v(const KVCacheSpec& spec);
// Elements of state tensor `spec.states[index]`, and its bytes.
std::int64_t num_elements(const StateTensorSpec& state);
std::int64_t size_bytes(const StateTensorSpec& state);

// Bytes written in one block, scales of per-token-head quantization left out.
std::int64_t real_page_size_bytes(const KVCacheSpec& spec);
// Bytes of one block in a tensor: with inline scales, and padded where the spec requires it.
std::int64_t page_size_bytes(const KVCacheSpec& spec);
// As page_size_bytes, but of what is really there: no padding.
std::int64_t unpadded_page_size_bytes(const KVCacheSpec& spec);

// A page of one layer of the group; the sum over the layers when the group is of uniform type.
std::int64_t page_size_bytes(const KVCacheGroupSpec& group);
// What one block takes of a tensor: the page of one layer times the layers that share it.
std::int64_t pool_page_size_bytes(const KVCacheGroupSpec& group);

// The spec with page_size_padded set to what `spec.alignment` asks for (DeepSeek-V4 caches).
KVCacheSpec with_alignment_padding(KVCacheSpec spec);

}  // namespace lockstep
