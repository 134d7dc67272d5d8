// Rows of host pages between the host, resident pages and hot regions: rule (25) of
// sim/protocol/backend.h.
//
// 1. A slot is looked up by position and valid only if it holds that host row. So clearing `held`
//    empties a region.
// 2. One warp works on one request's region. The k-th position that is not held takes the k-th
//    slot, in the order of use, that the read does not use.
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

inline constexpr std::int32_t kLaneEntries = 4, kWarpEntries = 32 * kLaneEntries;

// The lane's entry n of kWarpEntries from `first` on.
__device__ __forceinline__ std::int32_t own_entry(std::int32_t first, int n) {
  return first + 32 * n + std::int32_t(threadIdx.x);
}

// How many of the warp's flags are set, and before each of the lane's own, in the order of entries.
__device__ __forceinline__ std::int32_t count_flags(std::int32_t (&before)[kLaneEntries],
                                                    const bool (&flags)[kLaneEntries]) {
  std::int32_t count = 0;
  SIMT_UNROLL
  for (int n = 0; n < kLaneEntries; ++n) {
    const unsigned set = __ballot_sync(0xffffffffu, flags[n]);
    before[n] = count + __popc(set & ((1u << threadIdx.x) - 1));
    count += __popc(set);
  }
  return count;
}

struct HotRegion {
  std::int32_t *held, *used, *order, *places;
};

// Looks the positions up, marks the slots of those that are held as used, and counts the others.
__device__ __forceinline__ std::int32_t find_held(const HotReadParams& p, const HotReadItem& read,
                                                  const HotRegion& region, std::int32_t number) {
  std::int32_t missed = 0;
  for (std::int32_t first = 0; first < read.num_positions; first += kWarpEntries) {
    bool is_missed[kLaneEntries] = {};
    SIMT_UNROLL
    for (int n = 0; n < kLaneEntries; ++n) {
      const std::int32_t i = own_entry(first, n);
      if (i >= read.num_positions) continue;
      const std::int32_t position = p.positions[read.first + i];
      const auto host_row = std::int32_t(host_row_of(p.away[0], read.row, position));
      const std::int32_t slot = region.places[position];
      is_missed[n] = slot < 0 || region.held[slot] != host_row;
      if (!is_missed[n]) region.used[slot] = number;
      p.swaps[read.first + i] = {read.row, is_missed[n] ? host_row : -1, -1};
    }
    std::int32_t before[kLaneEntries];
    missed += count_flags(before, is_missed);
  }
  return missed;
}

// Leaves the first `missed` slots that the read does not use in its swaps, by their number, and the
// others at the front of `order`; returns how many these are. A slot moves to the front or stays.
__device__ __forceinline__ std::int32_t take_slots(const HotReadParams& p, const HotReadItem& read,
                                                   const HotRegion& region, std::int32_t number,
                                                   std::int32_t missed) {
  const std::int32_t num_slots = p.away[0].num_slots;
  std::int32_t found = 0;
  for (std::int32_t first = 0; first < num_slots; first += kWarpEntries) {
    std::int32_t slots[kLaneEntries] = {}, before[kLaneEntries];
    bool is_free[kLaneEntries] = {};
    SIMT_UNROLL
    for (int n = 0; n < kLaneEntries; ++n) {
      const std::int32_t i = own_entry(first, n);
      if (i >= num_slots) continue;
      slots[n] = region.order[i];
      is_free[n] = region.used[slots[n]] != number;
    }
    const std::int32_t count = count_flags(before, is_free);
    __syncwarp();
    SIMT_UNROLL
    for (int n = 0; n < kLaneEntries; ++n) {
      const std::int32_t at = found + before[n];
      if (!is_free[n]) continue;
      if (at < missed)
        p.swaps[read.first + at].slot = slots[n];
      else
        region.order[at - missed] = slots[n];
    }
    found += count;
  }
  return found - missed;
}

// Grid: one CTA of one warp for each read.
[[maybe_unused]] static __global__ void hot_reads_kernel(HotReadParams p) {
  const HotReadItem read = p.reads[blockIdx.x];
  const AwayRows& rows = p.away[0];
  const std::int32_t number = p.read_number + std::int32_t(blockIdx.x);
  const std::int64_t at = std::int64_t(read.row) * rows.num_slots;
  const HotRegion region{p.held + at, p.used + at, p.order + at,
                         p.places + std::int64_t(read.row) * rows.num_positions};
  std::int32_t left = find_held(p, read, region, number);
  __syncwarp();
  const std::int32_t kept = take_slots(p, read, region, number, left);
  __syncwarp();
  // From the last position on: the slot of the k-th one missed lies in swap k, which comes later.
  const std::int32_t last = (read.num_positions - 1) / kWarpEntries * kWarpEntries;
  for (std::int32_t first = last; first >= 0 && read.num_positions > 0; first -= kWarpEntries) {
    bool is_missed[kLaneEntries] = {};
    std::int32_t before[kLaneEntries], slots[kLaneEntries] = {};
    SIMT_UNROLL
    for (int n = 0; n < kLaneEntries; ++n) {
      const std::int32_t i = own_entry(first, n);
      is_missed[n] = i < read.num_positions && p.swaps[read.first + i].host_row >= 0;
    }
    left -= count_flags(before, is_missed);
    SIMT_UNROLL
    for (int n = 0; n < kLaneEntries; ++n) {
      const std::int32_t i = own_entry(first, n);
      if (i < read.num_positions)
        slots[n] = is_missed[n] ? p.swaps[read.first + left + before[n]].slot
                                : region.places[p.positions[read.first + i]];
    }
    __syncwarp();
    SIMT_UNROLL
    for (int n = 0; n < kLaneEntries; ++n) {
      const std::int32_t i = own_entry(first, n);
      if (i >= read.num_positions) continue;
      HotSwap& swap = p.swaps[read.first + i];
      swap.slot = slots[n];
      if (kept + i < rows.num_slots) region.order[kept + i] = slots[n];
      if (!is_missed[n]) continue;
      region.used[slots[n]] = number;
      region.held[slots[n]] = swap.host_row;
      region.places[p.positions[read.first + i]] = slots[n];
    }
  }
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
