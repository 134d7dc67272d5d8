#include "sim/engine/lockstep.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/failed_check.h"
#include "reference/profiles/releases.h"
#include "sim/step/backend_config.h"

namespace lockstep {

static StepObserver& observer_of(const RunParts& parts) {
  // An observer without state and effect, so that no call site has to test for null.
  static StepObserver nobody;
  return parts.observer == nullptr ? nobody : *parts.observer;
}

LockstepRun::LockstepRun(const RunConfig& config, const RunParts& parts)
    : config_(config),
      decisions_(parts.decisions),
      workload_(parts.workload),
      observer_(observer_of(parts)),
      connector_(config, decisions_, workload_),
      progress_(config) {}

Result<std::unique_ptr<LockstepRun>> LockstepRun::start(const RunConfig& config,
                                                        const RunParts& parts) {
  std::unique_ptr<LockstepRun> run(new LockstepRun(config, parts));
  LS_RETURN_IF_ERROR(run->open(parts));
  return run;
}

Result<void> LockstepRun::open(const RunParts& parts) {
  wall_.lap();
  summary_.backend = "none";
  // Every combination is supported without memory: decisions only.
  if (parts.ranks.empty()) return {};
  RunFacts facts = facts_of(config_.engine, config_.backend).with({RunTrait::backend});
  facts.traits.add_if(connector_.is_there(), RunTrait::connector);
  facts.traits.add_if(decisions_.model() == nullptr, RunTrait::other_engine);
  LS_RETURN_IF_ERROR(supported_with_memory(facts));
  const Backend& first = *parts.ranks.front();
  summary_.backend = fmt::format("{} ({})", first.name(), first.device());
  LS_ASSIGN_OR_RETURN(memory_, RunMemory::create(config_, parts.ranks, parts.checks, summary_));
  // Without a planner, nothing describes which bytes a load brings.
  if (connector_.is_there() && workload_.transfers() == nullptr)
    return fail("the content of this KV connector's loads is unknown; run only the decisions");
  return {};
}

Result<bool> LockstepRun::advance() {
  if (config_.steps_max != 0 && summary_.steps >= config_.steps_max) return false;
  const Scheduler* const model = decisions_.model();
  // Host pages that still have to be copied keep the engine running without a request.
  const bool has_pages = model != nullptr && model->has_pages_to_send();
  LS_ASSIGN_OR_RETURN(const auto turn,
                      take_turn({.step = summary_.steps,
                                 .idle = idle_ && !has_pages,
                                 .unfinished = has_pages || decisions_.has_unfinished_requests()}));
  // The recording ends in the middle of a step: no verdict about what it did next.
  if (turn == Turn::cut) return false;
  // A recording ends with its last step, even if requests then hold blocks that each other needs.
  // That deadlock is a finding.
  if (turn == Turn::end) {
    if (has_wait_cycle(config_, decisions_, holding_)) set_stuck();
    return false;
  }
  if (turn == Turn::stuck || is_stuck()) {
    set_stuck();
    return false;
  }
  const auto goes_on = decide();
  return goes_on && *goes_on ? execute({}) : goes_on;
}

Result<Turn> LockstepRun::take_turn(const LoopState& state) {
  before_.events.clear();
  auto turn = workload_.next_turn(state, before_.events);
  // Steps blocked by a fault are not steps without progress.
  if (workload_.is_hindered(state.step)) progress_.hindered();
  return turn;
}

void LockstepRun::set_stuck() {
  const bool preempts = !idle_ && summary_.preemptions > 0;
  set_liveness_verdict(config_, decisions_, name_of_, holding_, preempts, summary_);
}

// A failed LS_CHECK in a step is a finding about the engine that decided it: the check throws
// instead of ending the process, and the run reports it as an engine failure.
Result<bool> LockstepRun::checked(const std::function<Result<bool>()>& part) {
  const ChecksThrow throwing;
  try {
    return part();
  } catch (const FailedCheck& failed) {
    summary_.verdict = Verdict::engine_failure;
    summary_.engine_failure = {.kind = "check", .what = failed.what()};
    return false;
  }
}

Result<bool> LockstepRun::decide() {
  return checked([this] { return decide_step(); });
}

Result<bool> LockstepRun::execute(const AgreedBatch& agreed) {
  return checked([&] { return execute_step(agreed); });
}

Result<bool> LockstepRun::decide_step() {
  before_.resets.clear();
  LS_RETURN_IF_ERROR(apply_events());
  watch_.lap();
  const SchedulerOutput& decision = decisions_.schedule();
  decision_ = &decision;
  summary_.seconds.schedule += watch_.lap();
  if (engine_failed()) return false;
  count_decision(decision);
  // The chain covers every decision and the free blocks after it, so two runs differ in the step in
  // which they first decide differently.
  chain_.add(decision);
  chain_.add(static_cast<std::uint64_t>(decisions_.num_free_blocks()));
  return observe(&StepObserver::decided, {}, -1);
}

Result<bool> LockstepRun::execute_step(const AgreedBatch& agreed) {
  const SchedulerOutput& decision = *decision_;
  // Before sample(): the report names transfers of earlier steps.
  LS_RETURN_IF_ERROR(connector_.take_report(decision, outputs_));
  if (goes_on_with_unknown_tokens(decision)) {
    summary_.not_checked.push_back(
        fmt::format("step {} and later steps: they continue with tokens of a step in flight that "
                    "the recording does not have",
                    decision.step));
    return false;
  }
  // The order matters: the report, then the transfers that it completes, then the output, then the
  // memory, which needs all three.
  LS_RETURN_IF_ERROR(connector_.plan(decision, memory_ != nullptr, summary_));
  if (auto sampled = sample(decision); !sampled) {
    if (!workload_.has_parted(rows_)) return tl::unexpected(sampled.error());
    summary_.not_checked.push_back(fmt::format(
        "step {} and later steps: the recorded outputs belong to other decisions", decision.step));
    return false;
  }
  if (memory_ != nullptr)
    if (auto ran = memory_->run_step(as_the_worker_counts(decision),
                                     decision.scheduled.empty() ? ModelOutput{} : outputs_.newest(),
                                     connector_.transfers(), agreed, chain_);
        !ran)
      return ended_by(std::move(ran));
  // After the memory has run the step: it computes with the tokens known before it.
  know_sampled(decision);
  if (!connector_.report().empty()) {
    outputs_.attach(std::move(connector_.report()));
    progress_.reported();
  }
  stopped_.clear();
  stale_outputs_.clear();
  before_.events.clear();
  // Events between decision and output: a client disconnects while the step is in flight.
  workload_.while_running(before_.events);
  // The engine may give the id of a request that the decision reports finished to one of these.
  requests_.forget(decision.finished);
  if (!before_.events.empty()) {
    before_.resets.clear();
    LS_RETURN_IF_ERROR(apply_events());
  }
  const OutputTaken output = process_output(!decision.scheduled.empty());
  return engine_failed() ? Result<bool>(false) : end_step(output);
}

// A failure of Lockstep's own code in the engine's process is not a verdict about the engine.
bool LockstepRun::engine_failed() {
  const EngineFailure* failure = decisions_.failure();
  if (failure == nullptr) return false;
  summary_.verdict = failure->is_harness() ? Verdict::harness : Verdict::engine_failure;
  summary_.engine_failure = *failure;
  return true;
}

// Ends the step after its output: notifies all observers of the result.
Result<bool> LockstepRun::end_step(const OutputTaken& output) {
  const SchedulerOutput& decision = *decision_;
  if (memory_ != nullptr) {
    if (auto taken = memory_->output_taken(stopped_, workload_.now_ns()); !taken)
      return ended_by(std::move(taken));
    // Without a connector no finished request keeps its blocks.
    if (workload_.transfers() != nullptr) memory_->release(decisions_.held());
  }
  chain_.add(stopped_.size());
  for (const StoppedRequest& request : stopped_) {
    chain_.add(static_cast<std::uint64_t>(index_of(request.id)) << 8 |
               static_cast<std::uint64_t>(request.reason));
    ++summary_.finished_requests;
    leave(request.id, request.reason);
  }
  counters_ = decisions_.take_cache_counters();
  cache_events_ = decisions_.take_cache_events();
  summary_.stored += counters_.stored;
  summary_.evictions += counters_.evicted;
  summary_.refused_allocations += counters_.refused;
  // After the output: a request that finished no longer waits.
  if (connector_.is_there() && decisions_.model() != nullptr)
    holding_.step(*decisions_.model(), decision.step);
  const bool is_async = config_.engine.async_scheduling;
  const bool go_on = observe(&StepObserver::finished, stopped_, is_async ? output.step : -1);
  // Advances the clock, so finished requests get the time at the end of the step.
  workload_.step_done(decision.total_num_scheduled_tokens);
  for (const auto& [name, ticket] : requests_.take_left()) workload_.request_left(name, ticket);
  // An output may have ended requests and freed blocks for waiting ones, so the next step may
  // schedule them although this one was empty.
  const bool made_room =
      output.step >= 0 && !output.is_empty && decisions_.has_unfinished_requests();
  idle_ = decision.scheduled.empty() && decision.preempted.empty() && outputs_.hold_nothing() &&
          !made_room;
  return go_on;
}

// A divergence is the verdict. An error is passed on, except one of the harness in the engine's
// process: that is a verdict too.
Result<bool> LockstepRun::ended_by(Checked checked) {
  if (!checked.has_diverged()) {
    if (!summary_.engine_failure) return tl::unexpected(checked.error());
    summary_.verdict = Verdict::harness;
    return false;
  }
  summary_.verdict = Verdict::divergence;
  summary_.divergence = std::move(checked.divergence());
  return false;
}

bool LockstepRun::observe(bool (StepObserver::*hook)(const StepView&),
                          std::span<const StoppedRequest> stopped, std::int64_t output_of_step) {
  return (observer_.*hook)({.decision = *decision_,
                            .stopped = stopped,
                            .stale_outputs = stale_outputs_,
                            .counters = counters_,
                            .decisions = decisions_,
                            .state_hash = chain_.value(),
                            .output_of_step = output_of_step,
                            .now_ns = workload_.now_ns(),
                            .cache_events = cache_events_,
                            .resets = before_.resets,
                            .name = name_of_});
}

Result<RunReport> LockstepRun::finish() {
  summary_.unreported = decisions_.not_checked();
  for (const std::string& line : summary_.unreported) summary_.not_checked.push_back(line);
  if (memory_ != nullptr) {
    // After a divergence, further differences are consequences: all pages are compared only if the
    // run agreed so far.
    if (auto checked =
            memory_->finish(summary_.verdict != Verdict::divergence && !summary_.engine_failure);
        !checked)
      LS_RETURN_IF_ERROR(ended_by(std::move(checked)));
    const Release& release = *engine_profile(config_.engine.engine).release;
    std::string pages = why_pages_differ(release);
    if (!pages.empty() && !is_overlaid(config_.backend.layout))
      summary_.not_checked.push_back(std::move(pages));
  } else {
    summary_.not_checked.push_back(
        fmt::format("memory: no backend, only {} decisions",
                    decisions_.model() != nullptr ? "the model's" : "another engine's"));
  }
  summary_.simulated_ns = workload_.now_ns();
  summary_.state_hash = chain_.value();
  summary_.seconds.wall = wall_.lap();
  report_.records_consumed = workload_.records_consumed();
  return std::move(report_);
}

// Applies arrivals and aborts.

Result<void> LockstepRun::apply_events() {
  for (WorkloadEvent& event : before_.events) {
    switch (event.kind) {
      case WorkloadEvent::Kind::add:
        LS_RETURN_IF_ERROR(add_request(event));
        break;
      case WorkloadEvent::Kind::abort:
        abort_request(event.name);
        break;
      case WorkloadEvent::Kind::reset_prefix_cache:
        reset_prefix_cache(event.resets_running);
        break;
      case WorkloadEvent::Kind::pause_state:
        decisions_.set_pause_state(event.pause_state);
        break;
      case WorkloadEvent::Kind::output:
        // A recorded engine may have processed several outputs at once.
        while (!outputs_.empty() && outputs_.oldest().step <= event.output_of_step) take_output();
        break;
    }
  }
  return {};
}

// Resets the prefix cache. If the engine preempts all running requests first, it drops their output
// in flight, and the same positions are sampled again. So the loop takes the engine's counts.
void LockstepRun::reset_prefix_cache(bool preempts_running) {
  const auto running = preempts_running ? decisions_.running() : std::span<const RequestId>();
  const std::vector<RequestId> victims(running.begin(), running.end());
  before_.resets.push_back(decisions_.reset_prefix_cache(preempts_running) ? 1 : 0);
  chain_.add(before_.resets.back());
  for (const RequestId id : victims) {
    know_tokens(id, decisions_.num_tokens(id));
    if (memory_ != nullptr) memory_->preempt(id);
  }
}

// Forgets the tokens after the first `num_known`: prompt and output together.
void LockstepRun::know_tokens(RequestId id, std::int64_t num_known) {
  LiveRequest& request = requests_.at(id);
  request.num_output_tokens = num_known - request.num_prompt_tokens;
  if (memory_ != nullptr) memory_->drop_sampled(id, num_known);
}

void LockstepRun::abort_request(const std::string& name) {
  if (const RequestId* id = requests_.find(name)) {
    // The output just processed has ended the request: the abort comes too late.
    if (std::ranges::find(stopped_, *id, &StoppedRequest::id) != stopped_.end()) return;
    decisions_.abort_request(*id);
    ++summary_.aborted_requests;
    leave(*id, FinishReason::abort);
    return;
  }
  // The request has finished, but still receives the abort until the engine reports it.
  for (const RequestId id : requests_.all_called(name)) decisions_.abort_request(id);
}

Result<void> LockstepRun::add_request(WorkloadEvent& event) {
  ++summary_.requests;
  std::string name = event.request.name;
  const std::int64_t prompt = event.request.prompt.size();
  RequestSpec spec;  // the worker's copy
  // Copied before the engine takes it; without memory the copy of a long prompt is not needed.
  if (memory_ != nullptr) spec = event.request;
  const auto id = decisions_.add_request(std::move(event.request));
  if (!id) {
    // One line is enough; the count is in the summary.
    if (++summary_.refused_requests == 1)
      summary_.not_checked.push_back(
          fmt::format("refused requests, the first: {}", id.error().message));
    workload_.request_refused(name, event.ticket, id.error());
    return {};
  }
  LiveRequest live{.name = name, .ticket = event.ticket, .num_prompt_tokens = prompt, .live = true};
  // A fault of a recorded engine is its verdict. Another engine's input is refused.
  if (!requests_.add(*id, std::move(live)))
    return engine_failed() ? Result<void>() : fail("two live requests have the name {}", name);
  chain_.add(name);
  observer_.arrived({.id = *id, .name = name, .num_prompt_tokens = prompt, .step = summary_.steps});
  if (memory_ != nullptr) memory_->add_request(*id, spec);
  progress_.arrived();
  return {};
}

// Ends a request in this step. Its id lives until a decision reports it finished. Output tokens are
// counted here, where aborted requests are included.
void LockstepRun::leave(RequestId id, FinishReason reason) {
  summary_.output_tokens += decisions_.num_tokens(id) - requests_.at(id).num_prompt_tokens;
  requests_.leave(id);
  observer_.left(id, reason);
  progress_.left();
}

// A step's decision and its output.

void LockstepRun::count_decision(const SchedulerOutput& decision) {
  ++summary_.steps;
  summary_.request_steps += std::ssize(decision.scheduled);
  summary_.scheduled_tokens += decision.total_num_scheduled_tokens;
  for (const RequestId id : decision.preempted) {
    // A preemption of a finished request, whose blocks are freed late, is not counted.
    const RequestId* const live = requests_.find(requests_.at(id).name);
    summary_.preemptions += live != nullptr && *live == id ? 1 : 0;
  }
  for (const ScheduledRequest& scheduled : decision.scheduled) {
    if (!scheduled.is_new || scheduled.is_resumed) continue;
    summary_.prompt_tokens += requests_.at(scheduled.id).num_prompt_tokens;
    summary_.cached_tokens += scheduled.computed;
    summary_.hits += scheduled.computed > 0 ? 1 : 0;
  }
}

ModelOutput& LockstepRun::begin_output(const SchedulerOutput& decision) {
  StepInFlight& flight = outputs_.begin(decision.step);
  if (connector_.is_there())
    for (const ScheduledRequest& scheduled : decision.scheduled)
      flight.rows.push_back(scheduled.id);
  return flight.output;
}

// Samples the step: the workload decides which drafts are accepted and which token follows. The
// output is in flight from here on.
Result<void> LockstepRun::sample(const SchedulerOutput& decision) {
  if (decision.scheduled.empty()) {
    // An empty step has an output only to carry a report in order: OutputsInFlight, invariant (1).
    if (config_.engine.async_scheduling && connector_.is_there()) begin_output(decision);
    return {};
  }
  rows_.clear();
  const std::int32_t* draft = decision.spec_tokens.data();
  for (const ScheduledRequest& scheduled : decision.scheduled) {
    const LiveRequest& request = requests_.at(scheduled.id);
    const auto num_spec = static_cast<std::size_t>(scheduled.num_spec);
    const std::int64_t known = request.num_prompt_tokens + request.num_output_tokens;
    // Only a chunk that reaches the last known token samples.
    rows_.push_back({.ticket = request.ticket,
                     .name = request.name,
                     .num_prompt_tokens = request.num_prompt_tokens,
                     .num_output_tokens = request.num_output_tokens,
                     .computed = scheduled.computed,
                     .num_tokens = scheduled.num_tokens,
                     .samples = scheduled.computed + scheduled.num_tokens >= known,
                     .is_new = scheduled.is_new,
                     .drafts = {draft, num_spec}});
    draft += num_spec;
  }
  ModelOutput& output = begin_output(decision);
  LS_RETURN_IF_ERROR(workload_.sample(decision.step, rows_, output));
  LS_CHECK(output.token_ends.size() == decision.scheduled.size(), "{} rows sampled, {} scheduled",
           output.token_ends.size(), decision.scheduled.size());
  // A recording is a file and may contain anything; a trace's output comes from this program.
  if (workload_.is_scripted()) LS_RETURN_IF_ERROR(check_output(decision, output));
  return {};
}

std::int32_t LockstepRun::num_computed(const ScheduledRequest& scheduled) const {
  const LiveRequest& request = requests_.at(scheduled.id);
  if (scheduled.is_new || scheduled.computed > request.counted_to) return scheduled.computed;
  // The engine may count drafts of the step in flight that the worker has already rejected.
  // Example: 100 computed, 4 drafts and 1 token scheduled, 2 drafts accepted: the engine counts
  // 105, the worker 103.
  return std::min(scheduled.computed, request.num_computed);
}

// With asynchronous scheduling, a step is decided before the drafts of the step in flight are
// verified. The decision counts all of them as computed and names none of its own drafts. The
// worker starts at the request's real position, with drafts that only it has: those that the model
// accepts are the sampled tokens, the others stay unnamed (-1).
const SchedulerOutput& LockstepRun::as_the_worker_counts(const SchedulerOutput& decision) {
  if (!config_.engine.async_scheduling || config_.engine.num_spec_tokens == 0 ||
      decision.scheduled.empty())
    return decision;
  counted_ = decision;
  const ModelOutput& output = outputs_.newest();
  std::uint32_t begin = 0;
  std::size_t first_spec = 0;
  for (std::size_t i = 0; i < counted_.scheduled.size(); ++i) {
    ScheduledRequest& scheduled = counted_.scheduled[i];
    scheduled.computed = num_computed(scheduled);
    const std::uint32_t end = output.token_ends[i];
    for (std::int32_t draft = 0; draft < scheduled.num_spec && begin + draft + 1 < end; ++draft)
      counted_.spec_tokens[first_spec + draft] = output.tokens[begin + draft];
    first_spec += static_cast<std::size_t>(scheduled.num_spec);
    begin = end;
  }
  return counted_;
}

// Gives the sampled tokens to the worker's side at once. The engine receives them when it processes
// the output. A row with drafts and n sampled tokens rejected num_spec + 1 - n of them.
void LockstepRun::know_sampled(const SchedulerOutput& decision) {
  if (decision.scheduled.empty()) return;
  const ModelOutput& output = outputs_.newest();
  std::uint32_t begin = 0;
  for (std::size_t i = 0; i < decision.scheduled.size(); ++i) {
    const ScheduledRequest& scheduled = decision.scheduled[i];
    const std::uint32_t end = output.token_ends[i];
    LiveRequest& request = requests_.at(scheduled.id);
    const auto num_sampled = static_cast<std::int32_t>(end - begin);
    const bool verifies = scheduled.num_spec > 0 && num_sampled > 0;
    request.num_computed = num_computed(scheduled) + scheduled.num_tokens -
                           (verifies ? scheduled.num_spec + 1 - num_sampled : 0);
    request.counted_to = scheduled.computed + scheduled.num_tokens;
    request.num_output_tokens += num_sampled;
    if (workload_.is_scripted() && rows_[i].samples && begin == end)
      request.unsampled_in = decision.step;
    if (end != begin) progress_.sampled();
    if (memory_ != nullptr)
      memory_->append_sampled(scheduled.id, std::span(output.tokens).subspan(begin, end - begin));
    begin = end;
  }
}

// Refuses more tokens or drafts than the step allows: at most one token and its drafts per row.
// Where the recording's own decisions are followed, its audit judges them.
Result<void> LockstepRun::check_output(const SchedulerOutput& decision,
                                       const ModelOutput& output) const {
  const auto size = [](const std::vector<std::uint32_t>& ends, std::size_t row) -> std::int64_t {
    return ends[row] - (row == 0 ? 0 : ends[row - 1]);
  };
  for (std::size_t i = 0; i < decision.scheduled.size(); ++i) {
    const auto check = [&](std::string_view key, std::int64_t found,
                           std::int64_t most) -> Result<void> {
      if (found <= most) return {};
      return fail("step {}: {}: {} tokens of request {}; expected at most {}", decision.step, key,
                  found, requests_.at(decision.scheduled[i].id).name, most);
    };
    if (const Scheduler* const model = decisions_.model(); model != nullptr)
      LS_RETURN_IF_ERROR(check("sampled", size(output.token_ends, i), model->num_sampled_max(i)));
    else if (workload_.has_parted(rows_))
      LS_RETURN_IF_ERROR(check("sampled", size(output.token_ends, i),
                               rows_[i].samples ? std::ssize(rows_[i].drafts) + 1 : 0));
    if (!output.draft_ends.empty())
      LS_RETURN_IF_ERROR(
          check("drafts", size(output.draft_ends, i), config_.engine.num_spec_tokens));
  }
  return {};
}

// True if the step computes tokens that were sampled by a step in flight whose output the recording
// does not have: it may end before the output arrives, while later steps are recorded. Their
// contents are unknown, so neither memory nor another engine's decisions can follow.
bool LockstepRun::goes_on_with_unknown_tokens(const SchedulerOutput& decision) const {
  return (memory_ != nullptr || decisions_.model() == nullptr) && !outputs_.empty() &&
         std::ranges::any_of(decision.scheduled, [&](const ScheduledRequest& scheduled) {
           const LiveRequest& request = requests_.at(scheduled.id);
           return request.unsampled_in >= outputs_.oldest().step &&
                  scheduled.computed + scheduled.num_tokens - scheduled.num_spec >
                      request.num_prompt_tokens + request.num_output_tokens;
         });
}

// Processes the outputs that arrive in this step. Synchronous: the output of the step itself. With
// asynchronous scheduling the engine waits for the oldest output only if it scheduled nothing or
// two steps are in flight (vLLM 0.33.0, v1/engine/core.py, step_with_batch_queue()), unless the
// workload decides otherwise.
LockstepRun::OutputTaken LockstepRun::process_output(bool anything_scheduled) {
  OutputTaken taken;
  if (outputs_.empty()) return taken;
  const bool waits = !anything_scheduled || outputs_.size() >= 2;
  if (config_.engine.async_scheduling &&
      !workload_.output_comes_in(outputs_.oldest().step).value_or(waits))
    return taken;
  taken.is_empty = outputs_.oldest().is_empty();
  taken.step = take_output();
  // An engine that has nothing to decide processes the remaining outputs, which are empty. A
  // recorded one may have waited for several.
  while (!outputs_.empty() && (workload_.is_scripted() || outputs_.oldest().is_empty()) &&
         workload_.output_comes_in(outputs_.oldest().step).value_or(has_nothing_to_decide()))
    taken.step = take_output();
  return taken;
}

// Gives the oldest output in flight to the scheduler. Returns its step.
std::int64_t LockstepRun::take_output() {
  const StepInFlight& flight = outputs_.take_oldest();
  watch_.lap();
  const auto stopped = decisions_.update_from_output(flight.output);
  summary_.seconds.schedule += watch_.lap();
  stopped_.insert(stopped_.end(), stopped.begin(), stopped.end());
  for (const StaleOutput& stale : decisions_.stale_outputs()) {
    stale_outputs_.push_back({stale, flight.step});
    // SGLang drops the output of a retracted request, whose position is sampled again. The count of
    // a request that runs again includes newer samples: a reset has corrected it.
    if (stale.num_taken == 0 && std::ranges::count(decisions_.running(), stale.id) == 0)
      know_tokens(stale.id, decisions_.num_tokens(stale.id));
  }
  if (!flight.output.kv_connector_output.invalid_block_ids.empty()) forget_voided_tokens();
  return flight.step;
}

// True if no request runs or waits, no transfer holds blocks, and every finished request has been
// reported: the engine would block on its output queue.
bool LockstepRun::has_nothing_to_decide() const {
  return !decisions_.has_unfinished_requests() && decisions_.held().empty() &&
         requests_.num_live() == 0;
}

// After a failed load the engine drops what was sampled after the unfilled blocks, but not what is
// in flight: both together are the tokens that remain.
void LockstepRun::forget_voided_tokens() {
  for (const RequestId id : decisions_.running())
    know_tokens(id, decisions_.num_tokens(id) + outputs_.num_sampled(id));
}

// Adds "FILE:LINE" to an error, unless the reader of that file has already done so.
static Error with_place(const std::string& place, const Error& error) {
  const std::string file = place.substr(0, place.rfind(':') + 1);
  if (place.empty() || error.message.starts_with(file)) return error;
  return {fmt::format("{}: {}", place, error.message)};
}

Result<RunReport> run_lockstep(const RunConfig& config, const RunParts& parts) {
  LS_ASSIGN_OR_RETURN(const auto run, LockstepRun::start(config, parts));
  for (;;) {
    const auto goes_on = run->advance();
    if (!goes_on) return tl::unexpected(with_place(parts.workload.place(), goes_on.error()));
    if (!*goes_on) return run->finish();
  }
}

}  // namespace lockstep
