// The query rows of attention, made from content ids by rule (1) of sim/protocol/backend.h: fp32,
// whatever the cache holds.
#pragma once

#include "cuda_backend/kernels/words.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

inline constexpr std::uint32_t kPartQuery = 2;

// Grid: one CTA for each query; its threads share the words of all heads. Rows are padded with
// zeros.
__global__ void fill_queries_kernel(AttentionParams p) {
  constexpr std::uint64_t kKeep = 0x807FFFFF807FFFFFull, kSet = 0x3F0000003F000000ull;
  const QueryItem item = p.items[blockIdx.x];
  if (item.row < 0) return;
  const RowCache cache = p.layers[item.layer_index];
  const std::uint32_t row_floats = padded_head_size(cache.head_size);
  const std::uint32_t words_per_row = row_floats / 2, head_size = cache.head_size;
  const std::uint32_t count = cache.num_kv_heads * cache.queries_per_kv * words_per_row;
  for (std::uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
    const std::uint32_t head = i / words_per_row, index = i % words_per_row;
    const std::uint64_t row_key =
        mix(item.content ^ coordinate(cache.layer, kPartQuery, cache.first_query_head + head));
    std::uint64_t word = (row_word(row_key, index) & kKeep) | kSet;
    if (2 * index + 1 >= head_size) word &= 0xFFFFFFFFull;
    if (2 * index >= head_size) word = 0;
    float* row = p.queries + item.query_begin + std::int64_t(head) * row_floats;
    reinterpret_cast<std::uint64_t*>(row)[index] = word;
  }
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
