// The block tables of all groups in device memory, and the slot mappings looked up in them.
//
// Invariants:
// 1. tables_ has the groups' tables first, in the order of the plan, then the mapped tables
//    (views/layer_caches.h). A mapped table has the manager blocks of its group and its own kernel
//    blocks.
// 2. Only clear, append and edit change a row's entries, as the program states. No table is
//    uploaded as a whole.
// 3. Kernel block ids are derived on the device where a group's kernel blocks are smaller.
//    Otherwise kernel_entries is entries.
// 4. Slots of table t start at t * stride in their array; a wider stride moves them, so captured
//    graphs are dropped.
// Not checked here: that block ids are meaningful. They come from the simulator.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "cuda_backend/device/device.h"
#include "cuda_backend/views/layer_caches.h"
#include "reference/types/engine_config.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

// Number of tokens that the captured parts of a step run: the size of the graph that takes the
// batch, or the tokens that data parallel ranks agreed on; without such a graph, the batch's
// tokens.
inline std::int32_t step_batch(const Device& device, const StepProgram& program) {
  const auto num_tokens = static_cast<std::int32_t>(program.contents.size());
  const std::int32_t size = device.padded_batch(std::max(num_tokens, program.agreed.num_tokens));
  return device.captures(size) ? size : num_tokens;
}

// Rule (10) of sim/protocol/backend.h: the rows that a rank of context parallelism has of a
// request's first `num_tokens` tokens: those of whole rounds over the ranks, and its part of the
// last round.
inline std::int32_t rows_on_rank(const ContextRank& context, std::int32_t num_tokens) {
  const std::int32_t round = context.num_ranks * context.interleave;
  std::int32_t rows = num_tokens / round * context.interleave;
  const std::int32_t rest = num_tokens % round - context.rank * context.interleave;
  if (rest > 0) rows += rest < context.interleave ? rest : context.interleave;
  return rows;
}

// A copy of the block tables on the host, for operations that describe which blocks they touch.
// Nothing that is compared comes from it.
//
// 1. It follows the program only. A defect of the device does not show here.
// 2. A row has exactly the entries of its last update, with later edits applied.
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

  // Maps the scheduled tokens to slots in every group, padded to num_padded_tokens or to the
  // captured size that the backend chooses.
  void map_slots(const StepProgram& program);
  // Maps other tokens, by position and row, in every group. Their slots replace the step's.
  void map_tokens(std::span<const std::int32_t> positions, std::span<const std::int32_t> token_rows,
                  std::int32_t num_padded_tokens, const RowReach* reach = nullptr);
  // Slots of the last mapping; of a group of encoder rows, those that the step's encoders computed.
  const Slot* slots(std::int32_t table) const {
    const Mapping& mapping = is_encoder(table) ? encoders_ : tokens_;
    return mapping.slots.data() + table * mapping.stride;
  }
  bool is_encoder(std::int32_t table) const { return at(table).table.is_encoder; }
  bool takes_tokens(std::int32_t table) const {
    return !at(table).table.is_encoder && !at(table).table.is_hot;
  }
  // Rows that this rank has in the group of a request's first `num_tokens` tokens.
  std::int32_t rows_kept(std::int32_t group, std::int32_t num_tokens) const {
    return at(group).table.is_whole ? num_tokens : rows_on_rank(context_, num_tokens);
  }

  // Memory of slots and of tables, for operations that read them.
  MemoryRange slots_range(std::int32_t table) const {
    const std::int64_t count = is_encoder(table) ? encoders_.stride : tokens_.stride;
    return range_of(slots(table), count * std::int64_t{sizeof(Slot)});
  }
  MemoryRange table_range(std::int32_t table) const {
    const Table& one = at(table);
    return one.kernel_entries ? one.kernel_entries->range() : one.entries->range();
  }
  // All tables in device memory, and the memory that a lookup reads.
  const GroupTable* tables() const { return device_tables_.data(); }
  std::int32_t num_tables() const { return static_cast<std::int32_t>(tables_.size()); }
  void read_tables(Operation& operation) const;
  // REQUIRES: the device wants operations. Otherwise it is empty.
  const TableMirror& mirror() const { return mirror_; }

  // Kernel block ids, [num_rows, kernel_table_width(table)].
  const std::int32_t* kernel_table(std::int32_t table) const {
    return at(table).table.kernel_entries;
  }
  std::int64_t kernel_table_width(std::int32_t table) const {
    return std::int64_t{at(table).table.width} * at(table).table.blocks_per_kv_block;
  }

  // Tables of the scheduled rows and slot mappings, as the device holds them. Calls finish().
  Result<void> read_back(const StepProgram& program, StepReadback& readback);

 private:
  struct Table {
    std::unique_ptr<DeviceArray<std::int32_t>> entries;
    std::unique_ptr<DeviceArray<std::int32_t>> kernel_entries;  // null: the same as entries
    GroupTable table;
    std::int32_t group = 0;
  };
  // Tokens by position and row of the batch, and their slots, [num_tables, stride].
  struct Mapping {
    Mapping(Device& device, const std::string& whose);
    DeviceArray<std::int32_t> positions, rows;
    DeviceArray<Slot> slots;
    std::int64_t stride = 0;
  };
  const Table& at(std::int32_t table) const {
    LS_CHECK(table >= 0 && table < num_tables(), "table {} of {}", table, num_tables());
    return tables_[static_cast<std::size_t>(table)];
  }
  void add_table(const BackendConfig& config, const MappedTable& of);
  // Calls the function with the group's table, then with its mapped tables.
  template <class Function>
  void for_tables_of(std::int32_t group, Function&& function) const {
    function(group);
    for (std::int32_t table = num_groups_; table < num_tables(); ++table)
      if (tables_[table].group == group) function(table);
  }
  // REQUIRES: positions and rows of the mapping are uploaded, and reach_ where it is given.
  void launch_slots(const Mapping& mapping, std::int32_t num_tokens,
                    const std::int32_t* num_live_tokens, std::int32_t num_padded_tokens,
                    const RowReach* reach);
  // Uploads each row's reach; null: no group needs it.
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
  DeviceArray<std::int32_t> lengths_{device_, "block table lengths"};  // [num_tables, num_rows]
  DeviceArray<GroupTable> device_tables_{device_, "block table descriptors"};
  DeviceArray<std::int32_t> clear_rows_{device_, "rows to clear"};
  StagedItems<TableAppend> appends_{device_, "table appends"};
  DeviceArray<std::int32_t> block_ids_{device_, "appended block ids"};
  StagedItems<TableEntry> edits_{device_, "table edits"};
  DeviceArray<std::int32_t> num_live_tokens_{device_, "number of tokens"};
  StagedItems<RowReach> reach_{device_, "reach of rows"};  // [num_rows_]
  Mapping tokens_, encoders_;
  // Host staging, kept from step to step.
  std::vector<std::int32_t> host_positions_, host_token_rows_, host_lengths_;
};

}  // namespace lockstep::cuda
