// Block tables on the device: every group has a table of manager block ids, and, where its
// attention kernels address smaller blocks, a table of kernel block ids derived from it entry by
// entry: kernel block id = block_id * kernel_block_stride + i, i below blocks_per_kv_block.
//
// 1. Entries past a row's length are what they were. 2. Entries before an append's first stay.
#pragma once

#include "cuda_backend/kernels/words.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

// kSplit false is KernelDefect::table_unsplit, which is planted here because kernel block ids are
// worked out here and come from nowhere else.
template <bool kSplit>
__device__ __forceinline__ void set_entry(const GroupTable& table, std::int32_t row,
                                          std::int32_t index, std::int32_t block) {
  table.entries[std::int64_t(row) * table.width + index] = block;
  const std::int32_t split = table.blocks_per_kv_block, stride = table.kernel_block_stride;
  if (stride == 1) return;  // kernel_entries is entries
  std::int32_t* kernel_entries =
      table.kernel_entries + (std::int64_t(row) * table.width + index) * split;
  for (std::int32_t i = 0; i < split; ++i) kernel_entries[i] = kSplit ? block * stride + i : block;
}

// Grid: (rows to clear * groups) threads.
__global__ void clear_rows_kernel(TableClearParams p) {
  const std::uint32_t count = p.num_rows * p.num_groups;
  for (std::uint32_t i = first_item(); i < count; i += item_stride()) {
    const std::int32_t group = i % p.num_groups;
    p.groups[group].lengths[p.rows[i / p.num_groups]] = 0;
  }
}

// Grid: one CTA for each append; its threads share the entries.
template <bool kSplit>
__global__ void append_entries_kernel(TableAppendParams p) {
  const TableAppend append = p.appends[blockIdx.x];
  const GroupTable table = p.groups[append.group];
  for (std::uint32_t i = threadIdx.x; i < append.count; i += blockDim.x)
    set_entry<kSplit>(table, append.row, append.first + i, p.block_ids[append.begin + i]);
  if (threadIdx.x == 0) table.lengths[append.row] = append.first + append.count;
}

// Grid: one thread for each edit.
template <bool kSplit>
__global__ void edit_entries_kernel(TableEditParams p) {
  for (std::uint32_t i = first_item(); i < std::uint32_t(p.num_edits); i += item_stride()) {
    const TableEntry edit = p.edits[i];
    set_entry<kSplit>(p.groups[edit.group], edit.row, edit.index, edit.block);
  }
}

// Tokens without a slot in a group: a ring keeps the last of a step, and what a hit holds is left
// alone while only windows are computed again.
__device__ __forceinline__ bool is_left_out(const SlotMappingParams& p, const GroupTable& table,
                                            std::int32_t row, std::int32_t position) {
  if (p.reach == nullptr) return false;
  const RowReach reach = p.reach[row];
  if (table.is_ring) return position + table.slot_block_size < reach.end;
  return !table.is_replayed && reach.replay_start > 0 && position >= reach.replay_start &&
         position < reach.replay_start + p.num_replayed_tokens;
}

// Slot mapping: where the token at a position of a row goes, looked up in the group's own block
// table. slot = kernel_block_id * kernel_block_size + position % kernel_block_size, which is the
// same number as block_id * block_size + position % block_size. Tokens past the live ones (a
// padded batch) get pad_slot.
//
// Under context parallelism a block of the table stands for a block on each of the ranks: its
// tokens are dealt out in runs of `interleave`, and those of other ranks get pad_slot. Every rank
// has a slot for each token of a table that is whole.
//
// Grid: x covers num_padded_tokens, y is the group.
__global__ void slot_mapping_kernel(SlotMappingParams p) {
  const std::int32_t group = blockIdx.y;
  Slot* slots = p.slots + group * p.slots_stride;
  const GroupTable table = p.groups[group];
  const std::int64_t width = std::int64_t(table.width) * table.blocks_per_kv_block;
  const std::int32_t num_tokens = p.num_live_tokens != nullptr ? *p.num_live_tokens : p.num_tokens;
  for (std::uint32_t token = first_item(); token < std::uint32_t(p.num_padded_tokens);
       token += item_stride()) {
    if (token >= std::uint32_t(num_tokens) || width == 0 || table.is_hot ||
        table.is_encoder != p.of_encoders) {
      slots[token] = p.pad_slot;
      continue;
    }
    const std::int32_t position = p.positions[token];
    if (is_left_out(p, table, p.token_rows[token], position)) {
      slots[token] = p.pad_slot;
      continue;
    }
    if (table.is_ring) {
      const Slot ring = table.kernel_entries[p.token_rows[token] * width];
      slots[token] = ring * table.slot_block_size + position % table.slot_block_size;
      continue;
    }
    if (table.is_whole) {
      const std::int32_t index = position / table.slot_block_size;
      const Slot block = table.kernel_entries[p.token_rows[token] * width + index];
      slots[token] = block * table.slot_block_size + position % table.slot_block_size;
      continue;
    }
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
