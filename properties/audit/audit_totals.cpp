// What holds over all requests of a step.
#include <fmt/core.h>

#include <algorithm>
#include <map>

#include "properties/audit/audit_impl.h"

namespace lockstep {

void Auditor::Impl::check_common_prefix(const RecordedStep& step) {
  if (!step.common_prefix_blocks) return;
  for (std::size_t g = 0; g < std::min(groups_.size(), step.common_prefix_blocks->size()); ++g) {
    const auto num_common = static_cast<std::size_t>(std::max((*step.common_prefix_blocks)[g], 0));
    const std::vector<BlockId>* first = nullptr;
    for (const std::string& name : step.running) {
      const auto it = requests_.find(name);
      if (it == requests_.end() || num_common == 0) continue;
      const std::vector<BlockId>& table = it->second.tables[g];
      if (first == nullptr) first = &table;
      if (table.size() >= num_common && first->size() >= num_common &&
          std::equal(table.begin(), table.begin() + static_cast<std::ptrdiff_t>(num_common),
                     first->begin()))
        continue;
      report(
          AuditRule::common_prefix, it->second, g, -1, kNullBlock,
          fmt::format(
              "{} blocks are said to be common to all running requests; this one's table differs",
              num_common));
    }
  }
}

// Blocks of those that do not run: loading, loaded, or to be sent. Who has left has let go of what
// its window no longer reaches; whether drafts count there is said below.
std::set<BlockId> Auditor::Impl::kept_by_transfers(bool counts_drafts) const {
  std::set<BlockId> kept;
  for (const auto& [name, request] : requests_) {
    if (request.running || !request.keeps_blocks()) continue;
    const std::int32_t end =
        counts_drafts ? std::max(request.scheduled_to, request.computed) : request.computed;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      const std::size_t first = request.has_left ? first_needed(request, g, end) : 0;
      for (std::size_t i = first; i < request.tables[g].size(); ++i)
        if (request.tables[g][i] != kNullBlock) kept.insert(request.tables[g][i]);
    }
  }
  return kept;
}

// Who leaves while a step is in flight leaves before it is known which of its drafts stand, and a
// recording does not show when: the engine's count of each lies between the two.
void Auditor::Impl::check_conservation(const RecordedStep& step) {
  const std::set<BlockId> kept = kept_by_transfers(false);
  const auto adds_up = [&](std::int64_t held) {
    const std::int64_t excess = held + step.free_blocks + 1 - ledger_.num_blocks();
    if (excess == 0) return true;
    return excess > 0 && excess <= std::ssize(kept) - std::ssize(kept_by_transfers(true));
  };
  if (step.running.empty() && !adds_up(std::ssize(kept)))
    report(
        AuditRule::conservation, {},
        fmt::format("nobody runs, and {} of {} blocks are free besides the null block{}",
                    step.free_blocks, ledger_.num_blocks() - 1,
                    kept.empty() ? "" : fmt::format(", with {} kept for transfers", kept.size())));
  if (!step.tables) return;
  std::map<std::int32_t, std::int32_t> group_of;
  for (const RecordedTable& table : *step.tables) {
    for (std::size_t g = 0; g < table.blocks.size(); ++g) {
      for (const BlockId block : table.blocks[g]) {
        if (block == kNullBlock) continue;
        const auto [at, is_new] = group_of.emplace(index_of(block), static_cast<std::int32_t>(g));
        if (!is_new && at->second != static_cast<std::int32_t>(g))
          report(AuditRule::conservation, table.id,
                 fmt::format("block {} is in the tables of group {} and of group {}",
                             index_of(block), at->second, g));
      }
    }
  }
  const auto held = std::ssize(group_of) + std::ranges::count_if(kept, [&](BlockId block) {
                      return !group_of.contains(index_of(block));
                    });
  if (!adds_up(held))
    report(AuditRule::conservation, {},
           fmt::format("{} blocks are held and {} free, with the null block {} of {}", held,
                       step.free_blocks, held + step.free_blocks + 1, ledger_.num_blocks()));
}

}  // namespace lockstep
