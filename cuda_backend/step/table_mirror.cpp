#include "cuda_backend/step/table_mirror.h"

#include <algorithm>

namespace lockstep::cuda {

TableMirror::TableMirror(const BackendConfig& config) {
  for (const KVCacheGroupSpec& group : config.plan.groups) {
    // Under context parallelism an entry stands for a block on each of the ranks.
    block_sizes_.push_back(std::max<std::int64_t>(1, group.spec.block_size) *
                           config.context.num_ranks);
    block_ids_.emplace_back(static_cast<std::size_t>(config.num_rows));
  }
}

void TableMirror::apply(const StepProgram& program) {
  for (const std::int32_t row : program.clear_rows)
    for (auto& rows : block_ids_) rows[row].clear();
  for (const TableUpdate& update : program.table_updates) {
    std::vector<std::int32_t>& entries = block_ids_[update.group][update.row];
    entries.resize(update.first + update.count);
    for (std::uint32_t i = 0; i < update.count; ++i)
      entries[update.first + i] = index_of(program.table_block_ids[update.begin + i]);
  }
  for (const TableEdit& edit : program.table_edits) {
    std::vector<std::int32_t>& entries = block_ids_[edit.group][edit.row];
    if (static_cast<std::size_t>(edit.index) < entries.size())
      entries[edit.index] = index_of(edit.block);
  }
}

std::vector<std::int32_t> TableMirror::blocks(std::int32_t group, std::int32_t row,
                                              std::int32_t first, std::int32_t last) const {
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

}  // namespace lockstep::cuda
