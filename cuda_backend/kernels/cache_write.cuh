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

// Rounds elements of one format to another, value / scale or, where a row has its own, value times
// its inverse.
template <int kItem>
__device__ __forceinline__ void quantise(std::uint32_t (&bits)[kItem], DType from, DType to,
                                         bool divides, float scale) {
  SIMT_UNROLL
  for (int i = 0; i < kItem; ++i) {
    const float value = decode(bits[i], from);
    bits[i] = encode(divides ? value / scale : value * scale, to);
  }
}

// Elements [first, first + kItem) of a row, which may lie in several pieces.
template <int kItem>
__device__ __forceinline__ void store_elements(const PartLayout& part, std::byte* row,
                                               std::int32_t first,
                                               const std::uint32_t (&bits)[kItem],
                                               std::int32_t bytes) {
  std::byte* at = part_element(part, row, first);
  if (part.piece_elements >= kItem || kItem == 1) return store_bits<kItem>(at, bits, bytes);
  SIMT_UNROLL
  for (int i = 0; i < kItem; ++i) {
    const std::uint32_t one[1] = {bits[i]};
    store_bits<1>(at + i * part.piece_stride, one, bytes);
  }
}

// Tokens that neighbouring lanes write the same elements of, where rows lie in pieces: tokens of a
// block are then neighbours in memory.
inline constexpr std::uint32_t kTokensAcross = 32;

// Divisors that map an item to its source row and head, per part.
struct PartDivisors {
  Divisor items_per_row[2], heads[2];
};

// That of the CTA's part. An index would move both to local memory.
__device__ __forceinline__ Divisor of_part(const Divisor (&by)[2]) {
  return blockIdx.y == 0 ? by[0] : by[1];
}

// Grid: x flat over (source row, head, item), y is the part; kAcross: over (kTokensAcross source
// rows, head, item, source row). No part scales per token and head.
template <int kItem, int kFrom, int kTo, bool kAcross>
__global__ void write_parts_kernel(WritePartsParams p, PartDivisors by) {
  const PartWrite& part = p.parts[blockIdx.y];
  const Divisor items_per_row = of_part(by.items_per_row), heads = of_part(by.heads);
  const DType from = format_of<kFrom>(part.source_dtype), to = format_of<kTo>(part.to.dtype);
  const std::int32_t from_bytes = element_bytes(from), to_bytes = element_bytes(to);
  constexpr std::uint32_t kRows = kAcross ? kTokensAcross : 1;
  const std::uint32_t count =
      (p.num_rows + kRows - 1) / kRows * kRows * heads.value * items_per_row.value;
  const bool scales = part.to.scaling != Scaling::none;
  const float scale = scales ? *part_scale(part.to, 0, 0, 0) : 1.0f;
  for (std::uint32_t i = first_item(); i < count; i += item_stride()) {
    const std::uint32_t item = i / kRows, row = divide(item, items_per_row);
    const std::uint32_t rows = divide(row, heads), head = row - rows * heads.value;
    const std::uint32_t source = rows * kRows + i % kRows;
    const std::int32_t first = std::int32_t(item - row * items_per_row.value) * kItem;
    if (kAcross && source >= std::uint32_t(p.num_rows)) continue;
    const Slot slot = slot_of_row(p.token_rows, p.slots, source);
    if (slot < 0) continue;
    const SlotPlace place = place_of_slot(slot, part.to.block_size);
    std::uint32_t bits[kItem];
    load_bits<kItem>(bits,
                     part.source + source * part.source_row_stride +
                         head * part.source_head_stride + std::int64_t(first) * from_bytes,
                     from_bytes);
    if (scales) quantise<kItem>(bits, from, to, true, scale);
    store_elements<kItem>(part.to, part_row(part.to, place.block, place.offset, head), first, bits,
                          to_bytes);
  }
}

// A source row and head that kLanes lanes of a warp write. Every lane has one, in the grid or not:
// reductions need whole warps.
template <int kLanes>
struct SharedRow {
  std::uint32_t source, head;
  std::int32_t lane;
  Slot slot;  // below zero: nothing is written
  __device__ __forceinline__ SharedRow(const WritePartsParams& p, const Divisor& heads)
      : lane(threadIdx.x % kLanes) {
    const std::uint32_t row = first_item() / kLanes;
    source = divide(row, heads);
    head = row - source * heads.value;
    slot = source < std::uint32_t(p.num_rows) ? slot_of_row(p.token_rows, p.slots, source) : -1;
  }
};

// Grid: x flat over (source row, head, lane), y is the part. kLanes lanes scale and write a row;
// a lane takes kItem elements at a time, and keeps the last that it has looked at.
template <int kLanes, int kItem, int kFrom, int kTo>
__global__ void quantise_rows_kernel(WritePartsParams p, PartDivisors by) {
  const PartWrite& part = p.parts[blockIdx.y];
  const SharedRow<kLanes> shared(p, of_part(by.heads));
  const DType from = format_of<kFrom>(part.source_dtype), to = format_of<kTo>(part.to.dtype);
  const std::int32_t bytes = element_bytes(from), size = shared.slot < 0 ? 0 : part.to.head_size;
  const std::byte* source =
      part.source + shared.source * part.source_row_stride + shared.head * part.source_head_stride;
  std::uint32_t bits[kItem] = {};
  float largest = 0.0f;
  for (std::int32_t at = shared.lane * kItem; at < size; at += kLanes * kItem) {
    load_bits<kItem>(bits, source + std::int64_t(at) * bytes, bytes);
    SIMT_UNROLL
    for (int i = 0; i < kItem; ++i) largest = fmaxf(largest, fabsf(decode(bits[i], from)));
  }
  largest = simt::warp_max<float, kLanes>(largest);
  if (shared.slot < 0) return;
  const SlotPlace place = place_of_slot(shared.slot, part.to.block_size);
  const float scale = fmaxf(largest / largest_number(to), 1e-6f), inverse = 1.0f / scale;
  if (shared.lane == 0) *part_scale(part.to, place.block, place.offset, shared.head) = scale;
  std::byte* row = part_row(part.to, place.block, place.offset, shared.head);
  for (std::int32_t at = shared.lane * kItem; at < size; at += kLanes * kItem) {
    if (size > kLanes * kItem) load_bits<kItem>(bits, source + std::int64_t(at) * bytes, bytes);
    quantise<kItem>(bits, from, to, false, inverse);
    store_elements<kItem>(part.to, row, at, bits, element_bytes(to));
  }
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
