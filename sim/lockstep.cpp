#include "sim/lockstep.h"

#include <fmt/core.h>

#include <algorithm>
#include <deque>
#include <unordered_map>
#include <utility>

#include "reference/check.h"
#include "sim/conform/recorded_terms.h"
#include "sim/connectors/connector_report.h"
#include "sim/device_side.h"
#include "sim/liveness.h"
#include "sim/report/timeline_recorder.h"
#include "sim/standstill.h"
#include "sim/state_hash.h"
#include "sim/stopwatch.h"

namespace lockstep {
namespace {

// What the loop knows of a live request.
struct LiveRequest {
  std::string name;
  std::uint64_t ticket = 0;
  std::int64_t num_prompt_tokens = 0;
  std::int64_t num_output_tokens = 0;  // sampled, whether the engine has seen them or not
  bool live = false;
};

struct StepInFlight {
  std::int64_t step = 0;
  ModelOutput output;
};

class Run final : public LockstepRun {
 public:
  Run(const LockstepConfig& config, DecisionSource& decisions, Workload& workload,
      StepObserver* observer)
      : config_(config),
        decisions_(decisions),
        workload_(workload),
        observer_(observer),
        recorder_(config),
        progress_(config) {}

  Result<void> start(std::span<Backend* const> ranks);
  Result<bool> advance() override;
  Result<Turn> take_turn(const LoopState& state) override;
  Result<bool> decide() override;
  std::int64_t num_scheduled_tokens() const override {
    return decision_->total_num_scheduled_tokens;
  }
  Result<bool> execute(std::int32_t padded_tokens) override;
  bool is_idle() const override { return idle_; }
  bool is_stuck() override { return !workload_.is_scripted() && progress_.is_stuck(decisions_); }
  void set_stuck() override { set_liveness_verdict(config_, decisions_, holding_, summary_); }
  const RunSummary& summary() const override { return summary_; }
  Result<RunReport> finish() override;

 private:
  bool diverged(Divergence found);
  Result<void> apply_events();
  Result<void> add_request(WorkloadEvent& event);
  void abort_again(std::string_view name);
  Result<void> sample(const SchedulerOutput& decision);
  Result<void> take_connector_report();
  void plan_transfers(const SchedulerOutput& decision);
  void attach_connector_report();
  void count_decision(const SchedulerOutput& decision);
  std::span<const StoppedRequest> process_output(bool anything_scheduled,
                                                 std::int64_t& output_of_step);
  void forget_voided_tokens();
  void hash_stopped(std::span<const StoppedRequest> stopped);
  void leave(RequestId id, std::string_view reason);
  void forget_finished(const SchedulerOutput& decision);
  bool observe(bool (StepObserver::*hook)(const StepView&), const SchedulerOutput& decision,
               std::span<const StoppedRequest> stopped, std::int64_t output_of_step);
  Result<void> close();

  const LockstepConfig& config_;
  DecisionSource& decisions_;
  Workload& workload_;
  StepObserver* observer_;
  std::unique_ptr<DeviceSide> device_;
  TimelineRecorder recorder_;
  ProgressGuard progress_;
  HoldingWatch holding_;
  RunReport report_;
  RunSummary& summary_ = report_.summary;
  StateHashChain chain_;
  CacheCounters counters_;
  std::vector<CacheEvent> cache_events_;
  Stopwatch wall_;
  Stopwatch watch_;
  const SchedulerOutput* decision_ = nullptr;  // of the step that is under way

