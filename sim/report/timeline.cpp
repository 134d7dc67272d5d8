#include "sim/report/timeline.h"

#include <fmt/core.h>

#include <algorithm>

namespace lockstep {
namespace {

void merge_into(TimelineStep& into, const TimelineStep& next) {
  TimelineStep sum = next;
  sum.step = into.step;
  sum.time_ns = into.time_ns;
  sum.num_steps += into.num_steps;
  sum.scheduled_tokens += into.scheduled_tokens;
  sum.scheduled_requests += into.scheduled_requests;
  sum.preempted += into.preempted;
  sum.hit_tokens += into.hit_tokens;
  sum.evicted += into.evicted;
  sum.stored += into.stored;
  into = sum;
}

bool same_state(const BlockChange& a, const BlockChange& b) {
  return a.group == b.group && a.holders == b.holders && a.lane == b.lane && a.cached == b.cached;
}

}  // namespace

TimelineRecorder::TimelineRecorder(const RunConfig& config, const TimelineLimits& limits)
    : config_(config), limits_(limits) {
  timeline_.num_blocks = config.backend.plan.num_blocks;
  timeline_.token_budget = config.engine.max_num_batched_tokens;
  blocks_.resize(timeline_.num_blocks);
  drawn_ = blocks_;
}

std::int32_t TimelineRecorder::lane_of(RequestId id) const {
  return index_of(id) < lanes_.size() ? lanes_[id] : -1;
}

void TimelineRecorder::arrived(const Arrival& arrival) {
  const RequestId id = arrival.id;
  if (index_of(id) >= lanes_.size()) lanes_.resize(index_of(id) + 1, -1);
  lanes_[id] = -1;
  if (static_cast<std::int64_t>(timeline_.lanes.size()) >= limits_.lanes_max) {
    ++undrawn_lanes_;
    return;
  }
  lanes_[id] = static_cast<std::int32_t>(timeline_.lanes.size());
  Lane& lane = timeline_.lanes.emplace_back();
  lane.name = arrival.name;
  lane.prompt_tokens = arrival.num_prompt_tokens;
  lane.spans.push_back(
      {.kind = LaneSpan::Kind::waiting, .first_step = arrival.step, .last_step = arrival.step});
}

// Extends the last span to `step`; a span of another kind starts there.
void TimelineRecorder::extend(std::int32_t lane, LaneSpan::Kind kind, std::int64_t step) {
  std::vector<LaneSpan>& spans = timeline_.lanes[lane].spans;
  LaneSpan& last = spans.back();
  if (last.kind == kind) {
    last.last_step = step;
    return;
  }
  if (last.first_step == step) {
    last.kind = kind;
    return;
  }
  last.last_step = step - 1;
  spans.push_back({.kind = kind, .first_step = step, .last_step = step});
}

bool TimelineRecorder::decided(const StepView& view) {
  const SchedulerOutput& decision = view.decision;
  step_ = decision.step;
  TimelineStep entry{.step = step_, .time_ns = view.now_ns};
  entry.scheduled_tokens = static_cast<std::int32_t>(decision.total_num_scheduled_tokens);
  entry.scheduled_requests = static_cast<std::int32_t>(decision.scheduled.size());
  entry.running = static_cast<std::int32_t>(view.decisions.running().size());
  const std::vector<RequestId> waiting = view.decisions.waiting();
  entry.waiting = static_cast<std::int32_t>(waiting.size());
  entry.preempted = static_cast<std::int32_t>(decision.preempted.size());
  for (const ScheduledRequest& scheduled : decision.scheduled) {
    const std::int32_t at = lane_of(scheduled.id);
    if (scheduled.is_new) entry.hit_tokens += scheduled.computed;
    if (at < 0) continue;
    Lane& lane = timeline_.lanes[at];
    if (scheduled.is_new && !scheduled.is_resumed) lane.cached_tokens = scheduled.computed;
    const bool decodes = scheduled.computed >= lane.prompt_tokens;
    extend(at, decodes ? LaneSpan::Kind::decode : LaneSpan::Kind::prefill, step_);
  }
  for (const RequestId id : decision.preempted)
    if (lane_of(id) >= 0) extend(lane_of(id), LaneSpan::Kind::preempted, step_);
  for (const RequestId id : waiting) {
    if (lane_of(id) < 0) continue;
    LaneSpan& last = timeline_.lanes[lane_of(id)].spans.back();
    last.last_step = step_;
  }
  follow_blocks(view.decisions, entry);
  add_step(entry);
  return true;
}

void TimelineRecorder::add_step(const TimelineStep& entry) {
  std::vector<TimelineStep>& steps = timeline_.steps;
  ++timeline_.num_steps;
  if (steps.empty() || steps.back().num_steps >= stride_)
    steps.push_back(entry);
  else
    merge_into(steps.back(), entry);
  if (static_cast<std::int64_t>(steps.size()) > limits_.steps_max) thin_steps();
}

void TimelineRecorder::thin_steps() {
  std::vector<TimelineStep>& steps = timeline_.steps;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < steps.size(); i += 2) {
    steps[kept] = steps[i];
    if (i + 1 < steps.size()) merge_into(steps[kept], steps[i + 1]);
    ++kept;
  }
  steps.resize(kept);
  stride_ *= 2;
}

