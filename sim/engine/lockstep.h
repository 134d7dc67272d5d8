// The loop: decide a step, write its program, run it on the backend, compare everything with the
// memory model, advance. Without a backend only the decisions run.
//
// Invariants
// (1) Same configuration, workload and seed: same decisions, checks and chain of state hashes.
// (2) The first divergence ends the run. It is in the summary, not an Error.
// (3) An Error is a user's (a bad trace, a refused configuration) or a failed backend.
// (4) The worker receives sampled tokens at once, the engine when it processes the step's output:
//     one step later with asynchronous scheduling.
// (5) A run has one verdict. The loop sets it once and then ends.
//
// Not here: what is compared (sim/check/comparer.h), and several data parallel engines in lockstep,
// which call the parts of advance() themselves.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "base/stopwatch.h"
#include "sim/engine/live_requests.h"
#include "sim/engine/run_memory.h"
#include "sim/engine/step_observer.h"
#include "sim/engine/wait_graph.h"
#include "sim/engine/workload.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {

struct RunReport {
  RunSummary summary;
  std::int64_t records_consumed = 0;
  std::vector<RunSummary> engines;  // per data parallel rank; empty with one engine
};

// The parts of a run. All of them outlive it.
struct RunParts {
  DecisionSource& decisions;
  Workload& workload;
  // One backend per rank of num_ranks(config), made with the configuration of config_of_rank();
  // empty: decisions only.
  std::span<Backend* const> ranks{};
  StepObserver* observer = nullptr;  // may be null
  std::span<MemoryCheck* const> checks{};
};

class LockstepRun {
 public:
  // `config` outlives it.
  static Result<std::unique_ptr<LockstepRun>> start(const RunConfig& config, const RunParts& parts);
  LockstepRun(const LockstepRun&) = delete;

  // Runs a turn of the workload and its step. False: the run has ended, and the summary has its
  // verdict.
  Result<bool> advance();
  // True if the last step scheduled and preempted nothing and no output in flight has anything to
  // report. The next step then does nothing either, unless something arrives.
  bool is_idle() const { return idle_; }

  // The parts of advance(), for callers that act between them (data_parallel.h): take_turn() reads
  // what happens before the next step, decide() decides it, execute() runs it. False: the run has
  // ended.
  Result<Turn> take_turn(const LoopState& state);
  Result<bool> decide();
  // Tokens of the decided step. REQUIRES: decide() has succeeded at least once.
  std::int64_t num_scheduled_tokens() const { return decision_->total_num_scheduled_tokens; }
  Result<bool> execute(const AgreedBatch& agreed);
  // True if requests run and preempt each other without progress (ProgressGuard). Never for a
  // recording, whose steps are fixed. Called once per step: it counts.
  bool is_stuck() { return !workload_.is_scripted() && progress_.is_stuck(decisions_); }
  // Sets the liveness verdict: no request can continue, and which request waits for which.
  void set_stuck();

  const RunSummary& summary() const { return summary_; }
  // Checks all pages, then completes and returns the report. Called once, after the last step.
  Result<RunReport> finish();

 private:
  LockstepRun(const RunConfig& config, const RunParts& parts);
  // Creates the memory of the run. Errors: a configuration that is not supported with memory.
  Result<void> open(const RunParts& parts);

  // Runs a part; a check of this program that fails in it becomes the verdict engine_failure.
  Result<bool> checked(const std::function<Result<bool>()>& part);
  Result<bool> decide_step();
  Result<bool> execute_step(const AgreedBatch& agreed);

  // Events and the requests that they concern.
  Result<void> apply_events();
  Result<void> add_request(WorkloadEvent& event);
  void reset_prefix_cache(bool preempts_running);
  // Sets the request's known tokens: the worker drops what it sampled after them.
  void know_tokens(RequestId id, std::int64_t num_known);
  void abort_request(const std::string& name);
  // Ends a request for its client and its observers; its id stays live.
  void leave(RequestId id, FinishReason reason);

  // A step and its output, in the order of execute_step().
  // Adds the decision to the summary. A hit is a new request with computed tokens; a resumed one is
  // not counted again.
  void count_decision(const SchedulerOutput& decision);
  ModelOutput& begin_output(const SchedulerOutput& decision);
  Result<void> sample(const SchedulerOutput& decision);
  void know_sampled(const SchedulerOutput& decision);
  std::int32_t num_computed(const ScheduledRequest& scheduled) const;  // as the worker counts
  // Returns the decision with the worker's own counts and drafts. REQUIRES: sample() of the step.
  const SchedulerOutput& as_the_worker_counts(const SchedulerOutput& decision);
  Result<void> check_output(const SchedulerOutput& decision, const ModelOutput& output) const;
  // The outputs that the engine processed in a step.
  struct OutputTaken {
    std::int64_t step = -1;  // the last one's step; -1: none, or one without a step
    bool is_empty = true;    // of the first one: no token and no report
  };
  bool goes_on_with_unknown_tokens(const SchedulerOutput& decision) const;
  OutputTaken process_output(bool anything_scheduled);
  std::int64_t take_output();
  bool has_nothing_to_decide() const;
  void forget_voided_tokens();
  Result<bool> end_step(const OutputTaken& output);

  // Calls an observer's hook with the current step. False ends the run.
  bool observe(bool (StepObserver::*hook)(const StepView&), std::span<const StoppedRequest> stopped,
               std::int64_t output_of_step);
  // Turns a failed check into the verdict, or passes on its Error.
  Result<bool> ended_by(Checked checked);
  // True, with the verdict set, if another engine decides and has failed.
  bool engine_failed();

  const RunConfig& config_;
  DecisionSource& decisions_;
  Workload& workload_;
  StepObserver& observer_;
  std::unique_ptr<RunMemory> memory_;  // null: decisions only
  LiveRequests requests_;
  OutputsInFlight outputs_;
  ConnectorStep connector_;
  ProgressGuard progress_;
  HoldingWatch holding_;
  RunReport report_;
  RunSummary& summary_ = report_.summary;
  StateHashChain chain_;
  CacheCounters counters_;
  Stopwatch wall_;
  Stopwatch watch_;

  // of the step in progress
  const SchedulerOutput* decision_ = nullptr;
  struct {
    std::vector<WorkloadEvent> events;
    std::vector<std::uint8_t> resets;  // results of reset_prefix_cache, 0 or 1
  } before_;
  std::vector<SampledRow> rows_;
  SchedulerOutput counted_;              // of as_the_worker_counts(); reused
  std::vector<StoppedRequest> stopped_;  // requests that the outputs of this step ended
  std::vector<StaleOutputOfStep> stale_outputs_;
  std::vector<CacheEvent> cache_events_;
  std::function<std::string_view(RequestId)> name_of_ = [this](RequestId id) {
    return std::string_view(requests_.at(id).name);
  };
  bool idle_ = true;
};

// Runs to the end. Errors start with the place in the workload's file, if it has one.
Result<RunReport> run_lockstep(const RunConfig& config, const RunParts& parts);

}  // namespace lockstep
