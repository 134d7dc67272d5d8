// Moves K/V rows into the paged cache and back, through a slot mapping. Rows are bytes of any
// dtype; NHD, HND, MLA, hidden states and padded pages differ only in strides.
//
// 1. A slot below zero is skipped. 2. Bytes between rows (padding) are neither read nor written.
// 3. Unit is the widest access that addresses, strides and row size allow on both sides.
#pragma once

#include "cuda_backend/kernels/number_formats.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

struct SlotPlace {
  std::int64_t block, offset;
};
__device__ __forceinline__ SlotPlace place_of_slot(Slot slot, const Divisor& block_size) {
  const std::int64_t block = divide_slot(slot, block_size);
  return {block, slot - block * block_size.value};
}

// Grid: flat over (source row, head, unit) of parts of one shape; a thread moves its unit of every
// part.
template <class Unit>
__global__ void move_rows_kernel(WritePartsParams p, Divisor units_per_row, Divisor num_heads) {
  const std::uint32_t count = p.num_rows * num_heads.value * units_per_row.value;
  for (std::uint32_t i = first_item(); i < count; i += item_stride()) {
    const std::uint32_t row = divide(i, units_per_row), source = divide(row, num_heads);
    const std::int64_t head = row - source * num_heads.value;
    const std::int64_t unit_at = std::int64_t(i - row * units_per_row.value) * sizeof(Unit);
    const Slot slot = slot_of_row(p.token_rows, p.slots, source);
    if (slot < 0) continue;
    const SlotPlace place = place_of_slot(slot, p.parts[0].to.block_size);
    for (std::int32_t i_part = 0; i_part < p.num_parts; ++i_part) {
      const PartWrite& part = p.parts[i_part];
      std::byte* target = part_row(part.to, place.block, place.offset, head) + unit_at;
      *reinterpret_cast<Unit*>(target) = *reinterpret_cast<const Unit*>(
          part.source + source * part.source_row_stride + head * part.source_head_stride + unit_at);
    }
  }
}

// Gathers rows into contiguous memory. Grid: flat over (token, head, unit).
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
    const SlotPlace place = place_of_slot(slot, cache.block_size);
    const std::byte* source = row_address(cache, place.block, place.offset, head) + unit_at;
    const std::int64_t target = std::int64_t(row) * cache.row_bytes + unit_at;
    *reinterpret_cast<Unit*>(p.key + target) = *reinterpret_cast<const Unit*>(source);
    if (cache.num_parts == 2)
      *reinterpret_cast<Unit*>(p.value + target) =
          *reinterpret_cast<const Unit*>(source + cache.part_stride);
  }
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
