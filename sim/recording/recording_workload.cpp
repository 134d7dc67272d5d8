#include "sim/recording/recording_workload.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/check.h"
#include "reference/profiles/engine_profile.h"
#include "sim/connectors/recorded_connector.h"
#include "sim/connectors/simulated_connector.h"
#include "sim/foreign/reported_decisions.h"
#include "traces/formats/scheduler_protocol.h"

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

// Sessions as requests, for a run that follows recorded decisions: each chunk of input is its own
// request, which has the tokens that the session keeps and continues in its blocks. The request of
// the previous chunk is finished in the step that schedules the next one.
class SessionSplitter {
 public:
  explicit SessionSplitter(const RecordingHeader& header) {
    const EngineProfile* const profile = find_engine_profile(header.engine.profile());
    keeps_computed_ = profile != nullptr && profile->sessions_keep_computed;
  }

  void split(RecordedStep& step) {
    for (auto* const events : {&step.before, &step.during})
      std::erase_if(*events, [&](RecordedEvent& event) { return take(event); });
    for (const RecordedScheduled& row : step.scheduled)
      if (const auto found = sessions_.find(row.id); found != sessions_.end()) {
        Session& session = found->second;
        if (row.is_new && session.has_stopped && !session.chunks.empty()) begin(session, step);
        session.scheduled_to = row.computed + row.tokens;
        const auto output = std::ranges::find(step.sampled, row.id, &RecordedTokens::id);
        if (output != step.sampled.end())
          session.tokens.insert(session.tokens.end(), output->tokens.begin(), output->tokens.end());
      }
    for (const std::string& name : std::exchange(stopped_, {}))
      if (std::ranges::find(step.finished, name) == step.finished.end())
        step.preempted.push_back(name);
    for (const RecordedStopped& stopped : step.stopped)
      if (const auto found = sessions_.find(stopped.id); found != sessions_.end()) {
        stop(found->second);
        stopped_.push_back(stopped.id);
      }
  }

 private:
  struct Session {
    RequestSpec spec;  // of the current chunk
    std::vector<std::int32_t> tokens;
    std::int64_t num_prompt = 0;
    std::int64_t scheduled_to = 0;  // token
    std::int32_t first_max_tokens = 0;
    std::deque<RequestSpec> chunks{};
    bool has_stopped = false;
  };

  // True for an event that no request has.
  bool take(RecordedEvent& event) {
    if (event.kind == RecordedEvent::Kind::add && event.is_session) {
      event.is_session = false;
      std::vector<std::int32_t> tokens = event.request.prompt.materialize();
      const std::int64_t num_prompt = std::ssize(tokens);
      sessions_[event.request.name] = {.spec = event.request,
                                       .tokens = std::move(tokens),
                                       .num_prompt = num_prompt,
                                       .first_max_tokens = event.request.max_tokens};
    } else if (event.kind == RecordedEvent::Kind::chunk) {
      if (const auto found = sessions_.find(event.name); found != sessions_.end())
        found->second.chunks.push_back(event.request);
    }
    return event.kind == RecordedEvent::Kind::chunk || event.kind == RecordedEvent::Kind::close;
  }

  // What follows the token that ends the chunk is dropped.
  void stop(Session& session) const {
    const RequestSpec& spec = session.spec;
    std::int64_t end = std::min(std::ssize(session.tokens), session.num_prompt + spec.max_tokens);
    for (std::int64_t i = session.num_prompt; i < end; ++i) {
      const std::int32_t token = session.tokens[static_cast<std::size_t>(i)];
      const bool ends = token == spec.eos_token ||
                        std::ranges::find(spec.stop_token_ids, token) != spec.stop_token_ids.end();
      if (ends && i + 1 - session.num_prompt >= spec.min_tokens) end = i + 1;
    }
    session.tokens.resize(static_cast<std::size_t>(end));
    session.has_stopped = true;
  }

