// The block tables of all groups in device memory, and the slot mappings looked up in them.
//
// 1. A row's entries change by clear, append and edit alone, as a StepProgram says; nothing is
//    uploaded whole.
// 2. Kernel block ids are derived on the device, where a group's kernel blocks are smaller.
// 3. A mapped table (views/layer_caches.h) is one more of its group's: the same manager blocks,
//    kernel blocks of its own. Tables are counted groups first.
// Not checked here: whether block ids make sense, and whether a row has room for them; they are
// what the simulator sent.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cuda_backend/device/device.h"
#include "cuda_backend/views/layer_caches.h"
#include "reference/types/ranks.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

// How many tokens the captured parts of a step run, those of its batch or as many as data parallel
// ranks have agreed on: the size of the graph that takes them all; where none does, their number.
inline std::int32_t step_batch(const Device& device, const StepProgram& program) {
  const auto num_tokens = static_cast<std::int32_t>(program.contents.size());
  const std::int32_t size = device.padded_batch(std::max(num_tokens, program.agreed.num_tokens));
  return device.captures(size) ? size : num_tokens;
}

// Rule (10) of sim/protocol/backend.h: the rows that a rank of context parallelism has of a
// request's first `num_tokens` tokens. Whole rounds over the ranks, and its part of the last one.
inline std::int32_t rows_on_rank(const ContextRank& context, std::int32_t num_tokens) {
  const std::int32_t round = context.num_ranks * context.interleave;
  std::int32_t rows = num_tokens / round * context.interleave;
  const std::int32_t rest = num_tokens % round - context.rank * context.interleave;
  if (rest > 0) rows += rest < context.interleave ? rest : context.interleave;
  return rows;
}

// The block tables of a backend as its host believes them to be: what a step's operations will find
// when they look blocks up on the device. It says which blocks an operation touches, and nothing
// that is compared comes from it.
//
// 1. It follows the program alone: what a device makes of it is not seen here.
class TableMirror {
 public:
  explicit TableMirror(const BackendConfig& config);

  // clear_rows, table_updates and table_edits, in this order.
  void apply(const StepProgram& program);

  // Manager blocks that hold positions [first, last) of a row, each once.
  std::vector<std::int32_t> blocks(std::int32_t group, std::int32_t row, std::int32_t first,
                                   std::int32_t last) const;

 private:
  std::vector<std::int64_t> block_sizes_;  // positions of an entry, per group
  std::vector<std::vector<std::vector<std::int32_t>>> block_ids_;  // group, row, entry
};

class BlockTables {
 public:
  // blocks_per_kv_block: kernel blocks in a manager block, per group.
  // REQUIRES: it and max_blocks_per_row have one entry a group.
  BlockTables(Device& device, const BackendConfig& config,
              std::span<const std::int64_t> blocks_per_kv_block,
              std::span<const MappedTable> mapped = {});

  // clear_rows, table_updates and table_edits of the program, in this order.
  void apply(const StepProgram& program);

  // Slots of the scheduled tokens in every group, padded to num_padded_tokens, or to the captured
  // size that the backend chooses for them.
  void map_slots(const StepProgram& program);
  // Slots of any tokens, by position and row, in every group; they take the place of the step's.
  void map_tokens(std::span<const std::int32_t> positions, std::span<const std::int32_t> token_rows,
                  std::int32_t num_padded_tokens, const RowReach* reach = nullptr);
  // Of a group of encoders' rows: those that the step's encoders have computed.
  const Slot* slots(std::int32_t table) const {
    return is_encoder(table) ? encoder_slots_.data() + table * encoder_stride_
                             : slots_.data() + table * slots_stride_;
  }
  bool is_encoder(std::int32_t table) const { return tables_[table].table.is_encoder; }
  bool takes_tokens(std::int32_t table) const {
    return !tables_[table].table.is_encoder && !tables_[table].table.is_hot;
  }
  // Of a request's first `num_tokens` tokens, how many this rank has rows for in the group.
  std::int32_t rows_kept(std::int32_t group, std::int32_t num_tokens) const {
    return tables_[group].table.is_whole ? num_tokens : rows_on_rank(context_, num_tokens);
  }

