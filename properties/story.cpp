#include "properties/story.h"

#include <algorithm>
#include <span>
#include <utility>

#include "sim/conform/recorded_terms.h"
#include "sim/saved_run.h"

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
  return known;
}

}  // namespace

std::vector<BlockState> StoryKeeper::pool_of(const StepView& view,
                                             const std::vector<RecordedTable>& tables) {
  std::vector<BlockState> pool(static_cast<std::size_t>(num_blocks_));
  pool[0].kind = BlockState::Kind::null_block;
  for (std::int32_t i = 1; i < num_blocks_; ++i)
    if (view.decisions.is_cached(BlockId{i}))
      pool[static_cast<std::size_t>(i)].kind = BlockState::Kind::cached;
  for (const RecordedTable& table : tables)
    for (const std::vector<BlockId>& blocks : table.blocks)
      for (const BlockId block : blocks) {
        const auto index = static_cast<std::size_t>(index_of(block));
        if (block == kNullBlock || index >= pool.size()) continue;
        BlockState& state = pool[index];
        state.kind = BlockState::Kind::held;
        if (state.holders.empty() || state.holders.back() != table.id)
          state.holders.push_back(table.id);
      }
  return pool;
}

bool StoryKeeper::decided(const StepView& view) {
  StoryStep& step = steps_.emplace_back();
  write_decision(view, step.decided);
  step.known = known_tokens(view);
  for (const std::string& name : step.decided.waiting)
    if (!live_.contains(name)) step.arrived.push_back(name);
  for (const std::string& name : step.decided.running)
    if (!live_.contains(name)) step.arrived.push_back(name);
  for (const auto& [name, tokens] : live_)
    if (!step.known.contains(name)) step.gone.push_back(name);
  step.tables = tables_of(view);
  step.pool = pool_of(view, step.tables);
  step.resets = std::ssize(view.resets);
  live_ = step.known;
  return true;
}

bool StoryKeeper::finished(const StepView& view) {
  StoryStep& step = steps_.back();
  RecordedStep outcome;
  write_outcome(view, outcome);
  step.stopped = std::move(outcome.stopped);
  step.is_whole = true;
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
  story.outcome = judge(saved, options);
  if (story.outcome.kind == OutcomeKind::divergence) story.divergence = summary.divergence;
  if (story.outcome.kind == OutcomeKind::stuck) story.stuck = summary.stuck;
  story.steps = keeper.take();
  return story;
}

}  // namespace lockstep