  // The next chunk takes the place of the last sampled token, which is not computed.
  void begin(Session& session, RecordedStep& step) const {
    const RequestSpec chunk = std::move(session.chunks.front());
    session.chunks.pop_front();
    auto kept = std::ssize(session.tokens);
    if (kept > session.num_prompt)
      kept = keeps_computed_ ? std::min(kept, session.scheduled_to) : kept - 1;
    session.tokens.resize(static_cast<std::size_t>(kept));
    RequestSpec& spec = session.spec;
    for (PromptItem item : chunk.keys.mm) {
      item.first += static_cast<std::int32_t>(kept);
      spec.keys.mm.push_back(std::move(item));
    }
    const std::vector<std::int32_t> added = chunk.prompt.materialize();
    session.tokens.insert(session.tokens.end(), added.begin(), added.end());
    session.num_prompt = std::ssize(session.tokens);
    spec.prompt = {.runs = {{.kind = TokenRun::Kind::literal,
                             .count = static_cast<std::uint32_t>(session.num_prompt)}},
                   .tokens = session.tokens};
    spec.max_tokens = keeps_computed_ ? session.first_max_tokens : chunk.max_tokens;
    spec.eos_token = chunk.eos_token;
    session.has_stopped = false;
    step.finished.push_back(spec.name);
    step.before.push_back({.request = spec});
  }

  bool keeps_computed_ = false;
  std::map<std::string, Session, std::less<>> sessions_;
  std::vector<std::string> stopped_;  // in the last step: they leave the batch in the next one
};

std::shared_ptr<const Recording> without_sessions(std::shared_ptr<const Recording> recording) {
  const auto has_sessions = [](const RecordedStep& step) {
    return std::ranges::any_of(step.before, &RecordedEvent::is_session) ||
           std::ranges::any_of(step.during, &RecordedEvent::is_session);
  };
  if (std::ranges::none_of(recording->steps, has_sessions) ||
      recording->header.options.config.async_scheduling)
    return recording;
  auto split = std::make_shared<Recording>(*recording);
  SessionSplitter splitter(recording->header);
  for (RecordedStep& step : split->steps) splitter.split(step);
  return split;
}

class RecordedWorkload final : public GrowingRecording {
 public:
  RecordedWorkload(RecordedSteps source, const RecordingHeader& header, Decides decide)
      : source_(std::move(source)), decide_(decide) {
    if (!header.connector) return;
    connector_.emplace(*header.connector, step_);
    peers_.emplace(*connector_, true, header.groups, header.options.config.host_pool_num_blocks);
    followed_.emplace(step_, *peers_);
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
  KVConnector* connector() override { return peers_ ? &*peers_ : nullptr; }
  TransferPlanner* transfers() override {
    if (!peers_) return nullptr;
    return decide_ == Decides::model ? static_cast<TransferPlanner*>(&*peers_) : &*followed_;
  }
  Result<void> connector_report(KVConnectorOutput& report) override {
    const bool asks = connector_ && decide_ == Decides::model;
    return asks ? connector_->take_report(report) : Result<void>{};
  }

  void while_running(std::vector<WorkloadEvent>& events) override {
    add_events(step_.during, events);
    if (decide_ == Decides::model || step_.output_of_step || !step_.scheduled.empty()) return;
    // Requests whose load failed, in a step without an output that could tell of their end.
    for (const RecordedStopped& stopped : step_.stopped)
      events.push_back({.kind = WorkloadEvent::Kind::abort, .name = stopped.id});
  }

  // How soon a model answers is not the scheduler's decision.
  std::optional<bool> output_comes_in(std::int64_t step) const override {
    return step_.output_of_step && step <= *step_.output_of_step;
  }

  void step_done(std::int64_t) override {}
  void request_left(std::string_view, std::uint64_t) override {}
  std::int64_t now_ns() const override { return step_.step; }
  std::int64_t records_consumed() const override { return steps_; }
  bool has_parted(std::span<const SampledRow> rows) const override {
    const auto is_recorded = [](const SampledRow& row, const RecordedScheduled& recorded) {
      return row.name == recorded.id && row.num_tokens == recorded.tokens &&
             row.computed == recorded.computed;
    };
    return decide_ == Decides::model && !std::ranges::equal(rows, step_.scheduled, is_recorded);
  }
  std::vector<std::string_view> features() const override {
    std::vector<std::string_view> features;
    for (const RecordedStep& step : source_.in_memory())
      for (const auto* events : {&step.before, &step.during})
        for (const RecordedEvent& event : *events)
          if (event.kind == RecordedEvent::Kind::pause_state)
            features.emplace_back("pause_state");
          else if (event.kind == RecordedEvent::Kind::reset_prefix_cache)
            features.push_back(reset_feature(event.resets_running));
    return features;
  }
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
  std::optional<FollowedTransfers> followed_;  // of recorded decisions
  std::int64_t steps_ = 0;
  std::vector<bool> is_empty_;  // by step: it scheduled nothing
};

}  // namespace

