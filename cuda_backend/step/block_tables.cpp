#include "cuda_backend/step/block_tables.h"

#include <fmt/format.h>
#include <limits>
#include <utility>

namespace lockstep::cuda {

TableMirror::TableMirror(const BackendConfig& config) {
  for (const KVCacheGroupSpec& group : config.plan.groups) {
    // A table that is sharded over context ranks has one entry per block on every rank. A ring has
    // one entry for all positions.
    const std::int64_t parts = group.spec.dcp_sharded ? config.context.num_ranks : 1;
    block_sizes_.push_back(is_ring(group.spec.kind)
                               ? std::numeric_limits<std::int32_t>::max()
                               : std::max<std::int64_t>(1, group.spec.block_size) * parts);
    block_ids_.emplace_back(config.num_rows);
  }
}

void TableMirror::apply(const StepProgram& program) {
  for (const std::int32_t row : program.clear_rows)
    for (auto& rows : block_ids_) rows.at(static_cast<std::size_t>(row)).clear();
  for (const TableUpdate& update : program.table_updates) {
    LS_CHECK(update.begin + std::size_t{update.count} <= program.table_block_ids.size(),
             "entries {} to {} of {}", update.begin, update.begin + std::size_t{update.count},
             program.table_block_ids.size());
    std::vector<std::int32_t>& entries = block_ids_[update.group][update.row];
    entries.resize(update.first + update.count);
    for (std::uint32_t i = 0; i < update.count; ++i)
      entries[update.first + i] = index_of(program.table_block_ids[update.begin + i]);
  }
  for (const TableEdit& edit : program.table_edits) {
    std::vector<std::int32_t>& entries = block_ids_[edit.group][edit.row];
    if (std::cmp_less(edit.index, entries.size())) entries[edit.index] = index_of(edit.block);
  }
}

std::vector<std::int32_t> TableMirror::blocks(std::int32_t group, std::int32_t row,
                                              std::int32_t first, std::int32_t last) const {
  LS_CHECK(group >= 0 && std::cmp_less(group, block_ids_.size()) && row >= 0 &&
               std::cmp_less(row, block_ids_[group].size()),
           "row {} of group {}", row, group);
  const std::vector<std::int32_t>& entries = block_ids_[group][row];
  const std::int64_t size = block_sizes_[group];
  const auto count = static_cast<std::int64_t>(entries.size());
  std::vector<std::int32_t> found;
  if (first >= last) return found;
  for (std::int64_t i = first / size; i <= (last - 1) / size && i < count; ++i)
    found.push_back(entries[i]);
  std::ranges::sort(found);
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

static_assert(sizeof(BlockId) == sizeof(std::int32_t));

BlockTables::Mapping::Mapping(Device& device, const std::string& whose)
    : positions(device, "positions of " + whose),
      rows(device, "batch rows of " + whose),
      slots(device, "slots of " + whose) {}

BlockTables::BlockTables(Device& device, const BackendConfig& config,
                         std::span<const std::int64_t> blocks_per_kv_block,
                         std::span<const MappedTable> mapped)
    : device_(device),
      mirror_(config),
      num_rows_(config.num_rows),
      num_groups_(static_cast<std::int32_t>(config.plan.groups.size())),
      context_(config.context),
      tokens_(device, "tokens"),
      encoders_(device, "encoder rows") {
  const std::size_t num_groups = config.plan.groups.size();
  LS_CHECK(
      config.max_blocks_per_row.size() == num_groups && blocks_per_kv_block.size() == num_groups,
      "{} groups, {} widths, {} splits", num_groups, config.max_blocks_per_row.size(),
      blocks_per_kv_block.size());
  const auto count = static_cast<std::int64_t>(num_groups + mapped.size());
  lengths_.reserve(count * num_rows_);
  device_.zero(lengths_.data(), count * num_rows_ * 4);
  for (std::int32_t g = 0; g < num_groups_; ++g) {
    const std::int64_t split = blocks_per_kv_block[g];
    add_table(config, {.group = g, .blocks_per_kv_block = split, .kernel_block_stride = split});
  }
  for (const MappedTable& table : mapped) add_table(config, table);
  std::vector<GroupTable> tables;
  for (const Table& table : tables_) tables.push_back(table.table);
  device_tables_.upload(tables);
  LS_CHECK(num_tables() == count, "{} tables of {}", num_tables(), count);
  tokens_.stride = config.max_tokens_per_step;
  tokens_.slots.reserve(tokens_.stride * count);
}

void BlockTables::add_table(const BackendConfig& config, const MappedTable& of) {
  const KVCacheSpec& spec = config.plan.groups.at(static_cast<std::size_t>(of.group)).spec;
  LS_CHECK(of.blocks_per_kv_block > 0 && of.kernel_block_stride >= of.blocks_per_kv_block,
           "group {}: {} kernel blocks, {} apart", of.group, of.blocks_per_kv_block,
           of.kernel_block_stride);
  const std::size_t number = tables_.size();
  Table& added = tables_.emplace_back();
  added.group = of.group;
  GroupTable& table = added.table;
  table.width = config.max_blocks_per_row[of.group];
  table.blocks_per_kv_block = static_cast<std::int32_t>(of.blocks_per_kv_block);
  table.kernel_block_stride = static_cast<std::int32_t>(of.kernel_block_stride);
  table.kernel_block_size = static_cast<std::int32_t>(spec.block_size / of.blocks_per_kv_block);
  table.slot_block_size = table.kernel_block_size;
  table.is_ring = is_ring(spec.kind);
  table.is_replayed = spec.bounded_replay;
  table.is_encoder = is_cross_attention(spec);
  table.is_hot = is_hot_region(config.plan.groups[of.group]);
  table.is_whole = !spec.dcp_sharded;
  needs_reach_ |= table.is_ring || table.is_replayed;
  if (spec.bounded_replay)
    num_replayed_tokens_ =
        std::max(num_replayed_tokens_, static_cast<std::int32_t>(spec.sliding_window));
  const std::int64_t entries = std::int64_t{num_rows_} * table.width;
  const std::string whose = number == static_cast<std::size_t>(of.group)
                                ? fmt::format("group {}", of.group)
                                : fmt::format("layers of group {}", of.group);
  added.entries =
      std::make_unique<DeviceArray<std::int32_t>>(device_, fmt::format("block table of {}", whose));
  table.entries = added.entries->reserve(entries);
  table.kernel_entries = table.entries;
  if (table.kernel_block_stride > 1) {
    added.kernel_entries = std::make_unique<DeviceArray<std::int32_t>>(
        device_, fmt::format("kernel block table of {}", whose));
    table.kernel_entries = added.kernel_entries->reserve(entries * table.blocks_per_kv_block);
  }
  table.lengths = lengths_.data() + static_cast<std::int64_t>(number) * num_rows_;
}

void BlockTables::write_tables(Operation& operation) const {
  for (const Table& table : tables_) {
    operation.write_all(*table.entries);
    if (table.kernel_entries) operation.write_all(*table.kernel_entries);
  }
}

void BlockTables::read_tables(Operation& operation) const {
  operation.read_all(device_tables_, lengths_);
  for (std::int32_t table = 0; table < num_tables(); ++table) operation.read(table_range(table));
}

void BlockTables::clear_rows(const StepProgram& program) {
  device_.launch(
      device_.kernels().clear_rows,
      TableClearParams{.groups = device_tables_.data(),
                       .rows = clear_rows_.upload(program.clear_rows),
                       .num_groups = num_tables(),
                       .num_rows = static_cast<std::int32_t>(program.clear_rows.size())},
      [&](Operation& operation) {
        operation.named("clear_rows").read_all(device_tables_, clear_rows_).write_all(lengths_);
      });
}

void BlockTables::apply(const StepProgram& program) {
  if (device_.wants_operations()) mirror_.apply(program);
  clear_rows(program);
  append(program);
  edits_.host.clear();
  for (const TableEdit& edit : program.table_edits)
    for_tables_of(edit.group, [&](std::int32_t table) {
      edits_.host.push_back({edit.row, table, edit.index, index_of(edit.block)});
    });
  device_.launch(device_.kernels().edit_entries,
                 TableEditParams{.groups = device_tables_.data(),
                                 .edits = edits_.upload(),
                                 .num_edits = static_cast<std::int32_t>(edits_.host.size())},
                 [&](Operation& operation) {
                   operation.named("edit_entries").read_all(device_tables_, edits_);
                   write_tables(operation);
                 });
}

void BlockTables::append(const StepProgram& program) {
  appends_.host.clear();
  for (const TableUpdate& update : program.table_updates) {
    LS_CHECK(update.row >= 0 && update.row < num_rows_, "row {} of {}", update.row, num_rows_);
    LS_CHECK(update.group >= 0 && update.group < num_groups_, "group {}", update.group);
    for_tables_of(update.group, [&](std::int32_t table) {
      appends_.host.push_back({update.row, table, update.first, update.begin, update.count});
    });
  }
  const std::span<const std::int32_t> ids(
      reinterpret_cast<const std::int32_t*>(program.table_block_ids.data()),
      program.table_block_ids.size());
  device_.launch(device_.kernels().append_entries,
                 TableAppendParams{.groups = device_tables_.data(),
                                   .appends = appends_.upload(),
                                   .block_ids = block_ids_.upload(ids),
                                   .num_appends = static_cast<std::int32_t>(appends_.host.size())},
                 [&](Operation& operation) {
                   operation.named("append_entries")
                       .read_all(device_tables_, appends_, block_ids_, lengths_)
                       .write_all(lengths_);
                   write_tables(operation);
                 });
}

// Encoder rows start at row 0 of their groups.
void BlockTables::map_encoder_rows(const StepProgram& program) {
  const auto count = static_cast<std::int32_t>(program.encoder_contents.size());
  if (count == 0) return;
  host_positions_.resize(program.encoder_contents.size());
  host_token_rows_.resize(program.encoder_contents.size());
  for (const EncoderSlice& slice : program.encoder_slices)
    for (std::int32_t i = 0; i < slice.num_rows; ++i) {
      host_positions_[slice.first_row + i] = i;
      host_token_rows_[slice.first_row + i] = slice.row;
    }
  encoders_.stride = std::max<std::int64_t>(encoders_.stride, count);
  encoders_.slots.reserve(encoders_.stride * num_tables());
  encoders_.positions.upload(host_positions_);
  encoders_.rows.upload(host_token_rows_);
  launch_slots(encoders_, count, nullptr, count, nullptr);
}

void BlockTables::map_slots(const StepProgram& program) {
  map_encoder_rows(program);
  const auto num_tokens = static_cast<std::int32_t>(program.contents.size());
  LS_CHECK(program.num_padded_tokens >= num_tokens, "{} tokens padded to {}", num_tokens,
           program.num_padded_tokens);
  host_positions_.resize(program.contents.size());
  host_token_rows_.resize(program.contents.size());
  for (const RowSlice& slice : program.rows) {
    for (std::int32_t i = 0; i < slice.num_tokens; ++i) {
      host_positions_[slice.first_token + i] = slice.first_position + i;
      host_token_rows_[slice.first_token + i] = slice.row;
    }
  }
  const RowReach* reach = upload_reach(program);
  const std::int32_t size = step_batch(device_, program);
  if (!device_.captures(size))
    return map_tokens(host_positions_, host_token_rows_, program.num_padded_tokens, reach);
  reserve_slots(std::max({num_tokens, program.num_padded_tokens, size}));
  tokens_.positions.reserve(size);
  tokens_.positions.upload(host_positions_);
  tokens_.rows.reserve(size);
  tokens_.rows.upload(host_token_rows_);
  num_live_tokens_.upload({&num_tokens, 1});
  device_.run_captured("slot mapping", size, [&] {
    launch_slots(tokens_, num_tokens, num_live_tokens_.data(), size, reach);
  });
}

const RowReach* BlockTables::upload_reach(const StepProgram& program) {
  if (!needs_reach_) return nullptr;
  reach_.host.assign(num_rows_, {});
  for (const RowSlice& slice : program.rows) {
    LS_CHECK(slice.row >= 0 && slice.row < num_rows_, "row {} of {}", slice.row, num_rows_);
    reach_.host[slice.row] = {.end = slice.first_position + slice.num_tokens,
                              .replay_start = slice.replay_start};
  }
  return reach_.upload();
}

void BlockTables::map_tokens(std::span<const std::int32_t> positions,
                             std::span<const std::int32_t> token_rows,
                             std::int32_t num_padded_tokens, const RowReach* reach) {
  LS_CHECK(positions.size() == token_rows.size(), "{} positions, {} rows", positions.size(),
           token_rows.size());
  reserve_slots(num_padded_tokens);
  tokens_.positions.upload(positions);
  tokens_.rows.upload(token_rows);
  launch_slots(tokens_, static_cast<std::int32_t>(positions.size()), nullptr, num_padded_tokens,
               reach);
}

// A wider stride moves the slots of all tables except the first.
void BlockTables::reserve_slots(std::int32_t num_tokens) {
  if (num_tokens <= tokens_.stride) return;
  tokens_.stride = num_tokens;
  tokens_.slots.reserve(tokens_.stride * num_tables());
  device_.forget_captured();
}

void BlockTables::launch_slots(const Mapping& mapping, std::int32_t num_tokens,
                               const std::int32_t* num_live_tokens, std::int32_t num_padded_tokens,
                               const RowReach* reach) {
  // A graph that is too small (a defect that can be planted) has fewer than num_tokens.
  LS_CHECK(num_padded_tokens <= mapping.stride, "{} padded tokens in a stride of {}",
           num_padded_tokens, mapping.stride);
  const bool of_encoders = &mapping == &encoders_;
  // Every rank has all encoder rows.
  const ContextRank context = of_encoders ? ContextRank{} : context_;
  device_.launch(device_.kernels().slot_mapping,
                 SlotMappingParams{.groups = device_tables_.data(),
                                   .positions = mapping.positions.data(),
                                   .token_rows = mapping.rows.data(),
                                   .slots = mapping.slots.data(),
                                   .slots_stride = mapping.stride,
                                   .num_groups = num_tables(),
                                   .num_tokens = num_tokens,
                                   .num_live_tokens = num_live_tokens,
                                   .num_padded_tokens = num_padded_tokens,
                                   .pad_slot = PAD_SLOT_ID,
                                   .context_ranks = context.num_ranks,
                                   .context_rank = context.rank,
                                   .interleave = context.interleave,
                                   .reach = reach,
                                   .num_replayed_tokens = of_encoders ? 0 : num_replayed_tokens_,
                                   .of_encoders = of_encoders},
                 [&](Operation& operation) {
                   operation.named("slot_mapping")
                       .read_all(device_tables_, mapping.positions, mapping.rows, num_live_tokens_,
                                 reach_)
                       .write_all(mapping.slots);
                   for (std::int32_t table = 0; table < num_tables(); ++table)
                     if (!of_encoders || is_encoder(table)) operation.read(table_range(table));
                 });
}

Result<void> BlockTables::read_back(const StepProgram& program, StepReadback& readback) {
  host_lengths_.resize(tables_.size() * num_rows_);
  device_.download(host_lengths_.data(), lengths_.data(),
                   static_cast<std::int64_t>(host_lengths_.size()) * 4);
  LS_RETURN_IF_ERROR(device_.finish());
  readback.tables.resize(num_groups_);
  readback.table_ends.resize(num_groups_);
  readback.slot_mappings.resize(num_groups_);
  for (std::int32_t g = 0; g < num_groups_; ++g) {
    const GroupTable& table = tables_[g].table;
    std::vector<std::uint32_t>& ends = readback.table_ends[g];
    ends.clear();
    std::uint32_t end = 0;
    for (const RowSlice& slice : program.rows) {
      LS_CHECK(slice.row >= 0 && slice.row < num_rows_, "row {} of {}", slice.row, num_rows_);
      const std::int32_t length = host_lengths_[g * num_rows_ + slice.row];
      end += static_cast<std::uint32_t>(std::clamp(length, 0, table.width));
      ends.push_back(end);
    }
    readback.tables[g].resize(end);
    std::uint32_t begin = 0;
    for (std::size_t i = 0; i < ends.size(); begin = ends[i], ++i)
      device_.download(readback.tables[g].data() + begin,
                       table.entries + std::int64_t{program.rows[i].row} * table.width,
                       std::int64_t{ends[i] - begin} * 4);
    const std::size_t count =
        table.is_encoder ? program.encoder_contents.size() : std::size_t(program.num_padded_tokens);
    readback.slot_mappings[g].resize(count);
    device_.download(readback.slot_mappings[g].data(), slots(g),
                     std::ssize(readback.slot_mappings[g]) * std::int64_t{sizeof(Slot)});
  }
  return device_.finish();
}

}  // namespace lockstep::cuda
