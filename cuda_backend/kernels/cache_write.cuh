// Writes K and V (or latent and rope) of a step's tokens into a paged cache of any layout, element
// by element or quantised.
//
// 1. A slot below zero is skipped. 2. Bytes outside the written rows do not change.
// 3. Scaling none moves bits; per_tensor stores round(value / scale); per_token_head takes
//    scale = max(largest |value| of the row / largest number of the format, 1e-6) and stores
//    round(value * (1 / scale)), each operation rounded in fp32. vLLM has both.
// REQUIRES: the slots of a launch are distinct. The checker reports the race otherwise.
#pragma once

#include "cuda_backend/kernels/cache_rows.cuh"

namespace lockstep::cuda {
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