std::unique_ptr<RecordingWorkload> make_recording_workload(RecordingReader reader) {
  const RecordingHeader header = reader.header();
  return std::make_unique<RecordedWorkload>(RecordedSteps(std::move(reader)), header,
                                            Decides::model);
}

std::unique_ptr<RecordingWorkload> make_recording_workload(
    std::shared_ptr<const Recording> recording, std::string path) {
  const RecordingHeader& header = recording->header;
  return std::make_unique<RecordedWorkload>(RecordedSteps(recording, std::move(path)), header,
                                            Decides::model);
}

std::unique_ptr<GrowingRecording> make_growing_recording(const RecordingHeader& header) {
  return std::make_unique<RecordedWorkload>(RecordedSteps(), header, Decides::model);
}

namespace {

std::string not_followed(std::string_view key, std::string_view what) {
  return fmt::format("{}: {} and the model's scheduler does not model that", key, what);
}

std::string unfollowed_event(const RecordedEvent& event, Decides decide) {
  // A damaged recording may have events of a session that is not there.
  using Kind = RecordedEvent::Kind;
  const bool is_of_session = event.kind == Kind::chunk || event.kind == Kind::close;
  if (event.is_session || (is_of_session && decide == Decides::model))
    return decide == Decides::model
               ? not_followed("resumable", "a request is a session whose input comes in chunks,")
               : "resumable: a request is a session whose input comes in chunks, and a run does "
                 "not follow what steps in flight write after its end; `lockstep audit` does";
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
                        "an encoder and cross_attention groups do not occur together,");
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

namespace {

class RecordingReporter final : public StepReporter {
 public:
  explicit RecordingReporter(std::shared_ptr<const Recording> recording)
      : recording_(std::move(recording)) {
    for (const RecordedStep& step : recording_->steps)
      for (const auto* events : {&step.before, &step.during})
        for (const RecordedEvent& event : *events)
          if (event.kind == RecordedEvent::Kind::reset_prefix_cache)
            resets_.push_back(event.reset_succeeded);
  }

  Result<void> add(const RequestSpec& request) override {
    // The engine never schedules it, so the audit does not count it either.
    if (request.prompt.size() > recording_->header.options.config.max_model_len) return {};
    if (requests_.contains(request.name))
      fail(fmt::format("two live requests have the name {}", request.name));
    requests_[request.name] = {.num_prompt = request.prompt.size(),
                               .num_tokens = request.prompt.size(),
                               .max_tokens = request.max_tokens,
                               .min_tokens = request.min_tokens,
                               .stop_tokens = request.stop_token_ids,
                               .reset_after = current_ == nullptr ? -1 : current_->step};
    if (request.eos_token) requests_[request.name].stop_tokens.push_back(*request.eos_token);
    return {};
  }
  void abort_request(const std::string& name) override { requests_.erase(name); }
  void set_pause_state(PauseState) override {}

  std::optional<bool> reset_prefix_cache(bool preempts_running, RecordedStep& step) override {
    const bool succeeded = next_reset_ < resets_.size() && resets_[next_reset_++];
    if (preempts_running) {
      for (const std::string& name : step.running)
        if (const auto found = requests_.find(name); found != requests_.end())
          found->second.reset_after = current_ == nullptr ? -1 : current_->step;
      step.waiting.insert(step.waiting.begin(), step.running.begin(), step.running.end());
      step.running.clear();
    }
    return succeeded;
  }

