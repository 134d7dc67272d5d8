#include "sim/recording/recording_workload.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "sim/connectors/recorded_connector.h"
#include "sim/connectors/simulated_connector.h"

namespace lockstep {

WorkloadEvent workload_event_of(const RecordedEvent& recorded) {
  WorkloadEvent event;
  switch (recorded.kind) {
    case RecordedEvent::Kind::add:
      event.kind = WorkloadEvent::Kind::add;
      event.request = recorded.request;
      break;
    case RecordedEvent::Kind::abort:
      event.kind = WorkloadEvent::Kind::abort;
      event.name = recorded.name;
      break;
    case RecordedEvent::Kind::reset_prefix_cache:
      event.kind = WorkloadEvent::Kind::reset_prefix_cache;
      event.recorded_reset = recorded.reset_succeeded;
      event.resets_running = recorded.resets_running;
      break;
    case RecordedEvent::Kind::pause_state:
      event.kind = WorkloadEvent::Kind::pause_state;
      event.pause_state = recorded.pause_state;
      break;
    case RecordedEvent::Kind::output:
      event.kind = WorkloadEvent::Kind::output;
      event.output_of_step = recorded.output_of_step;
      break;
    case RecordedEvent::Kind::chunk:
    case RecordedEvent::Kind::close:
    case RecordedEvent::Kind::grammar_ready:
    case RecordedEvent::Kind::grammar_failed:
    case RecordedEvent::Kind::reset_encoder_cache:
      LS_CHECK(false, "an input that no model follows");  // refused when it was read
      break;
  }
  return event;
}

namespace {

class RecordedWorkload final : public GrowingRecording {
 public:
  RecordedWorkload(RecordedSteps source, const std::optional<RecordedConnectorConfig>& connector,
                   Decides decide)
      : source_(std::move(source)), decide_(decide) {
    if (!connector) return;
    connector_.emplace(*connector, step_);
    if (decide == Decides::model) peers_.emplace(*connector_);
  }

  Result<Turn> next_turn(const LoopState&, std::vector<WorkloadEvent>& events) override {
    const auto more = source_.next(step_);
    if (!more) return tl::unexpected(more.error());
    if (!*more) return last_turn();
    if (const std::string what = unfollowed_input(step_, decide_); !what.empty())
      return fail(place().empty() ? what : fmt::format("{}: {}", place(), what));
    ++steps_;
    is_empty_.push_back(step_.scheduled.empty());
    forget_empty_output();
    add_events(step_.before, events);
    return Turn::step;
  }

  Result<void> sample(std::int64_t, std::span<const SampledRow> rows,
                      ModelOutput& output) override {
    for (const SampledRow& row : rows) {
      append(step_.sampled, row.name, output.tokens);
      output.token_ends.push_back(static_cast<std::uint32_t>(output.tokens.size()));
      if (!step_.drafts) continue;
      append(*step_.drafts, row.name, output.draft_tokens);
      output.draft_ends.push_back(static_cast<std::uint32_t>(output.draft_tokens.size()));
    }
    return {};
  }

  // Recorded decisions send it no query and hold its reports: with one, outputs of empty steps
  // arrive.
  KVConnector* connector() override {
    if (peers_) return &*peers_;
    return connector_ ? &*connector_ : nullptr;
  }
  TransferPlanner* transfers() override { return peers_ ? &*peers_ : nullptr; }
  Result<void> connector_report(KVConnectorOutput& report) override {
    return peers_ ? connector_->take_report(report) : Result<void>{};
  }

  void while_running(std::vector<WorkloadEvent>& events) override {
    add_events(step_.during, events);
    if (decide_ == Decides::model || step_.output_of_step || !step_.scheduled.empty()) return;
    // Requests whose load failed, in a step without an output that could tell of their end.
    for (const RecordedStopped& stopped : step_.stopped) {
      WorkloadEvent& event = events.emplace_back();
      event.kind = WorkloadEvent::Kind::abort;
      event.name = stopped.id;
    }
  }

  // How soon a model answers is not the scheduler's decision.
  std::optional<bool> output_comes_in(std::int64_t step) const override {
    return step_.output_of_step && step <= *step_.output_of_step;
  }

  void step_done(std::int64_t) override {}
  void request_left(std::string_view, std::uint64_t) override {}
  std::int64_t now_ns() const override { return step_.step; }
  std::int64_t records_consumed() const override { return steps_; }
  std::string place() const override { return source_.place(); }
  const RecordedStep& current() const override { return step_; }
  const RecordingEnd& end() const override { return source_.end(); }
  void show(const RecordedStep& step) override {
    step_ = step;
    forget_empty_output();
  }

