// The inputs of a layer, made from content ids by rule (1) of sim/protocol/backend.h. They replace
// the model's projections: a contiguous row per source row and head.
#pragma once

#include "cuda_backend/kernels/words.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

// Grid: flat over (source row, head, item); a thread makes its item of K and of V.
// kVectors: rows are multiples of 16 bytes, an item is 16 bytes. Otherwise an item is one word; the
// last word of a row may be shorter.
template <bool kVectors>
__global__ void fill_rows_kernel(FillRowsParams p, Divisor items_per_row, Divisor num_kv_heads,
                                 std::int32_t unit) {
  const std::uint32_t count = p.num_rows * num_kv_heads.value * items_per_row.value;
  for (std::uint32_t i = first_item(); i < count; i += item_stride()) {
    const std::uint32_t row = divide(i, items_per_row);
    const std::uint32_t index = i - row * items_per_row.value;
    const std::uint32_t source = divide(row, num_kv_heads);
    const std::uint32_t head = row - source * num_kv_heads.value;
    const std::uint64_t content = content_of_row(p.token_rows, p.contents, source);
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

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
