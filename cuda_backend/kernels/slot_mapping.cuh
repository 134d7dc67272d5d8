// Slot mapping: where the token at a position of a row goes, looked up in the group's own block
// table. slot = kernel_block_id * kernel_block_size + position % kernel_block_size, which is the
// same number as block_id * block_size + position % block_size. Tokens past the live ones (a
// padded batch) get pad_slot.
//
// Under context parallelism a block of the table stands for a block on each of the ranks: its
// tokens are dealt out in runs of `interleave`, and those of other ranks get pad_slot.
#pragma once

#include "cuda_backend/kernels/words.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

// Grid: x covers num_padded_tokens, y is the group.
__global__ void slot_mapping_kernel(SlotMappingParams p) {
  const std::int32_t group = blockIdx.y;
  Slot* slots = p.slots + group * p.slots_stride;
  const GroupTable table = p.groups[group];
  const std::int64_t width = std::int64_t(table.width) * table.blocks_per_kv_block;
  const std::int32_t num_tokens = p.num_live_tokens != nullptr ? *p.num_live_tokens : p.num_tokens;
  for (std::uint32_t token = first_item(); token < std::uint32_t(p.num_padded_tokens);
       token += item_stride()) {
    if (token >= std::uint32_t(num_tokens) || width == 0) {
      slots[token] = p.pad_slot;
      continue;
    }
    const std::int32_t position = p.positions[token];
    const std::int64_t tokens_in_block = std::int64_t(table.slot_block_size) * p.context_ranks;
    const std::int64_t offset = position % tokens_in_block;
    const std::int64_t run = offset / p.interleave;
    if (run % p.context_ranks != p.context_rank) {
      slots[token] = p.pad_slot;
      continue;
    }
    const std::int64_t index = position / tokens_in_block;
    const Slot block = table.kernel_entries[p.token_rows[token] * width + index];
    slots[token] = block * table.slot_block_size + run / p.context_ranks * p.interleave +
                   offset % p.interleave;
  }
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
