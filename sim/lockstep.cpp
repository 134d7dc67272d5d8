#include "sim/lockstep.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "sim/liveness.h"
#include "sim/lockstep_loop.h"

namespace lockstep {

Result<void> LockstepLoop::start(std::span<Backend* const> ranks) {
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

Result<bool> LockstepLoop::advance() {
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
  return goes_on && *goes_on ? execute({}) : goes_on;
}

Result<Turn> LockstepLoop::take_turn(const LoopState& state) {
  events_.clear();
  auto turn = workload_.next_turn(state, events_);
  if (workload_.is_hindered(state.step)) progress_.hindered();
  return turn;
}

Result<RunReport> LockstepLoop::finish() {
  if (auto done = close(); !done) return tl::unexpected(done.error());
  summary_.seconds.wall = wall_.lap();
  return std::move(report_);
}

Result<bool> LockstepLoop::decide() {
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

Result<bool> LockstepLoop::execute(const AgreedBatch& agreed) {
  const SchedulerOutput& decision = *decision_;
  if (auto taken = take_connector_report(); !taken) return tl::unexpected(taken.error());
  plan_transfers(decision);
  if (device_ != nullptr) {
    auto found = device_->run_step(decision, transfers_, agreed, chain_);
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
  const OutputTaken output = process_output(scheduled);
  if (device_ != nullptr) {
    auto found = device_->extract(stopped_, workload_.now_ns());
    if (!found) return tl::unexpected(found.error());
    if (*found) return diverged(std::move(**found));
    const auto extracted = device_->extracted();
    if (observer_ != nullptr && !extracted.empty() && !observer_->extracted(extracted))
      return false;
  }
  if (device_ != nullptr && workload_.transfers() != nullptr) device_->release(decisions_.held());
  hash_stopped(stopped_);
  counters_ = decisions_.take_cache_counters();
  cache_events_ = decisions_.take_cache_events();
  summary_.stored += counters_.stored;
  summary_.evictions += counters_.evicted;
  summary_.refused_allocations += counters_.refused;
  recorder_.finished(stopped_, counters_, decisions_);
  if (workload_.connector() != nullptr) holding_.step(decisions_, decision.step);
  const bool is_async = config_.engine.async_scheduling;
  const bool go_on =
      observe(&StepObserver::finished, decision, stopped_, is_async ? output.step : -1);
  workload_.step_done(decision.total_num_scheduled_tokens);
  for (const RequestId id : left_)
    workload_.request_left(requests_[index_of(id)].name, requests_[index_of(id)].ticket);
  left_.clear();
  // An output that came in may have ended requests, and made room for those that wait.
  const bool made_room =
      output.step >= 0 && !output.is_empty && decisions_.has_unfinished_requests();
  const bool waits_for_output = !std::ranges::all_of(in_flight_, &StepInFlight::is_empty);
  idle_ = !scheduled && decision.preempted.empty() && !waits_for_output && !made_room;
  forget_finished(decision);
  return go_on;
}

// Ends the run.
bool LockstepLoop::diverged(Divergence found) {
  summary_.verdict = Verdict::divergence;
  summary_.divergence = std::move(found);
  return false;
}

void LockstepLoop::count_decision(const SchedulerOutput& decision) {
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

bool LockstepLoop::observe(bool (StepObserver::*hook)(const StepView&),
                           const SchedulerOutput& decision, std::span<const StoppedRequest> stopped,
                           std::int64_t output_of_step) {
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

Result<void> LockstepLoop::close() {
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

Result<std::unique_ptr<LockstepRun>> start_lockstep(const LockstepConfig& config,
                                                    DecisionSource& decisions, Workload& workload,
                                                    std::span<Backend* const> ranks,
                                                    StepObserver* observer) {
  auto run = std::make_unique<LockstepLoop>(config, decisions, workload, observer);
  if (auto started = run->start(ranks); !started) return tl::unexpected(started.error());
  return run;
}

namespace {

// Errors of a reader begin with the file and the line; the others are given both here.
Error with_place(const std::string& place, const Error& error) {
  const std::string file = place.substr(0, place.rfind(':') + 1);
  if (place.empty() || error.message.starts_with(file)) return error;
  return {fmt::format("{}: {}", place, error.message)};
}

}  // namespace

Result<RunReport> run_lockstep(const LockstepConfig& config, DecisionSource& decisions,
                               Workload& workload, std::span<Backend* const> ranks,
                               StepObserver* observer) {
  const auto run = start_lockstep(config, decisions, workload, ranks, observer);
  if (!run) return tl::unexpected(run.error());
  for (;;) {
    const auto goes_on = (*run)->advance();
    if (!goes_on) return tl::unexpected(with_place(workload.place(), goes_on.error()));
    if (!*goes_on) return (*run)->finish();
  }
}

Result<RunReport> run_lockstep(const LockstepConfig& config, DecisionSource& decisions,
                               Workload& workload, Backend* backend, StepObserver* observer) {
  const std::span<Backend* const> ranks(&backend, backend == nullptr ? 0 : 1);
  return run_lockstep(config, decisions, workload, ranks, observer);
}

}  // namespace lockstep