 private:
  // What a grammar or an encoder's cache came to is in the recorded decisions.
  static void add_events(const std::vector<RecordedEvent>& recorded,
                         std::vector<WorkloadEvent>& events) {
    for (const RecordedEvent& event : recorded)
      if (!is_in_decisions(event)) events.push_back(workload_event_of(event));
  }
  static bool is_in_decisions(const RecordedEvent& event) {
    return event.kind == RecordedEvent::Kind::grammar_ready ||
           event.kind == RecordedEvent::Kind::grammar_failed ||
           event.kind == RecordedEvent::Kind::reset_encoder_cache;
  }

  // A recorded failure that no decision shows: of the engine in a step that is not there, or a
  // deadlock.
  Turn last_turn() const {
    if (source_.end().is_cut_off) return Turn::cut;
    const std::string& failed = source_.end().failed_check;
    if (decide_ == Decides::model || failed.empty()) return Turn::end;
    return failed.starts_with("engine.") ? Turn::step : Turn::stuck;
  }

  // The output of a step that scheduled nothing decides nothing without a connector; some
  // recordings note it, and some do not.
  void forget_empty_output() {
    if (connector_ || !step_.output_of_step) return;
    const auto of = static_cast<std::size_t>(*step_.output_of_step);
    if (of < is_empty_.size() && is_empty_[of]) step_.output_of_step.reset();
  }

  static void append(const std::vector<RecordedTokens>& lists, std::string_view name,
                     std::vector<std::int32_t>& tokens) {
    const auto list = std::ranges::find(lists, name, &RecordedTokens::id);
    if (list != lists.end()) tokens.insert(tokens.end(), list->tokens.begin(), list->tokens.end());
  }

  RecordedSteps source_;
  const Decides decide_;
  RecordedStep step_;
  std::optional<RecordedConnector> connector_;
  std::optional<PeerTransfers> peers_;
  std::int64_t steps_ = 0;
  std::vector<bool> is_empty_;  // by step: it scheduled nothing
};

}  // namespace

std::unique_ptr<RecordingWorkload> make_recording_workload(RecordingReader reader) {
  const auto connector = reader.header().connector;
  return std::make_unique<RecordedWorkload>(RecordedSteps(std::move(reader)), connector,
                                            Decides::model);
}

std::unique_ptr<RecordingWorkload> make_recording_workload(
    std::shared_ptr<const Recording> recording, std::string path, Decides decide) {
  const auto connector = recording->header.connector;
  return std::make_unique<RecordedWorkload>(RecordedSteps(std::move(recording), std::move(path)),
                                            connector, decide);
}

std::unique_ptr<GrowingRecording> make_growing_recording(
    const std::optional<RecordedConnectorConfig>& connector) {
  return std::make_unique<RecordedWorkload>(RecordedSteps(), connector, Decides::model);
}

namespace {

std::string not_followed(std::string_view key, std::string_view what) {
  return fmt::format("{}: {} and the model's scheduler does not follow that", key, what);
}

std::string unfollowed_event(const RecordedEvent& event, Decides decide) {
  if (event.is_session)
    return decide == Decides::model
               ? not_followed("resumable", "a request is a session whose input comes in chunks,")
               : "resumable: a request is a session whose input comes in chunks, and a run does "
                 "not follow that; `lockstep audit` does";
  if (decide == Decides::recording) return {};
  if (event.needs_grammar)
    return not_followed("structured", "a request waits for its grammar, which cuts its drafts,");
  if (event.is_pooling)
    return not_followed("pooling", "a request ends with a pooled output instead of tokens,");
  if (event.kind == RecordedEvent::Kind::reset_encoder_cache)
    return not_followed("reset_encoder_cache", "the encoder's cache is emptied,");
  return {};
}

}  // namespace

std::string unfollowed_input(const RecordingHeader& header) {
  const InputOptions& inputs = header.options.inputs;
  const bool has_encoder = has_cross_attention(header.groups);
  if (inputs.is_encoder_decoder.value_or(false) != has_encoder)
    return not_followed("config.is_encoder_decoder",
                        "an encoder and groups of cross_attention are not there together,");
  if (inputs.runner == "pooling")
    return not_followed("config.runner", "the model pools and samples nothing,");
  if (header.encoder_compute_budget && !has_encoder)
    return not_followed("encoder_compute_budget",
                        "an encoder's budget and cache limit what is scheduled,");
  if (header.connector && header.connector->name == "SimpleCPUOffloadConnector")
    return not_followed("connector.name", "stores of SimpleCPUOffloadConnector hold blocks,");
  if (inputs.max_loras) return not_followed("config.max_loras", "adapters in a step are limited,");
  return {};
}

std::string unfollowed_input(const RecordedStep& step, Decides decide) {
  for (const auto* events : {&step.before, &step.during})
    for (const RecordedEvent& event : *events)
      if (std::string what = unfollowed_event(event, decide); !what.empty()) return what;
  return {};
}

}  // namespace lockstep
