// Block tables on the device. Every group has a table of manager block ids. Where its attention
// kernels address smaller blocks, it also has a table of kernel block ids:
// kernel block id = block_id * kernel_block_stride + i, i below blocks_per_kv_block.
//
// 1. Entries past a row's length do not change. 2. An append does not change entries before its
//    first.
#pragma once

#include "cuda_backend/kernels/words.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

__device__ __forceinline__ void set_entry(const GroupTable& table, std::int32_t row,
                                          std::int32_t index, std::int32_t block) {
  table.entries[std::int64_t(row) * table.width + index] = block;
  const std::int32_t split = table.blocks_per_kv_block, stride = table.kernel_block_stride;
  if (table.kernel_entries == table.entries) return;
  std::int32_t* kernel_entries =
      table.kernel_entries + (std::int64_t(row) * table.width + index) * split;
  for (std::int32_t i = 0; i < split; ++i) kernel_entries[i] = block * stride + i;
}

// Grid: (rows to clear * groups) threads.
[[maybe_unused]] static __global__ void clear_rows_kernel(TableClearParams p) {
  const std::uint32_t count = p.num_rows * p.num_groups;
  for (std::uint32_t i = first_item(); i < count; i += item_stride()) {
    const std::int32_t group = i % p.num_groups;
    p.groups[group].lengths[p.rows[i / p.num_groups]] = 0;
  }
}

// Grid: one CTA per append; its threads share the entries.
[[maybe_unused]] static __global__ void append_entries_kernel(TableAppendParams p) {
  const TableAppend append = p.appends[blockIdx.x];
  const GroupTable table = p.groups[append.group];
  for (std::uint32_t i = threadIdx.x; i < append.count; i += blockDim.x)
    set_entry(table, append.row, append.first + i, p.block_ids[append.begin + i]);
  if (threadIdx.x == 0) table.lengths[append.row] = append.first + append.count;
}

// Grid: one thread per edit.
[[maybe_unused]] static __global__ void edit_entries_kernel(TableEditParams p) {
  for (std::uint32_t i = first_item(); i < std::uint32_t(p.num_edits); i += item_stride()) {
    const TableEntry edit = p.edits[i];
    set_entry(p.groups[edit.group], edit.row, edit.index, edit.block);
  }
}

// True for tokens without a slot in a group: a ring keeps only the last tokens of a step, and
// tokens of a hit keep their rows while windows are recomputed.
__device__ __forceinline__ bool is_left_out(const SlotMappingParams& p, const GroupTable& table,
                                            std::int32_t row, std::int32_t position) {
  if (p.reach == nullptr) return false;
  const RowReach reach = p.reach[row];
  if (table.is_ring) return position + table.slot_block_size < reach.end;
  return !table.is_replayed && reach.replay_start > 0 && position >= reach.replay_start &&
         position < reach.replay_start + p.num_replayed_tokens;
}

// Slot mapping: the slot of the token at a position of a row, looked up in the group's own block
// table. slot = kernel_block_id * kernel_block_size + position % kernel_block_size, which equals
// block_id * block_size + position % block_size. Tokens past the live ones (a padded batch) get
// pad_slot.
//
// Under context parallelism an entry stands for one block per rank: its tokens are sharded in runs
// of `interleave`, and tokens of other ranks get pad_slot. Replicated tables (is_whole) have a slot
// for every token.
//
// Grid: x covers num_padded_tokens, y is the group.
[[maybe_unused]] static __global__ void slot_mapping_kernel(SlotMappingParams p) {
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
    const std::int32_t ranks = table.is_whole ? 1 : p.context_ranks;
    const std::int64_t tokens_in_block = std::int64_t(table.slot_block_size) * ranks;
    const std::int64_t offset = position % tokens_in_block;
    const std::int64_t run = offset / p.interleave;
    if (!table.is_whole && run % ranks != p.context_rank) {
      slots[token] = p.pad_slot;
      continue;
    }
    const std::int64_t index = position / tokens_in_block;
    const Slot block = table.kernel_entries[p.token_rows[token] * width + index];
    slots[token] =
        block * table.slot_block_size + run / ranks * p.interleave + offset % p.interleave;
  }
}

// Slots of a draft model's pass: rule (24) of sim/protocol/backend.h. The first pass receives its
// positions. Each later pass advances the positions of the previous one on the device, because the
// host learns the number of rejected drafts only after the step.
//
// 1. Positions are clamped to last_position. 2. No entry past a row's length is read: a position
//    without an entry has no slot. 3. p.positions holds the positions of this pass afterwards.
//
// Grid: x covers the pass's tokens; a thread reads the tables of all groups.
[[maybe_unused]] static __global__ void draft_slots_kernel(DraftSlotsParams p) {
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

// The inputs of a layer, made from content ids by rule (1) of sim/protocol/backend.h. They replace
// the model's projections: a contiguous row per source row and head.

#if KERNELS_HAVE_WIDE_WORDS
[[maybe_unused]] LS_WIDE_WORDS static void fill_eights(const FillRowsParams& p,
                                                       std::uint64_t row_key, std::byte* row) {
  WideWords at = row_key + WideWords{1, 2, 3, 4, 5, 6, 7, 8} * kGolden;
  for (std::int32_t i = 0; i < p.row_bytes; i += 64, at += 8 * kGolden)
    store_wide(row + i, (mix8(at) & p.keep_mask) | p.set_mask);
}
#endif

// Grid: flat over (source row, head, item); a thread makes its item of K and of V.
// kItem: bytes of an item. 0: a whole row, of multiples of 64 bytes; 16: rows are multiples of 16
// bytes; 8: the last word of a row may be shorter.
template <int kItem>
__global__ void fill_rows_kernel(FillRowsParams p, Divisor items_per_row, Divisor num_kv_heads,
                                 std::int32_t unit) {
  const std::uint32_t count = p.num_rows * num_kv_heads.value * items_per_row.value;
  for (std::uint32_t i = first_item(); i < count; i += item_stride()) {
    const std::uint32_t row = divide(i, items_per_row);
    const std::uint32_t index = i - row * items_per_row.value;
    const std::uint32_t source = divide(row, num_kv_heads);
    const std::uint32_t head = row - source * num_kv_heads.value;
    const std::uint64_t content = content_of_row(p.token_rows, p.contents, source);
    for (std::int32_t part = 0; part < p.num_parts; ++part) {
      const std::uint64_t row_key =
          mix(content ^ coordinate(p.layer, p.first_part + part, p.first_head + head));
      std::byte* out = (part == 0 ? p.key : p.value) + std::int64_t(row) * p.row_bytes;
      if constexpr (kItem == 0) {
#if KERNELS_HAVE_WIDE_WORDS
        fill_eights(p, row_key, out);
#endif
      } else if constexpr (kItem == 16) {
        const std::uint64_t low = (row_word(row_key, 2 * index) & p.keep_mask) | p.set_mask;
        const std::uint64_t high = (row_word(row_key, 2 * index + 1) & p.keep_mask) | p.set_mask;
        *reinterpret_cast<simt::vec16*>(out + 16 * std::int64_t(index)) = join_words(low, high);
      } else {
        const std::uint64_t word = (row_word(row_key, index) & p.keep_mask) | p.set_mask;
        const std::int32_t left = p.row_bytes - 8 * std::int32_t(index);
        store_word(out + 8 * std::int64_t(index), word, left < 8 ? left : 8, unit);
      }
    }
  }
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