bool TimelineRecorder::finished(const StepView& view) {
  if (timeline_.steps.empty()) return true;
  timeline_.steps.back().evicted += static_cast<std::int32_t>(view.counters.evicted);
  timeline_.steps.back().stored += static_cast<std::int32_t>(view.counters.stored);
  for (const StoppedRequest& request : view.stopped) {
    if (lane_of(request.id) < 0) continue;
    Lane& lane = timeline_.lanes[lane_of(request.id)];
    lane.output_tokens = view.decisions.num_tokens(request.id) - lane.prompt_tokens;
  }
  return true;
}

void TimelineRecorder::left(RequestId id, FinishReason reason) {
  if (lane_of(id) < 0) return;
  timeline_.lanes[lane_of(id)].ended = name_of(reason);
}

// Records which request holds each block, from the tables of all running requests, where it
// changed. Only the model knows what is cached.
void TimelineRecorder::follow_blocks(const DecisionSource& decisions, TimelineStep& entry) {
  const Scheduler* const model = decisions.model();
  for (BlockChange& block : blocks_) block = {};
  const auto num_groups = static_cast<std::int32_t>(config_.backend.plan.groups.size());
  for (const RequestId id : decisions.running()) {
    for (std::int32_t g = 0; g < num_groups; ++g) {
      for (const BlockId held : decisions.block_table(id, g)) {
        if (held == kNullBlock || static_cast<std::size_t>(index_of(held)) >= blocks_.size())
          continue;
        BlockChange& block = blocks_[index_of(held)];
        if (block.holders++ == 0) block.lane = lane_of(id);
        block.group = g;
      }
    }
  }
  for (std::size_t b = 1; b < blocks_.size(); ++b) {
    BlockChange& block = blocks_[b];
    block.cached = model != nullptr && model->is_cached(static_cast<BlockId>(b));
    (block.holders > 0 ? entry.used_blocks
     : block.cached    ? entry.cached_blocks
                       : entry.free_blocks)++;
  }
  if (step_ % change_stride_ != 0) return;
  const auto followed = std::min(static_cast<std::size_t>(limits_.blocks_max), blocks_.size());
  for (std::size_t b = 1; b < followed; ++b) {
    if (same_state(blocks_[b], drawn_[b])) continue;
    drawn_[b] = blocks_[b];
    BlockChange change = blocks_[b];
    change.step = step_;
    change.block = static_cast<std::int32_t>(b);
    timeline_.block_changes.push_back(change);
  }
  if (static_cast<std::int64_t>(timeline_.block_changes.size()) > limits_.block_changes_max)
    thin_changes();
}

// Changes move to the next step that is still looked at; of several there the last one stays.
void TimelineRecorder::thin_changes() {
  change_stride_ *= 2;
  std::vector<BlockChange>& changes = timeline_.block_changes;
  for (BlockChange& change : changes)
    change.step = (change.step + change_stride_ - 1) / change_stride_ * change_stride_;
  const auto order = [](const BlockChange& a, const BlockChange& b) {
    return std::pair(a.step, a.block) < std::pair(b.step, b.block);
  };
  std::ranges::stable_sort(changes, order);
  std::size_t kept = 0;
  for (std::size_t i = 0; i < changes.size(); ++i) {
    const bool last = i + 1 == changes.size() || order(changes[i], changes[i + 1]);
    if (last) changes[kept++] = changes[i];
  }
  changes.resize(kept);
}

Timeline TimelineRecorder::take() {
  if (stride_ > 1)
    timeline_.notes.push_back(fmt::format("{} steps: {} of them make one column of the charts",
                                          timeline_.num_steps, stride_));
  if (change_stride_ > 1)
    timeline_.notes.push_back(
        fmt::format("the map of blocks looks at the pool every {} steps", change_stride_));
  if (undrawn_lanes_ > 0)
    timeline_.notes.push_back(
        fmt::format("{} later requests have no lane of their own", undrawn_lanes_));
  if (timeline_.num_blocks > limits_.blocks_max)
    timeline_.notes.push_back(fmt::format("the map shows the first {} of {} blocks",
                                          limits_.blocks_max, timeline_.num_blocks));
  return std::move(timeline_);
}

}  // namespace lockstep
