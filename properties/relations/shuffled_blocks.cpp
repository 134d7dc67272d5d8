#include "properties/relations/shuffled_blocks.h"

#include <fmt/format.h>

#include <algorithm>

#include "properties/shrink/case_parts.h"
#include "sim/recording/run_recorder.h"
#include "sim/session/session.h"

namespace lockstep {
namespace {

Result<std::vector<RecordedStep>> decided(const SavedCase& saved) {
  std::vector<RecordedStep> steps;
  std::optional<RunRecorder> recorder;
  const auto attach = [&](std::int32_t, Workload* workload) {
    recorder.emplace(*workload, [&](const RecordedStep& step) { steps.push_back(step); });
    return Onlooker{.workload = &*recorder, .observer = &*recorder};
  };
  const auto session = open_undisturbed(saved, config_of(saved), {}, attach);
  if (!session) return tl::unexpected(session.error());
  const auto report = (*session)->run();
  if (!report) return tl::unexpected(report.error());
  return steps;
}

using Names = std::vector<BlockId>;  // [block id of the one run] = of the other

void rename(std::vector<BlockId>& blocks, const Names& names) {
  for (BlockId& block : blocks) block = names[static_cast<std::size_t>(index_of(block))];
}

RecordedStep renamed(RecordedStep step, const Names& names) {
  for (RecordedScheduled& scheduled : step.scheduled)
    if (scheduled.blocks)
      for (std::vector<BlockId>& blocks : *scheduled.blocks) rename(blocks, names);
  for (auto* tables : {&step.tables, &step.loading})
    if (*tables)
      for (RecordedTable& table : **tables)
        for (std::vector<BlockId>& blocks : table.blocks) rename(blocks, names);
  if (step.worker) rename(step.worker->invalid_blocks, names);
  rename(step.zero, names);
  return step;
}

}  // namespace

Result<std::optional<Breach>> check_shuffled_blocks(const SavedCase& saved) {
  SavedCase other = saved;
  other.block_order = 1;
  auto one = decided(saved);
  if (!one) return tl::unexpected(one.error());
  auto two = decided(other);
  if (!two) return tl::unexpected(two.error());
  Names names = {kNullBlock};
  const Names order = free_order_of(other);
  names.insert(names.end(), order.begin(), order.end());
  for (std::size_t i = 0; i < std::max(one->size(), two->size()); ++i) {
    if (i < one->size() && i < two->size()) {
      RecordedStep expected = renamed((*one)[i], names);
      RecordedStep found = (*two)[i];
      std::ranges::sort(expected.zero);
      std::ranges::sort(found.zero);
      if (expected == found) continue;
    }
    return Breach{.request = "",
                  .index = static_cast<std::int64_t>(i),
                  .what = fmt::format("step {} is decided otherwise when blocks have other ids "
                                      "(shuffled blocks: block ids are names)",
                                      i)};
  }
  return std::optional<Breach>();
}

}  // namespace lockstep
