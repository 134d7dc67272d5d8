#include "properties/story/story.h"

#include <algorithm>
#include <span>
#include <utility>

#include "base/check.h"
#include "sim/conform/recorded_terms.h"
#include "sim/session/saved_run.h"

namespace lockstep {
namespace {

std::map<std::string, std::int64_t> known_tokens(const StepView& view) {
  std::map<std::string, std::int64_t> known;
  const auto take = [&](std::span<const RequestId> ids) {
    for (const RequestId id : ids)
      known[std::string(view.name(id))] = view.decisions.num_tokens(id);
  };
  take(view.decisions.running());
  take(view.decisions.waiting());
  for (const SkippedRequest& request : view.decisions.skipped()) take({&request.id, 1});
  return known;
}

// Who loads, or has loaded and waits; who has finished and is being sent.
void take_waiting_tables(const StepView& view, StoryStep& step) {
  const auto take = [&](RequestId id) {
    const RecordedTable& table = step.waiting_tables.emplace_back(table_of(view, id));
    step.loaded[table.id] = view.decisions.num_computed_tokens(id);
  };
  for (const SkippedRequest& request : view.decisions.skipped())
    if (!view.decisions.block_table(request.id, 0).empty()) take(request.id);
  for (const HeldRequest& request : view.decisions.held()) take(request.id);
}

}  // namespace

std::vector<BlockState> StoryKeeper::pool_of(const StepView& view, const StoryStep& step) {
  std::vector<BlockState> pool(static_cast<std::size_t>(num_blocks_));
  pool[0].kind = BlockState::Kind::null_block;
  for (std::int32_t i = 1; i < num_blocks_; ++i)
    if (view.decisions.is_cached(BlockId{i}))
      pool[static_cast<std::size_t>(i)].kind = BlockState::Kind::cached;
  const auto hold = [&](const RecordedTable& table) {
    for (const std::vector<BlockId>& blocks : table.blocks)
      for (const BlockId block : blocks) {
        const auto index = static_cast<std::size_t>(index_of(block));
        if (block == kNullBlock || index >= pool.size()) continue;
        BlockState& state = pool[index];
        state.kind = BlockState::Kind::held;
        if (state.holders.empty() || state.holders.back() != table.id)
          state.holders.push_back(table.id);
      }
  };
  std::ranges::for_each(step.tables, hold);
  std::ranges::for_each(step.waiting_tables, hold);
  return pool;
}

bool StoryKeeper::decided(const StepView& view) {
  StoryStep& step = steps_.emplace_back();
  step.known = known_tokens(view);
  for (const auto& [name, tokens] : step.known)
    if (!live_.contains(name)) step.arrived.push_back(name);
  for (const auto& [name, tokens] : live_)
    if (!step.known.contains(name)) step.gone.push_back(name);
  step.tables = tables_of(view);
  take_waiting_tables(view, step);
  step.pool = pool_of(view, step);
  step.resets = std::ssize(view.resets);
  live_ = step.known;
  return true;
}

bool StoryKeeper::finished(const StepView& view) {
  StoryStep& step = steps_.back();
  std::map<std::string, std::int64_t> known = known_tokens(view);
  for (const auto& [name, tokens] : known)
    if (tokens > step.known[name]) step.sampled[name] = tokens - step.known[name];
  live_ = std::move(known);
  return true;
}

Story tell(const SavedCase& saved, const BackendFactory& backend) {
  StoryKeeper keeper(saved.cache.num_blocks);
  Story story;
  RunSummary summary;
  JudgeOptions options;
  options.backend = backend;
  story.dp_size = config_of(saved).data_parallel.dp_size;
  if (story.dp_size > 1) story.dp_rank = std::max(judge(saved, options).dp_rank, 0);
  options.observed_dp_rank = story.dp_rank;
  options.observer = &keeper;
  options.summary = &summary;
  options.findings = &story.findings;
  std::vector<RecordedStep> recorded;
  options.recorded = &recorded;
  story.outcome = judge(saved, options);
  if (story.outcome.kind == OutcomeKind::divergence) story.divergence = summary.divergence;
  if (story.outcome.kind == OutcomeKind::stuck) story.stuck = summary.stuck;
  story.steps = keeper.take();
  LS_CHECK(recorded.size() == story.steps.size(), "{} steps recorded, {} told", recorded.size(),
           story.steps.size());
  for (std::size_t i = 0; i < recorded.size(); ++i)
    story.steps[i].recorded = std::move(recorded[i]);
  return story;
}

}  // namespace lockstep
