// Slots of a draft model's pass: rule (24) of sim/protocol/backend.h. The first pass receives its
// positions. Each later pass advances the positions of the previous one on the device, because the
// host learns the number of rejected drafts only after the step.
//
// 1. Positions are clamped to last_position. 2. No entry past a row's length is read: a position
//    without an entry has no slot. 3. p.positions holds the positions of this pass afterwards.
#pragma once

#include "cuda_backend/kernels/words.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

// Grid: x covers the pass's tokens; a thread reads the tables of all groups.
__global__ void draft_slots_kernel(DraftSlotsParams p) {
  for (std::uint32_t i = first_item(); i < std::uint32_t(p.num_tokens); i += item_stride()) {
    std::int32_t position = p.positions[i] + p.advance;
    if (position > p.last_position) position = p.last_position;
    p.positions[i] = position;
    const std::int32_t row = p.rows[i];
    for (std::int32_t group = 0; group < p.num_groups; ++group) {
      const GroupTable table = p.groups[group];
      const std::int32_t index = position / table.kernel_block_size;
      const std::int32_t end = table.lengths[row] * table.blocks_per_kv_block;
      Slot slot = p.pad_slot;
      if (index < end) {
        const std::int64_t width = std::int64_t(table.width) * table.blocks_per_kv_block;
        slot = Slot{table.kernel_entries[row * width + index]} * table.kernel_block_size +
               (position - index * table.kernel_block_size);
      }
      p.slots[group * p.slots_stride + i] = slot;
    }
  }
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
