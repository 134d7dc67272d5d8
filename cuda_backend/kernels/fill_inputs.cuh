// The inputs of a layer, made from content ids by rule (1) of sim/protocol/backend.h. They stand
// for the model's projections: what a cache kernel gets is a contiguous row per token and head.
#pragma once

#include "cuda_backend/kernels/words.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

// Grid: flat over (token, head, vector or word); a thread makes it for K and for V.
// kVectors: rows are multiples of 16 bytes, an item is 16 bytes; otherwise an item is one word, the
// last of a row cut short.
template <bool kVectors>
__global__ void fill_rows_kernel(FillRowsParams p, Divisor items_per_row, Divisor num_kv_heads,
                                 std::int32_t unit) {
  const std::uint32_t count = p.num_tokens * num_kv_heads.value * items_per_row.value;
  for (std::uint32_t i = first_item(); i < count; i += item_stride()) {
    const std::uint32_t row = divide(i, items_per_row);
    const std::uint32_t index = i - row * items_per_row.value;
    const std::uint32_t token = divide(row, num_kv_heads);
    const std::uint32_t head = row - token * num_kv_heads.value;
    const std::uint64_t content = p.contents[token];
    for (std::int32_t part = 0; part < p.num_parts; ++part) {
      const std::uint64_t row_key =
          mix(content ^ coordinate(p.layer, p.first_part + part, p.first_head + head));
      std::byte* out = (part == 0 ? p.key : p.value) + std::int64_t(row) * p.row_bytes;
      if constexpr (kVectors) {
        const std::uint64_t low = (row_word(row_key, 2 * index) & p.keep_mask) | p.set_mask;
        const std::uint64_t high = (row_word(row_key, 2 * index + 1) & p.keep_mask) | p.set_mask;
        *reinterpret_cast<simt::vec16*>(out + 16 * std::int64_t(index)) = join_words(low, high);
      } else {
        const std::uint64_t word = (row_word(row_key, index) & p.keep_mask) | p.set_mask;
        const std::int32_t left = p.row_bytes - 8 * std::int32_t(index);
        store_word(out + 8 * std::int64_t(index), word, left < 8 ? left : 8, unit);
      }
    }
  }
}

// The query rows of attention, made from content ids by rule (1) of sim/protocol/backend.h: fp32,
// whatever the cache holds.
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
