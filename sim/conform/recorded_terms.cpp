#include "sim/conform/recorded_terms.h"

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <utility>

#include "base/check.h"

namespace lockstep {
namespace {

std::string_view status_of(RequestStatus status) {
  switch (status) {
    case RequestStatus::waiting:
      return "WAITING";
    case RequestStatus::waiting_for_remote_kvs:
      return "WAITING_FOR_REMOTE_KVS";
    case RequestStatus::preempted:
      return "PREEMPTED";
    case RequestStatus::running:
    case RequestStatus::finished:
      break;
  }
  LS_CHECK(false, "a request of status {} in the queue", static_cast<int>(status));
}

// The engine reports these as sets; recordings hold them sorted.
std::vector<std::string> sorted_names_of(const StepView& view, std::span<const RequestId> ids) {
  std::vector<std::string> names = names_of(view, ids);
  std::ranges::sort(names);
  return names;
}

RecordedScheduled scheduled_of(const StepView& view, std::size_t index, std::size_t first_spec) {
  const SchedulerOutput& decision = view.decision;
  const ScheduledRequest& row = decision.scheduled[index];
  RecordedScheduled scheduled;
  scheduled.id = view.name(row.id);
  scheduled.tokens = row.num_tokens;
  scheduled.is_new = row.is_new;
  scheduled.resumed = row.is_resumed;
  scheduled.computed = row.computed;
  const auto spec = decision.spec_tokens.begin() + static_cast<std::ptrdiff_t>(first_spec);
  scheduled.spec.assign(spec, spec + row.num_spec);
  BlocksPerGroup blocks;
  bool any = row.is_new || row.is_resumed;
  for (std::int32_t g = 0; g < decision.num_groups; ++g) {
    const auto handed = decision.blocks(index, g);
    any |= !handed.empty();
    blocks.emplace_back(handed.begin(), handed.end());
  }
  if (any) scheduled.blocks = std::move(blocks);
  return scheduled;
}

}  // namespace

std::string_view reason_of(FinishReason reason) {
  switch (reason) {
    case FinishReason::stop:
      return "stop";
    case FinishReason::length:
      return "length";
    case FinishReason::abort:
      return "abort";
    case FinishReason::error:
      return "error";
  }
  return "?";
}

std::vector<std::string> names_of(const StepView& view, std::span<const RequestId> ids) {
  std::vector<std::string> names;
  for (const RequestId id : ids) names.emplace_back(view.name(id));
  return names;
}

void write_decision(const StepView& view, RecordedStep& step) {
  const SchedulerOutput& decision = view.decision;
  step.step = decision.step;
  std::size_t first_spec = 0;
  for (std::size_t i = 0; i < decision.scheduled.size(); ++i) {
    step.scheduled.push_back(scheduled_of(view, i, first_spec));
    first_spec += static_cast<std::size_t>(decision.scheduled[i].num_spec);
  }
  step.preempted = sorted_names_of(view, decision.preempted);
  step.finished = sorted_names_of(view, decision.finished);
  step.zero = decision.zero;
  step.running = names_of(view, view.decisions.running());
  step.waiting = names_of(view, view.decisions.waiting());
  step.free_blocks = view.decisions.num_free_blocks();
}

RecordedTable table_of(const StepView& view, RequestId id) {
  RecordedTable table;
  table.id = view.decisions.name(id);
  for (std::int32_t g = 0; g < view.decision.num_groups; ++g) {
    const auto blocks = view.decisions.block_table(id, g);
    table.blocks.emplace_back(blocks.begin(), blocks.end());
  }
  return table;
}

std::vector<RecordedTable> tables_of(const StepView& view) {
  std::vector<RecordedTable> tables;
  for (const RequestId id : view.decisions.running()) tables.push_back(table_of(view, id));
  return tables;
}

void write_transfers(const StepView& view, RecordedStep& step) {
  step.skipped.emplace();
  std::vector<RecordedTable> loading;
  for (const SkippedRequest& request : view.decisions.skipped()) {
    step.skipped->push_back(
        {std::string(view.name(request.id)), std::string(status_of(request.status))});
    if (request.is_loading) loading.push_back(table_of(view, request.id));
  }
  for (const HeldRequest& request : view.decisions.held())
    if (request.is_loading) loading.push_back(table_of(view, request.id));
  std::ranges::sort(loading, {}, &RecordedTable::id);
  if (!loading.empty()) step.loading = std::move(loading);
}

void write_reset_results(const StepView& view, std::vector<RecordedEvent>& events) {
  std::size_t reset = 0;
  for (RecordedEvent& event : events) {
    if (event.kind != RecordedEvent::Kind::reset_prefix_cache) continue;
    LS_CHECK(reset < view.resets.size(), "{} resets ran, and one more is written down",
             view.resets.size());
    event.reset_succeeded = view.resets[reset++] != 0;
  }
}

void write_outcome(const StepView& view, RecordedStep& step) {
  for (const StoppedRequest& stopped : view.stopped)
    step.stopped.push_back({.id = std::string(view.name(stopped.id)),
                            .reason = std::string(reason_of(stopped.reason))});
  step.stored = view.counters.stored;
  step.evicted = view.counters.evicted;
  step.cleared = view.counters.cleared;
}

}  // namespace lockstep
