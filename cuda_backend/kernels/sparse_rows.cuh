// Rows of host pages between the host, resident pages and hot regions: rule (25) of
// sim/protocol/backend.h.
//
// 1. A slot is looked up by position and valid only if it holds that host row. So clearing `held`
//    empties a region.
// 2. One CTA works on one request's region. Its threads share the positions; one thread assigns
//    slots, in order.
#pragma once

#include "cuda_backend/kernels/words.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

__device__ __forceinline__ void copy_row(std::byte* to, const std::byte* from,
                                         const AwayRows& rows) {
  for (std::int64_t at = 8 * std::int64_t(threadIdx.x); at < rows.row_bytes; at += 8 * blockDim.x) {
    const std::int64_t left = rows.row_bytes - at;
    const std::int32_t bytes = left < 8 ? std::int32_t(left) : 8;
    store_word(to + at, load_word(from + at, bytes, rows.unit_bytes), bytes, rows.unit_bytes);
  }
}

// Grid: x is the token, y the layer; threads share the row.
[[maybe_unused]] static __global__ void mirror_rows_kernel(MirrorRowsParams p) {
  const MirrorLayer layer = p.layers[blockIdx.y];
  const AwayRows rows = p.away[layer.layer];
  const Slot slot = layer.slots[blockIdx.x];
  if (slot < 0) return;
  std::int32_t begin = layer.begin, end = layer.end;  // of those that begin at the slot or before
  while (begin < end) {
    const std::int32_t middle = begin + (end - begin) / 2;
    if (p.items[middle].first_row <= slot) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  if (begin == layer.begin) return;
  const RowMirrorItem item = p.items[begin - 1];
  if (slot >= item.first_row + item.num_rows) return;
  const std::int64_t block = divide_slot(slot, rows.block_size);
  const std::byte* from = layer.base + block * layer.block_stride +
                          (slot - block * rows.block_size.value) * rows.row_bytes;
  copy_row(host_row_address(rows, item.host_row + (slot - item.first_row)), from, rows);
}

// Grid: flat over (row, slot).
[[maybe_unused]] static __global__ void clear_regions_kernel(ClearRegionsParams p) {
  const std::uint32_t count = std::uint32_t(p.num_rows) * std::uint32_t(p.num_slots);
  for (std::uint32_t i = first_item(); i < count; i += item_stride()) {
    const std::int32_t slot = i % p.num_slots;
    const std::int64_t at = std::int64_t(p.rows[i / p.num_slots]) * p.num_slots + slot;
    p.held[at] = -1;
    p.order[at] = slot;
  }
}

// Grid: one CTA for each read.
[[maybe_unused]] static __global__ void hot_reads_kernel(HotReadParams p) {
  const HotReadItem read = p.reads[blockIdx.x];
  const AwayRows& rows = p.away[0];
  const std::int32_t number = p.read_number + std::int32_t(blockIdx.x);
  const std::int64_t region = std::int64_t(read.row) * rows.num_slots;
  std::int32_t* held = p.held + region;
  std::int32_t* used = p.used + region;
  std::int32_t* order = p.order + region;
  std::int32_t* places = p.places + std::int64_t(read.row) * rows.num_positions;
  for (std::int32_t i = threadIdx.x; i < read.num_positions; i += blockDim.x) {
    const std::int32_t position = p.positions[read.first + i];
    const auto host_row = std::int32_t(host_row_of(rows, read.row, position));
    const std::int32_t slot = places[position];
    const bool is_held = slot >= 0 && held[slot] == host_row;
    if (is_held) used[slot] = number;
    p.swaps[read.first + i] = {read.row, is_held ? -1 : host_row, is_held ? slot : -1};
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  std::int32_t next = 0;
  for (std::int32_t i = 0; i < read.num_positions; ++i) {
    HotSwap& swap = p.swaps[read.first + i];
    if (swap.host_row < 0) continue;
    while (used[order[next]] == number) ++next;
    swap.slot = order[next++];
    used[swap.slot] = number;
    held[swap.slot] = swap.host_row;
    places[p.positions[read.first + i]] = swap.slot;
  }
  std::int32_t kept = 0;
  for (std::int32_t i = 0; i < rows.num_slots; ++i)
    if (used[order[i]] != number) order[kept++] = order[i];
  for (std::int32_t i = 0; i < read.num_positions && kept < rows.num_slots; ++i)
    order[kept++] = p.swaps[read.first + i].slot;
}

// Grid: x is the swap, y the layer; threads share the row.
[[maybe_unused]] static __global__ void swap_rows_kernel(SwapRowsParams p) {
  const HotSwap swap = p.swaps[blockIdx.x];
  if (swap.host_row < 0) return;
  const AwayRows rows = p.away[blockIdx.y];
  copy_row(hot_row_address(rows, swap.row, swap.slot), host_row_address(rows, swap.host_row), rows);
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