  std::vector<LiveRequest> requests_;  // by RequestId
  std::unordered_map<std::string, RequestId> ids_;
  std::vector<WorkloadEvent> events_;
  std::vector<RequestId> left_;       // in this step
  std::vector<std::uint8_t> resets_;  // results of reset_prefix_cache, 0 or 1
  std::vector<SampledRow> rows_;
  KVConnectorOutput connector_report_;      // of the step that is being run
  StepTransfers transfers_;                 // of the same
  std::vector<std::int64_t> block_tokens_;  // per group, that an entry of a table stands for
  std::deque<StepInFlight> in_flight_;
  std::vector<ModelOutput> spare_outputs_;
  std::function<std::string_view(RequestId)> name_of_ = [this](RequestId id) {
    return std::string_view(requests_[index_of(id)].name);
  };
  bool idle_ = true;
};

Result<void> Run::start(std::span<Backend* const> ranks) {
  wall_.lap();
  summary_.backend = "none";
  for (const KVCacheGroupSpec& group : config_.device.plan.groups)
    block_tokens_.push_back(group.spec.block_size * config_.device.context.num_ranks);
  if (ranks.empty()) return {};
  summary_.backend = fmt::format("{} ({})", ranks.front()->name(), ranks.front()->device());
  auto device = DeviceSide::create(config_, ranks, summary_);
  if (!device) return tl::unexpected(device.error());
  device_ = std::move(*device);
  if (workload_.connector() != nullptr && workload_.transfers() == nullptr)
    return fail("what this KV connector loads is known to nobody; run the decisions alone");
  return {};
}

Result<bool> Run::advance() {
  if (config_.steps_max != 0 && summary_.steps >= config_.steps_max) return false;
  const auto turn = take_turn(
      {.step = summary_.steps, .idle = idle_, .unfinished = decisions_.has_unfinished_requests()});
  if (!turn) return tl::unexpected(turn.error());
  if (*turn == Turn::end) {
    if (has_wait_cycle(config_, decisions_, holding_))
      set_liveness_verdict(config_, decisions_, holding_, summary_);
    return false;
  }
  if (*turn == Turn::stuck || is_stuck()) {
    set_stuck();
    return false;
  }
  const auto goes_on = decide();
  return goes_on && *goes_on ? execute(0) : goes_on;
}

Result<Turn> Run::take_turn(const LoopState& state) {
  events_.clear();
  auto turn = workload_.next_turn(state, events_);
  if (workload_.is_hindered(state.step)) progress_.hindered();
  return turn;
}

Result<RunReport> Run::finish() {
  if (auto done = close(); !done) return tl::unexpected(done.error());
  summary_.seconds.wall = wall_.lap();
  return std::move(report_);
}

Result<bool> Run::decide() {
  if (auto applied = apply_events(); !applied) return tl::unexpected(applied.error());
  watch_.lap();
  const SchedulerOutput& decision = decisions_.schedule();
  decision_ = &decision;
  summary_.seconds.schedule += watch_.lap();
  count_decision(decision);
  chain_.add(decision);
  chain_.add(static_cast<std::uint64_t>(decisions_.num_free_blocks()));
  if (!observe(&StepObserver::decided, decision, {}, -1)) return false;
  recorder_.decided(decision, decisions_, workload_.now_ns());
  return true;
}

Result<bool> Run::execute(std::int32_t padded_tokens) {
  const SchedulerOutput& decision = *decision_;
  if (auto taken = take_connector_report(); !taken) return tl::unexpected(taken.error());
  plan_transfers(decision);
  if (device_ != nullptr) {
    auto found = device_->run_step(decision, transfers_, padded_tokens, chain_);
    if (!found) return tl::unexpected(found.error());
    if (*found) return diverged(std::move(**found));
  }
  if (auto sampled = sample(decision); !sampled) return tl::unexpected(sampled.error());
  attach_connector_report();
  events_.clear();
  workload_.while_running(events_);
  if (!events_.empty()) {
    if (auto applied = apply_events(); !applied) return tl::unexpected(applied.error());
  }
  const bool scheduled = !decision.scheduled.empty();
  std::int64_t output_of_step = -1;
  const auto stopped = process_output(scheduled, output_of_step);
  if (device_ != nullptr) {
    auto found = device_->extract(stopped, workload_.now_ns());
    if (!found) return tl::unexpected(found.error());
    if (*found) return diverged(std::move(**found));
    const auto extracted = device_->extracted();
    if (observer_ != nullptr && !extracted.empty() && !observer_->extracted(extracted))
      return false;
  }
  if (device_ != nullptr && workload_.transfers() != nullptr) device_->release(decisions_.held());
  hash_stopped(stopped);
  counters_ = decisions_.take_cache_counters();
  cache_events_ = decisions_.take_cache_events();
  summary_.stored += counters_.stored;
  summary_.evictions += counters_.evicted;
  summary_.refused_allocations += counters_.refused;
  recorder_.finished(stopped, counters_, decisions_);
  if (workload_.connector() != nullptr) holding_.step(decisions_, decision.step);
  const bool go_on = observe(&StepObserver::finished, decision, stopped, output_of_step);
  workload_.step_done(decision.total_num_scheduled_tokens);
  for (const RequestId id : left_)
    workload_.request_left(requests_[index_of(id)].name, requests_[index_of(id)].ticket);
  left_.clear();
  // An output that came in may have ended requests, and made room for those that wait.
  const bool made_room = output_of_step >= 0 && decisions_.has_unfinished_requests();
  idle_ = !scheduled && decision.preempted.empty() && in_flight_.empty() && !made_room;
  forget_finished(decision);
  return go_on;
}

// Ends the run.
bool Run::diverged(Divergence found) {
  summary_.verdict = Verdict::divergence;
  summary_.divergence = std::move(found);
  return false;
}

Result<void> Run::apply_events() {
  resets_.clear();
  for (WorkloadEvent& event : events_) {
    switch (event.kind) {
      case WorkloadEvent::Kind::add:
        if (auto added = add_request(event); !added) return added;
        break;
      case WorkloadEvent::Kind::abort: {
        const auto id = ids_.find(event.name);
        if (id == ids_.end()) {
          abort_again(event.name);
          break;
        }
        decisions_.abort_request(id->second);
        ++summary_.aborted_requests;
        leave(id->second, "abort");
        break;
      }
      case WorkloadEvent::Kind::reset_prefix_cache:
        resets_.push_back(decisions_.reset_prefix_cache() ? 1 : 0);
        chain_.add(resets_.back());
        break;
    }
  }
  return {};
}

// It has left; as long as the engine has not reported that, it hears of the abort all the same.
void Run::abort_again(std::string_view name) {
  for (std::size_t i = 0; i < requests_.size(); ++i)
    if (requests_[i].live && requests_[i].name == name)
      decisions_.abort_request(RequestId{static_cast<std::uint32_t>(i)});
}

Result<void> Run::add_request(WorkloadEvent& event) {
  ++summary_.requests;
  std::string name = event.request.name;
  const std::int64_t prompt = event.request.prompt.size();
  RequestSpec spec;  // the worker's copy
  if (device_ != nullptr) spec = event.request;
  const auto id = decisions_.add_request(std::move(event.request));
  if (!id) {
    if (++summary_.refused_requests == 1)
      summary_.not_checked.push_back(
          fmt::format("refused requests, the first: {}", id.error().message));
    workload_.request_refused(name, event.ticket, id.error());
    return {};
  }
  if (index_of(*id) >= requests_.size()) requests_.resize(index_of(*id) + 1);
  LS_CHECK(!requests_[index_of(*id)].live, "id {} of {} is {}'s", index_of(*id), name,
           requests_[index_of(*id)].name);
  if (!ids_.emplace(name, *id).second)
    return fail(fmt::format("two live requests are called {}", name));
  chain_.add(name);
  recorder_.added(*id, name, prompt, summary_.steps);
  requests_[index_of(*id)] = {.name = std::move(name),
                              .ticket = event.ticket,
                              .num_prompt_tokens = prompt,
                              .num_output_tokens = 0,
                              .live = true};
  if (device_ != nullptr) device_->add_request(*id, spec);
  progress_.arrived();
  return {};
}

void Run::count_decision(const SchedulerOutput& decision) {
  ++summary_.steps;
  summary_.request_steps += static_cast<std::int64_t>(decision.scheduled.size());
  summary_.scheduled_tokens += decision.total_num_scheduled_tokens;
  summary_.preemptions += static_cast<std::int64_t>(decision.preempted.size());
  for (const ScheduledRequest& scheduled : decision.scheduled) {
    if (!scheduled.is_new || scheduled.is_resumed) continue;
    summary_.prompt_tokens += requests_[index_of(scheduled.id)].num_prompt_tokens;
    summary_.cached_tokens += scheduled.computed;
    summary_.hits += scheduled.computed > 0 ? 1 : 0;
  }
}

// The model's answer to the step; the worker knows it at once, the engine when it processes it.
Result<void> Run::sample(const SchedulerOutput& decision) {
  if (decision.scheduled.empty()) return {};
  rows_.clear();
  const std::int32_t* draft = decision.spec_tokens.data();
  for (const ScheduledRequest& scheduled : decision.scheduled) {
    const LiveRequest& request = requests_[index_of(scheduled.id)];
    const auto num_spec = static_cast<std::size_t>(scheduled.num_spec);
    const std::int64_t known = request.num_prompt_tokens + request.num_output_tokens;
    rows_.push_back({.ticket = request.ticket,
                     .name = request.name,
                     .num_prompt_tokens = request.num_prompt_tokens,
                     .num_output_tokens = request.num_output_tokens,
                     .samples = scheduled.computed + scheduled.num_tokens >= known,
                     .drafts = {draft, num_spec}});
    draft += num_spec;
  }
  StepInFlight& flight = in_flight_.emplace_back();
  flight.step = decision.step;
  if (!spare_outputs_.empty()) {
    flight.output = std::move(spare_outputs_.back());
    spare_outputs_.pop_back();
  }
  ModelOutput& output = flight.output;
  output.tokens.clear();
  output.token_ends.clear();
  output.draft_tokens.clear();
  output.draft_ends.clear();
  output.kv_connector_output.clear();
  if (auto done = workload_.sample(decision.step, rows_, output); !done) return done;
  LS_CHECK(output.token_ends.size() == decision.scheduled.size(), "{} rows sampled, {} scheduled",
           output.token_ends.size(), decision.scheduled.size());
  std::uint32_t begin = 0;
  for (std::size_t i = 0; i < decision.scheduled.size(); ++i) {
    const std::uint32_t end = output.token_ends[i];
    LiveRequest& request = requests_[index_of(decision.scheduled[i].id)];
    request.num_output_tokens += end - begin;
    if (end != begin) progress_.sampled();
    if (device_ != nullptr)
      device_->append_sampled(decision.scheduled[i].id,
                              std::span(output.tokens).subspan(begin, end - begin));
    begin = end;
  }
  return {};
}

// What the connector's workers will have done when the step is over.
Result<void> Run::take_connector_report() {
  auto report = connector_report(workload_, decisions_, config_.device.plan);
  if (!report) return tl::unexpected(report.error());
  connector_report_ = std::move(*report);
  return {};
}

void Run::plan_transfers(const SchedulerOutput& decision) {
  if (workload_.transfers() == nullptr) return;
  transfers_.clear();
  for (const HeldRequest& held : decisions_.held()) transfers_.held.push_back(held.id);
  workload_.transfers()->plan({.decision = decision,
                               .decisions = decisions_,
                               .report = connector_report_,
                               .block_tokens = block_tokens_},
                              transfers_);
  summary_.blocks_loaded += std::ssize(transfers_.loads);
  summary_.blocks_stored += std::ssize(transfers_.stores);
  summary_.blocks_lost += std::ssize(transfers_.lost);
  summary_.host_evictions = transfers_.num_evicted;
  summary_.frees_delayed = transfers_.num_frees_delayed;
}

// Comes in with the step's output, also when the step runs nothing.
void Run::attach_connector_report() {
  if (connector_report_.empty()) return;
  if (in_flight_.empty()) in_flight_.push_back({.step = -1, .output = {}});
  in_flight_.back().output.kv_connector_output = std::move(connector_report_);
  progress_.sampled();
}

// With asynchronous scheduling a step stays in flight while the next one is decided.
std::span<const StoppedRequest> Run::process_output(bool anything_scheduled,
                                                    std::int64_t& output_of_step) {
  if (in_flight_.empty()) return {};
  if (config_.engine.async_scheduling) {
    const bool waits = !anything_scheduled || in_flight_.size() >= 2;
    if (!workload_.output_comes_in().value_or(waits)) return {};
  }
  StepInFlight& flight = in_flight_.front();
  output_of_step = flight.step;
  watch_.lap();
  const auto stopped = decisions_.update_from_output(flight.output);
  summary_.seconds.schedule += watch_.lap();
  if (!flight.output.kv_connector_output.invalid_block_ids.empty()) forget_voided_tokens();
  spare_outputs_.push_back(std::move(flight.output));
  in_flight_.pop_front();
  return stopped;
}

// What was sampled behind blocks that a load did not fill, the engine has dropped.
void Run::forget_voided_tokens() {
  for (const RequestId id : decisions_.running()) {
    LiveRequest& request = requests_[index_of(id)];
    request.num_output_tokens = decisions_.num_tokens(id) - request.num_prompt_tokens;
    if (device_ != nullptr) device_->drop_sampled(id, decisions_.num_tokens(id));
  }
}

void Run::hash_stopped(std::span<const StoppedRequest> stopped) {
  chain_.add(stopped.size());
  for (const StoppedRequest& request : stopped) {
    chain_.add(static_cast<std::uint64_t>(index_of(request.id)) << 8 |
               static_cast<std::uint64_t>(request.reason));
    ++summary_.finished_requests;
    leave(request.id, reason_of(request.reason));
  }
}

// It leaves the engine in this step; its id lives on until a decision reports it finished.
void Run::leave(RequestId id, std::string_view reason) {
  const LiveRequest& request = requests_[index_of(id)];
  summary_.output_tokens += decisions_.num_tokens(id) - request.num_prompt_tokens;
  ids_.erase(request.name);
  left_.push_back(id);
  recorder_.ended(id, reason);
  progress_.left();
}

// The step has told the worker that these have left: their ids may be given to others.
void Run::forget_finished(const SchedulerOutput& decision) {
  for (const RequestId id : decision.finished) {
    LiveRequest& request = requests_[index_of(id)];
    LS_CHECK(request.live, "id {} finishes and is not live", index_of(id));
    request = {};
  }
}

bool Run::observe(bool (StepObserver::*hook)(const StepView&), const SchedulerOutput& decision,
                  std::span<const StoppedRequest> stopped, std::int64_t output_of_step) {
  if (observer_ == nullptr) return true;
  return (observer_->*hook)({.decision = decision,
                             .stopped = stopped,
                             .counters = counters_,
                             .decisions = decisions_,
                             .state_hash = chain_.value(),
                             .output_of_step = output_of_step,
                             .cache_events = cache_events_,
                             .resets = resets_,
                             .name = name_of_});
}

Result<void> Run::close() {
  if (device_ != nullptr) {
    auto found = device_->finish(summary_.verdict != Verdict::divergence);
    if (!found) return tl::unexpected(found.error());
    if (*found) {
      summary_.verdict = Verdict::divergence;
      summary_.divergence = std::move(**found);
    }
  } else {
    summary_.not_checked.push_back("memory: no backend, the model's decisions alone");
  }
  summary_.simulated_ns = workload_.now_ns();
  summary_.state_hash = chain_.value();
  report_.records_consumed = workload_.records_consumed();
  report_.timeline = recorder_.take();
  return {};
}

}  // namespace

Result<std::unique_ptr<LockstepRun>> start_lockstep(const LockstepConfig& config,
                                                    DecisionSource& decisions, Workload& workload,
                                                    std::span<Backend* const> ranks,
                                                    StepObserver* observer) {
  auto run = std::make_unique<Run>(config, decisions, workload, observer);
  if (auto started = run->start(ranks); !started) return tl::unexpected(started.error());
  return run;
}

Result<RunReport> run_lockstep(const LockstepConfig& config, DecisionSource& decisions,
                               Workload& workload, std::span<Backend* const> ranks,
                               StepObserver* observer) {
  const auto run = start_lockstep(config, decisions, workload, ranks, observer);
  if (!run) return tl::unexpected(run.error());
  for (;;) {
    const auto goes_on = (*run)->advance();
    if (!goes_on) return tl::unexpected(goes_on.error());
    if (!*goes_on) return (*run)->finish();
  }
}

Result<RunReport> run_lockstep(const LockstepConfig& config, DecisionSource& decisions,
                               Workload& workload, Backend* backend, StepObserver* observer) {
  const std::span<Backend* const> ranks(&backend, backend == nullptr ? 0 : 1);
  return run_lockstep(config, decisions, workload, ranks, observer);
}

}  // namespace lockstep
