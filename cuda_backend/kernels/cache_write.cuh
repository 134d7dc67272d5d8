// Writes K and V (or latent and rope) of a step's tokens into a paged cache of any layout, element
// by element or quantised.
//
// 1. A slot below zero is skipped. 2. Bytes outside the written rows do not change.
// 3. Scaling none moves bits; per_tensor stores round(value / scale); per_token_head takes
//    scale = max(largest |value| of the row / largest number of the format, 1e-6) and stores
//    round(value * (1 / scale)), each operation rounded in fp32. vLLM has both.
// REQUIRES: the slots of a launch are distinct. The checker reports the race otherwise.
#pragma once

#include "cuda_backend/kernels/number_formats.cuh"

namespace lockstep::cuda {

// Moves K/V rows into the paged cache and back, through a slot mapping. Rows are bytes of any
// dtype; NHD, HND, MLA, hidden states and padded pages differ only in strides.
//
// 1. A slot below zero is skipped. 2. Bytes between rows (padding) are neither read nor written.
// 3. Unit is the widest access that addresses, strides and row size allow on both sides.

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

namespace SIMT_VARIANT {

template <int kItem>
__device__ __forceinline__ void quantise(std::uint32_t (&bits)[kItem], const PartWrite& part,
                                         float scale, float inverse) {
  SIMT_UNROLL
  for (int i = 0; i < kItem; ++i) {
    const float value = decode(bits[i], part.source_dtype);
    const float scaled = part.to.scaling == Scaling::per_tensor ? value / scale : value * inverse;
    bits[i] = encode(scaled, part.to.dtype);
  }
}

// Divisors that map an item to its source row and head, per part.
struct PartDivisors {
  Divisor items_per_row[2], heads[2];
};

// Grid: x flat over (source row, head, item), y is the part. No part scales per token and head.
template <int kItem>
__global__ void write_parts_kernel(WritePartsParams p, PartDivisors by) {
  const PartWrite& part = p.parts[blockIdx.y];
  const Divisor items_per_row = by.items_per_row[blockIdx.y], heads = by.heads[blockIdx.y];
  const std::uint32_t count = p.num_rows * heads.value * items_per_row.value;
  const float scale = part.to.scaling == Scaling::none ? 1.0f : *part_scale(part.to, 0, 0, 0);
  for (std::uint32_t i = first_item(); i < count; i += item_stride()) {
    const std::uint32_t row = divide(i, items_per_row), source = divide(row, heads);
    const std::uint32_t head = row - source * heads.value;
    const std::int32_t first = std::int32_t(i - row * items_per_row.value) * kItem;
    const Slot slot = slot_of_row(p.token_rows, p.slots, source);
    if (slot < 0) continue;
    const SlotPlace place = place_of_slot(slot, part.to.block_size);
    const std::int32_t source_bytes = element_bytes(part.source_dtype);
    std::uint32_t bits[kItem];
    load_bits<kItem>(bits,
                     part.source + source * part.source_row_stride +
                         head * part.source_head_stride + std::int64_t(first) * source_bytes,
                     source_bytes);
    if (part.to.scaling != Scaling::none) quantise<kItem>(bits, part, scale, 0.0f);
    store_bits<kItem>(
        part_element(part.to, part_row(part.to, place.block, place.offset, head), first), bits,
        element_bytes(part.to.dtype));
  }
}

template <int kItem>
__device__ __forceinline__ float largest_of_row(const PartWrite& part, const std::byte* source) {
  const std::int32_t bytes = element_bytes(part.source_dtype);
  float largest = 0.0f;
  for (std::int32_t at = threadIdx.x * kItem; at < part.to.head_size; at += 32 * kItem) {
    std::uint32_t bits[kItem];
    load_bits<kItem>(bits, source + std::int64_t(at) * bytes, bytes);
    SIMT_UNROLL
    for (int i = 0; i < kItem; ++i)
      largest = fmaxf(largest, fabsf(decode(bits[i], part.source_dtype)));
  }
  return simt::warp_max(largest);
}

// Grid: x is the source row, y the head, z the part. A CTA is one warp, which scales and writes one
// row.
template <int kItem>
__global__ void quantise_rows_kernel(WritePartsParams p) {
  const PartWrite& part = p.parts[blockIdx.z];
  const std::uint32_t source_row = blockIdx.x;
  const std::int32_t head = blockIdx.y;
  const Slot slot = slot_of_row(p.token_rows, p.slots, source_row);
  if (head >= part.to.num_heads || slot < 0) return;
  const SlotPlace place = place_of_slot(slot, part.to.block_size);
  const std::byte* source =
      part.source + source_row * part.source_row_stride + head * part.source_head_stride;
  const float largest = largest_of_row<kItem>(part, source);
  const float scale = fmaxf(largest / largest_number(part.to.dtype), 1e-6f);
  if (threadIdx.x == 0) *part_scale(part.to, place.block, place.offset, head) = scale;
  std::byte* row = part_row(part.to, place.block, place.offset, head);
  const std::int32_t source_bytes = element_bytes(part.source_dtype);
  for (std::int32_t at = threadIdx.x * kItem; at < part.to.head_size; at += 32 * kItem) {
    std::uint32_t bits[kItem];
    load_bits<kItem>(bits, source + std::int64_t(at) * source_bytes, source_bytes);
    quantise<kItem>(bits, part, scale, 1.0f / scale);
    store_bits<kItem>(part_element(part.to, row, at), bits, element_bytes(part.to.dtype));
  }
}

}  // namespace SIMT_VARIANT

}  // namespace lockstep::cuda