  bool decide(std::int64_t number, RecordedStep& step) override {
    if (number >= std::ssize(recording_->steps)) {
      constexpr std::string_view kEngine = "engine.";
      const RecordingEnd& end = recording_->end;
      if (end.failed_check.starts_with(kEngine))
        failure_ = {.kind = end.failed_check.substr(kEngine.size()), .what = end.failed_what};
      else
        fail(fmt::format("the recording ends before step {}", number));
      return false;
    }
    current_ = &recording_->steps[static_cast<std::size_t>(number)];
    num_told_ = 0;
    step = *current_;
    step.stopped.clear();
    return true;
  }

  bool update(const RecordedStep& output, RecordedStep& step, TokenCounts& counts) override {
    for (const RecordedTokens& row : output.sampled) {
      const auto found = requests_.find(row.id);
      if (found == requests_.end()) continue;
      found->second.num_tokens += num_taken(row, output.step, found->second);
      counts.num_tokens.emplace_back(row.id, found->second.num_tokens);
    }
    step.stopped.clear();
    if (!is_last_output(output.step)) return true;
    const auto& stopped = current_->stopped;
    step.stopped.assign(stopped.begin() + static_cast<std::ptrdiff_t>(num_told_), stopped.end());
    num_told_ = stopped.size();
    for (const RecordedStopped& end : step.stopped) {
      requests_.erase(end.id);
      std::erase(step.running, end.id);
      std::erase(step.waiting, end.id);
      if (step.skipped)
        std::erase_if(*step.skipped, [&](const RecordedSkipped& row) { return row.id == end.id; });
    }
    return true;
  }

  const EngineFailure* failure() const override { return failure_ ? &*failure_ : nullptr; }
  void fail(std::string what) override {
    if (!failure_) failure_ = {.kind = "recording", .what = std::move(what)};
  }

 private:
  struct Request {
    std::int64_t num_prompt = 0;
    std::int64_t num_tokens = 0;  // prompt, and what outputs gave
    std::int32_t max_tokens = 0;
    std::int32_t min_tokens = 0;
    std::vector<std::int32_t> stop_tokens;
    // The last step whose output is not the request's: before it arrived, or a reset preempted it.
    std::int64_t reset_after = -1;
  };

  // Tokens of an output that its request takes; of one that ends, up to the token that ends it.
  std::int64_t num_taken(const RecordedTokens& row, std::int64_t of_step,
                         const Request& request) const {
    for (const RecordedStaleOutput& stale : current_->stale_outputs)
      if (stale.id == row.id && stale.of_step == of_step) return stale.taken;
    if (of_step <= request.reset_after) return 0;
    if (std::ranges::find(current_->stopped, row.id, &RecordedStopped::id) ==
        current_->stopped.end())
      return std::ssize(row.tokens);
    std::int64_t taken = 0;
    for (const std::int32_t token : row.tokens) {
      const std::int64_t num_output = request.num_tokens + ++taken - request.num_prompt;
      if (num_output >= request.max_tokens) break;
      if (num_output >= request.min_tokens &&
          std::ranges::find(request.stop_tokens, token) != request.stop_tokens.end())
        break;
    }
    return taken;
  }

  bool is_last_output(std::int64_t of_step) const {
    return !current_->output_of_step || of_step >= *current_->output_of_step;
  }

  const std::shared_ptr<const Recording> recording_;
  const RecordedStep* current_ = nullptr;  // decided last
  std::size_t num_told_ = 0;               // of its ends
  std::vector<bool> resets_;               // what they returned, in order
  std::size_t next_reset_ = 0;
  std::unordered_map<std::string, Request> requests_;
  std::optional<EngineFailure> failure_;
};

}  // namespace

FollowedRecording follow_recording(std::shared_ptr<const Recording> recording, std::string path) {
  recording = without_sessions(std::move(recording));
  const RecordingHeader& header = recording->header;
  auto clients = std::make_unique<RecordedWorkload>(RecordedSteps(recording, std::move(path)),
                                                    header, Decides::recording);
  return {.clients = std::move(clients),
          .decisions = [recording = std::move(recording)](
                           const EngineToDecide&) -> Result<std::unique_ptr<DecisionSource>> {
            return std::make_unique<ReportedDecisions>(
                std::make_unique<RecordingReporter>(recording), recording->header, nullptr);
          }};
}

}  // namespace lockstep
