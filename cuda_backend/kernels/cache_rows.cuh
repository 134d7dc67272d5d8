// K/V rows into the paged cache and back, through a slot mapping. Moves only: rows are bytes,
// whatever their dtype, and NHD, HND, MLA, hidden states and padded pages differ in nothing but
// strides.
//
// 1. A slot below zero is skipped. 2. Bytes between rows (padding) are neither read nor written.
// 3. Unit is the widest access that base, strides and row size all allow (RowCache::unit_bytes).
#pragma once

#include "cuda_backend/kernels/words.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

// The row that a token makes complete; below zero: it makes none, or its slot is padding.
__device__ __forceinline__ Slot row_of_slot(Slot slot, const Divisor& tokens_per_row) {
  if (slot < 0 || tokens_per_row.value == 1) return slot;
  const Slot rows = divide_slot(slot + 1, tokens_per_row);  // that end with the token or before
  return rows * tokens_per_row.value == slot + 1 ? rows - 1 : -1;
}

// Planted here because no parameter can say either: 32 bits for an address that is worked out here,
// and two CTAs of one launch at one row.
enum class WriteDefect { none, offset_int32, race };

// Grid: flat over (token, head, unit); a thread moves its unit of K and of V.
template <class Unit, WriteDefect kDefect>
__global__ void write_rows_kernel(WriteRowsParams p, Divisor units_per_row, Divisor num_kv_heads) {
  const RowCache& cache = p.cache;
  const std::uint32_t num_tokens = p.num_tokens + (kDefect == WriteDefect::race ? 1 : 0);
  const std::uint32_t count = num_tokens * num_kv_heads.value * units_per_row.value;
  for (std::uint32_t i = first_item(); i < count; i += item_stride()) {
    const std::uint32_t row = divide(i, units_per_row);
    std::int64_t token = divide(row, num_kv_heads);
    const std::int64_t head = row - token * num_kv_heads.value;
    const std::int64_t unit_at = std::int64_t(i - row * units_per_row.value) * sizeof(Unit);
    std::int64_t source = std::int64_t(row) * cache.row_bytes + unit_at;
    if constexpr (kDefect == WriteDefect::race) {
      if (token == p.num_tokens) {  // once more: the last token's row, to the first token's slot
        token = 0;
        source -= std::int64_t(num_kv_heads.value) * cache.row_bytes;
      }
    }
    const Slot slot = row_of_slot(p.slots[token], cache.tokens_per_row);
    if (slot < 0) continue;
    const std::int64_t block = divide_slot(slot, cache.block_size);
    const std::int64_t offset = slot - block * cache.block_size.value;
    std::byte* target = row_address(cache, block, offset, head) + unit_at;
    if constexpr (kDefect == WriteDefect::offset_int32) {
      const auto wrapped =
          static_cast<std::int32_t>(std::uint32_t(block) * std::uint32_t(cache.block_stride));
      target = row_address(cache, 0, offset, head) + wrapped + unit_at;
    }
    *reinterpret_cast<Unit*>(target) = *reinterpret_cast<const Unit*>(p.key + source);
    if (cache.num_parts == 2)
      *reinterpret_cast<Unit*>(target + cache.part_stride) =
          *reinterpret_cast<const Unit*>(p.value + source);
  }
}

// Grid: as above. Extraction of hidden states, and any other gather of rows into contiguous memory.
template <class Unit>
__global__ void gather_rows_kernel(GatherRowsParams p, Divisor units_per_row,
                                   Divisor num_kv_heads) {
  const RowCache& cache = p.cache;
  const std::uint32_t count = p.num_tokens * num_kv_heads.value * units_per_row.value;
  for (std::uint32_t i = first_item(); i < count; i += item_stride()) {
    const std::uint32_t row = divide(i, units_per_row);
    const std::uint32_t token = divide(row, num_kv_heads);
    const std::int64_t head = row - token * num_kv_heads.value;
    const std::int64_t unit_at = std::int64_t(i - row * units_per_row.value) * sizeof(Unit);
    const Slot slot = p.slots[token];
    if (slot < 0) continue;
    const std::int64_t block = divide_slot(slot, cache.block_size);
    const std::byte* source =
        row_address(cache, block, slot - block * cache.block_size.value, head) + unit_at;
    const std::int64_t target = std::int64_t(row) * cache.row_bytes + unit_at;
    *reinterpret_cast<Unit*>(p.key + target) = *reinterpret_cast<const Unit*>(source);
    if (cache.num_parts == 2)
      *reinterpret_cast<Unit*>(p.value + target) =
          *reinterpret_cast<const Unit*>(source + cache.part_stride);
  }
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
