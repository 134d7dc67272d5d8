#include "sim/recording/run_recorder.h"

#include <algorithm>
#include <memory>
#include <tuple>
#include <utility>

#include "traces/formats/engine_options.h"

namespace lockstep {
namespace {

constexpr std::int64_t kStepsPerTable = 8;

}  // namespace

RecordingHeader recording_header(const EngineConfig& config,
                                 const std::vector<KVCacheGroupSpec>& groups,
                                 std::int64_t num_blocks, const DecisionSource& decisions) {
  RecordingHeader header = header_of_engine(config, groups, num_blocks);
  header.has_cache_events &= decisions.model() != nullptr;  // no other engine tells them yet
  // Nor held drafts.
  header.has_held_drafts = decisions.model() != nullptr && config.num_spec_tokens > 0;
  header.has_stale_outputs = config.async_scheduling;
  header.scheduler_block_size = decisions.scheduler_block_size();
  header.hash_block_size = decisions.hash_block_size();
  return header;
}

RecordingHeader RunRecorder::header(const EngineConfig& config,
                                    const std::vector<KVCacheGroupSpec>& groups,
                                    std::int64_t num_blocks, const DecisionSource& decisions,
                                    KVLoadFailurePolicy policy) const {
  RecordingHeader header = recording_header(config, groups, num_blocks, decisions);
  // Readers of the steps must know, for example, that loads may fail.
  if (connector_) connect_engine(header, policy, connector_->traits());
  return header;
}

void RunRecorder::take_events(std::span<const WorkloadEvent> events,
                              std::vector<RecordedEvent>& into) {
  for (const WorkloadEvent& event : events) {
    RecordedEvent& recorded = into.emplace_back();
    switch (event.kind) {
      case WorkloadEvent::Kind::add:
        recorded.kind = RecordedEvent::Kind::add;
        recorded.request = event.request;
        recorded.priority_given = event.request.priority != 0;
        break;
      case WorkloadEvent::Kind::abort:
        recorded.kind = RecordedEvent::Kind::abort;
        recorded.name = event.name;
        break;
      case WorkloadEvent::Kind::reset_prefix_cache:
        recorded.kind = RecordedEvent::Kind::reset_prefix_cache;
        recorded.resets_running = event.resets_running;
        break;
      case WorkloadEvent::Kind::pause_state:
        recorded.kind = RecordedEvent::Kind::pause_state;
        recorded.pause_state = event.pause_state;
        break;
      case WorkloadEvent::Kind::output:
        recorded.kind = RecordedEvent::Kind::output;
        recorded.output_of_step = event.output_of_step;
        break;
    }
  }
}

Result<Turn> RunRecorder::next_turn(const LoopState& state, std::vector<WorkloadEvent>& events) {
  const std::size_t before = events.size();
  Result<Turn> turn = inner_.next_turn(state, events);
  // The lists of most steps keep their memory.
  const auto keep = [](auto& list) { return list.clear(), std::move(list); };
  auto kept = std::tuple(keep(step_.scheduled), keep(step_.running), keep(step_.waiting),
                         keep(step_.sampled));
  std::destroy_at(&step_);
  std::construct_at(&step_);
  std::tie(step_.scheduled, step_.running, step_.waiting, step_.sampled) = std::move(kept);
  take_events(std::span(events).subspan(before), step_.before);
  return turn;
}

void RunRecorder::request_refused(std::string_view name, std::uint64_t ticket, const Error& error) {
  for (std::vector<RecordedEvent>* events : {&step_.before, &step_.during}) {
    const auto added = std::ranges::find_if(*events, [&](const RecordedEvent& event) {
      return event.kind == RecordedEvent::Kind::add && event.request.name == name;
    });
    if (added != events->end()) events->erase(added);
  }
  inner_.request_refused(name, ticket, error);
}

void RunRecorder::while_running(std::vector<WorkloadEvent>& events) {
  const std::size_t before = events.size();
  inner_.while_running(events);
  take_events(std::span(events).subspan(before), step_.during);
}

bool RunRecorder::decided(const StepView& view) {
  const SchedulerOutput& decision = view.decision;
  write_decision(view, step_);
  if (!decision.common_prefix_blocks.empty())
    step_.common_prefix_blocks = decision.common_prefix_blocks;
  if (view.decisions.model() != nullptr) write_held_drafts(view, step_);
  const auto shown = [&](RequestId id) { return view.decisions.shows_table(id); };
  const bool is_due =
      view.decisions.model() == nullptr || decision.step % kStepsPerTable == kStepsPerTable - 1;
  if (is_due && !step_.running.empty() && std::ranges::all_of(view.decisions.running(), shown))
    step_.tables = tables_of(view);
  if (connector_) {
    auto answers = connector_->take_answers();
    if (!answers.empty()) step_.connector = std::move(answers);
    write_transfers(view, connector_->received(), step_);
    step_.held = connector_->held();  // so far
  }
  write_reset_results(view, step_.before);
  return true;
}

Result<void> RunRecorder::sample(std::int64_t step, std::span<const SampledRow> rows,
                                 ModelOutput& output) {
  if (auto sampled = inner_.sample(step, rows, output); !sampled) return sampled;
  const auto take = [&](const std::vector<std::int32_t>& tokens,
                        const std::vector<std::uint32_t>& ends, std::vector<RecordedTokens>& into) {
    std::uint32_t begin = 0;
    for (std::size_t i = 0; i < ends.size(); ++i) {
      if (ends[i] > begin)
        into.push_back(
            {std::string(rows[i].name), {tokens.begin() + begin, tokens.begin() + ends[i]}});
      begin = ends[i];
    }
  };
  take(output.tokens, output.token_ends, step_.sampled);
  if (!output.draft_ends.empty()) {
    step_.drafts.emplace();
    take(output.draft_tokens, output.draft_ends, *step_.drafts);
  }
  return {};
}

Result<void> RunRecorder::connector_report(KVConnectorOutput& report) {
  if (auto taken = inner_.connector_report(report); !taken || report.empty()) return taken;
  step_.worker = connector_->worker(report);
  std::ranges::sort(step_.worker->received);
  std::ranges::sort(step_.worker->sent);
  return {};
}

bool RunRecorder::finished(const StepView& view) {
  if (connector_) {
    step_.held = connector_->take_held();
    connector_->finished(view, step_.worker);
  }
  if (!step_.during.empty()) write_reset_results(view, step_.during);
  write_outcome(view, step_);
  write_stale_outputs(view, step_);
  write_cache_events(view, step_);
  if (view.output_of_step >= 0) step_.output_of_step = view.output_of_step;
  num_steps_ = step_.step + 1;
  unfinished_.step(view);
  sink_(step_);
  return true;
}

}  // namespace lockstep