  // For operations that read slots, or blocks through the tables.
  MemoryRange slots_range(std::int32_t table) const {
    const std::int64_t count = is_encoder(table) ? encoder_stride_ : slots_stride_;
    return range_of(slots(table), count * std::int64_t{sizeof(Slot)});
  }
  MemoryRange table_range(std::int32_t table) const;
  // Of all groups, then those that are mapped, in device memory; and what looking into them reads.
  const GroupTable* tables() const { return device_tables_.data(); }
  std::int32_t num_tables() const { return static_cast<std::int32_t>(tables_.size()); }
  void read_tables(Operation& operation) const;
  // REQUIRES: the device wants operations; otherwise it is empty.
  const TableMirror& mirror() const { return mirror_; }

  // Kernel block ids, [num_rows, kernel_table_width(table)].
  const std::int32_t* kernel_table(std::int32_t table) const;
  std::int64_t kernel_table_width(std::int32_t table) const;

  // Tables of the scheduled rows and slot mappings, as the device holds them. Calls finish().
  Result<void> read_back(const StepProgram& program, StepReadback& readback);

 private:
  struct Table {
    std::unique_ptr<DeviceArray<std::int32_t>> entries;
    std::unique_ptr<DeviceArray<std::int32_t>> kernel_entries;  // null: the same as entries
    GroupTable table;
    std::int32_t group = 0;
  };
  void add_table(const BackendConfig& config, const MappedTable& of);
  // The table of the group, then those that are mapped of it.
  template <class Function>
  void for_tables_of(std::int32_t group, Function&& function) const {
    function(group);
    for (std::int32_t table = num_groups_; table < num_tables(); ++table)
      if (tables_[table].group == group) function(table);
  }
  // REQUIRES: positions_ and token_rows_ are uploaded, and reach_ where it is given.
  void launch_slots(std::int32_t num_tokens, const std::int32_t* num_live_tokens,
                    std::int32_t num_padded_tokens, const RowReach* reach);
  // What the step's slots need of its rows; null: no group needs it.
  const RowReach* upload_reach(const StepProgram& program);
  void reserve_slots(std::int32_t num_tokens);
  void map_encoder_rows(const StepProgram& program);
  void append(const StepProgram& program);
  void clear_rows(const StepProgram& program);
  void write_tables(Operation& operation) const;

  Device& device_;
  TableMirror mirror_;
  std::int32_t num_rows_;
  std::int32_t num_groups_;
  ContextRank context_;
  bool needs_reach_ = false;
  std::int32_t num_replayed_tokens_ = 0;
  std::vector<Table> tables_;
  DeviceArray<std::int32_t> lengths_;  // [num_tables, num_rows]
  DeviceArray<GroupTable> device_tables_;
  DeviceArray<std::int32_t> clear_rows_;
  DeviceArray<TableAppend> appends_;
  DeviceArray<std::int32_t> block_ids_;
  DeviceArray<TableEntry> edits_;
  DeviceArray<std::int32_t> positions_;
  DeviceArray<std::int32_t> token_rows_;
  DeviceArray<std::int32_t> num_live_tokens_;
  DeviceArray<RowReach> reach_;  // [num_rows_]
  DeviceArray<Slot> slots_;      // [num_tables, slots_stride_]
  std::int64_t slots_stride_ = 0;
  DeviceArray<std::int32_t> encoder_positions_, encoder_rows_;
  DeviceArray<Slot> encoder_slots_;  // [num_tables, encoder_stride_]
  std::int64_t encoder_stride_ = 0;
  // Host staging, kept from step to step.
  std::vector<TableAppend> host_appends_;
  std::vector<TableEntry> host_edits_;
  std::vector<std::int32_t> host_positions_, host_token_rows_, host_lengths_;
  std::vector<RowReach> host_reach_;
};

}  // namespace lockstep::cuda
