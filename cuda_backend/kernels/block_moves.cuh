// Whole blocks: zeroes, copies and poisons their regions, and advances their states.
//
// 1. Bytes outside a region are not touched. Regions of zero and copy are what layers use, regions
//    of poison are whole pages.
// 2. Padding on either side of a copy is neither read nor written. A byte is found by its block and
//    its offset in the block: a padded cache is not one long array (vLLM pull request 39949).
// 3. Undefined bytes are copied as undefined.
// 4. Blocks of one launch are distinct, and no target of a copy is a source of another.
#pragma once

#include "cuda_backend/kernels/words.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

// The threads of all CTAs along z share a region, unit by unit.
__device__ __forceinline__ std::int64_t first_in_region() {
  return std::int64_t(blockIdx.z) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ std::int64_t step_in_region() {
  return std::int64_t(gridDim.z) * blockDim.x;
}

template <class Unit>
__device__ __forceinline__ void zero_units(std::byte* at, std::int64_t size_bytes) {
  const std::int64_t count = size_bytes / std::int64_t(sizeof(Unit));
  for (std::int64_t i = first_in_region(); i < count; i += step_in_region())
    reinterpret_cast<Unit*>(at)[i] = Unit{};
}

// Grid: x is the block to zero, y the region of its group, z shares the region.
[[maybe_unused]] static __global__ void zero_blocks_kernel(ZeroBlocksParams p) {
  const GroupBlockItem item = p.items[blockIdx.x];
  const RegionRange range = p.groups[item.group];
  if (std::int32_t(blockIdx.y) >= range.end - range.begin) return;
  const BlockRegion region = p.regions[range.begin + blockIdx.y];
  std::byte* at = region.base + item.block * region.block_stride;
  with_unit(region.unit_bytes,
            [&](auto unit) { zero_units<decltype(unit)>(at, region.size_bytes); });
}

template <class Unit>
__device__ __forceinline__ void copy_units(std::byte* to, const std::byte* from,
                                           std::int64_t size_bytes) {
  const std::int64_t count = size_bytes / std::int64_t(sizeof(Unit));
  for (std::int64_t i = first_in_region(); i < count; i += step_in_region()) {
    if constexpr (sizeof(Unit) == 16) {
      simt::copy16(to + 16 * i, from + 16 * i);
    } else {
      simt::copy_value(reinterpret_cast<Unit*>(to) + i, reinterpret_cast<const Unit*>(from) + i);
    }
  }
}

// Grid: x is the copy, y the region of its group, z shares the region.
[[maybe_unused]] static __global__ void copy_blocks_kernel(CopyBlocksParams p) {
  const BlockCopyItem item = p.items[blockIdx.x];
  const RegionRange range = p.groups[item.group];
  if (std::int32_t(blockIdx.y) >= range.end - range.begin) return;
  const CopyRegion region = p.regions[range.begin + blockIdx.y];
  std::byte* to = region.target + item.target * region.target_stride;
  const std::byte* from = region.source + item.source * region.source_stride;
  with_unit(region.unit_bytes,
            [&](auto unit) { copy_units<decltype(unit)>(to, from, region.size_bytes); });
}

// Grid: x is the block to poison, y the region, z shares the region. Words count from the start of
// the region's page, so a region may start and end inside a word.
[[maybe_unused]] static __global__ void poison_blocks_kernel(PoisonBlocksParams p) {
  PoisonItem item{std::int32_t(blockIdx.x), p.kind_of_all};
  if (p.items != nullptr) item = p.items[blockIdx.x];
  const BlockRegion region = p.regions[blockIdx.y];
  const std::int64_t page_size_bytes = p.page_size_bytes[region.tensor];
  const std::int64_t in_tensor = region.tensor_offset + item.block * region.block_stride;
  const std::int64_t page = in_tensor / page_size_bytes;
  const std::int64_t begin = in_tensor - page * page_size_bytes, end = begin + region.size_bytes;
  std::byte* page_at = region.base + item.block * region.block_stride - begin;
  const std::uint64_t key = mix(0x706F69736F6E0000ull + item.kind) ^
                            mix(std::uint64_t(region.tensor) << 32 | std::uint64_t(page));
  if (region.unit_bytes == 16) {
    for (std::int64_t i = begin / 16 + first_in_region(); i < end / 16; i += step_in_region())
      *reinterpret_cast<simt::vec16*>(page_at + 16 * i) =
          join_words(key ^ (2 * i), key ^ (2 * i + 1));
    return;
  }
  for (std::int64_t i = begin / 8 + first_in_region(); 8 * i < end; i += step_in_region()) {
    const std::int64_t from = 8 * i < begin ? begin : 8 * i;
    const std::int64_t to = 8 * i + 8 > end ? end : 8 * i + 8;
    store_word(page_at + from, (key ^ std::uint64_t(i)) >> (8 * (from - 8 * i)),
               std::int32_t(to - from), region.unit_bytes);
  }
}

// Recurrent states (Mamba, linear attention) as words that every token advances: rule (2) of
// sim/protocol/backend.h. A word depends on all tokens so far, so one missing, extra or wrong token
// changes every word.
//
// 1. source and target may be the same block: one thread reads and writes each word.
// 2. The null block as source is the zero state and is not read.
// 3. A checkpoint receives the word after checkpoint_tokens of the tokens.
inline constexpr std::uint32_t kPartState = 16;

// Grid: x is the update, y the state tensor of its group, z shares the words.
[[maybe_unused]] static __global__ void state_update_kernel(StateUpdateParams p) {
  const StateUpdateItem item = p.items[blockIdx.x];
  if (item.group < 0) return;
  const RegionRange range = p.groups[item.group];
  if (std::int32_t(blockIdx.y) >= range.end - range.begin) return;
  const StateCache state = p.states[range.begin + blockIdx.y];
  const std::byte* from = state.base + item.source * state.page_stride;
  std::byte* to = state.base + item.target * state.page_stride;
  std::byte* checkpoint = state.base + item.checkpoint * state.page_stride;
  const std::uint64_t place = coordinate(state.layer, kPartState + state.state, state.first_head);
  for (std::int64_t i = first_in_region(); 8 * i < state.size_bytes; i += step_in_region()) {
    const std::int64_t left = state.size_bytes - 8 * i;
    const std::int32_t bytes = left < 8 ? std::int32_t(left) : 8;
    std::uint64_t word = 0;
    if (item.source != 0) word = load_word(from + 8 * i, bytes, state.unit_bytes);
    for (std::int32_t n = 0; n < item.num_tokens; ++n) {
      const std::uint64_t content = p.contents[item.first_token + n];
      word = word * 0xD1342543DE82EF95ull + mix(content ^ place ^ std::uint64_t(i));
      if (item.checkpoint != 0 && n + 1 == item.checkpoint_tokens)
        store_word(checkpoint + 8 * i, word, bytes, state.unit_bytes);
    }
    store_word(to + 8 * i, word, bytes, state.unit_bytes);
  }
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
