// The loop: decide a step, write its program, run it on the backend, compare everything with the
// memory model, advance. Without a backend only the decisions run.
//
// Invariants
// (1) Same configuration, workload and seed: same decisions, checks and chain of state hashes.
// (2) The first divergence ends the run. It is in the summary, not an Error.
// (3) An Error is a user's (a bad trace, a refused configuration) or a failed backend.
// (4) The worker receives sampled tokens at once, the engine when it processes the step's output:
//     one step later with asynchronous scheduling.
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
  std::vector<RunSummary> engines;  // each data parallel rank by itself; of one engine: none
};

// What a run is made of. All of it outlives the run.
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

  // A turn of the workload, and its step. False: the run has ended.
  Result<bool> advance();
  // The last step did nothing: the next one does nothing either, unless something arrives.
  bool is_idle() const { return idle_; }

  // advance() in parts, for callers that act between them (data_parallel.h): asks the
  // workload what happens before the next step, decides it, runs it. False: the run has ended.
  Result<Turn> take_turn(const LoopState& state);
  Result<bool> decide();
  std::int64_t num_scheduled_tokens() const { return decision_->total_num_scheduled_tokens; }
  Result<bool> execute(const AgreedBatch& agreed);
  // Requests run, or are preempted, and nothing comes of it.
  bool is_stuck() { return !workload_.is_scripted() && progress_.is_stuck(decisions_); }
  // Sets the liveness verdict: no request runs, and which request waits for which.
  void set_stuck();

  const RunSummary& summary() const { return summary_; }
  // Once, at the end.
  Result<RunReport> finish();

 private:
  LockstepRun(const RunConfig& config, const RunParts& parts);
  Result<void> open(const RunParts& parts);

  Result<bool> checked(const std::function<Result<bool>()>& part);
  Result<bool> decide_step();
  Result<bool> execute_step(const AgreedBatch& agreed);

  // Requests.
  Result<void> apply_events();
  Result<void> add_request(WorkloadEvent& event);
  void reset_prefix_cache(bool preempts_running);
  void know_tokens(RequestId id, std::int64_t num_known);
  void abort_request(const std::string& name);
  void leave(RequestId id, FinishReason reason);

  // A step and its output.
  void count_decision(const SchedulerOutput& decision);
  ModelOutput& begin_output(const SchedulerOutput& decision);
  Result<void> sample(const SchedulerOutput& decision);
  void know_sampled(const SchedulerOutput& decision);
  std::int32_t num_computed(const ScheduledRequest& scheduled) const;  // as the worker counts
  const SchedulerOutput& as_the_worker_counts(const SchedulerOutput& decision);
  Result<void> check_output(const Scheduler& model, const SchedulerOutput& decision,
                            const ModelOutput& output) const;
  Result<void> check_transfers_end_once(const SchedulerOutput& decision) const;
  struct OutputTaken {
    std::int64_t step = -1;  // of which step, the last one; -1: of none, or of none that ran
    bool is_empty = true;
  };
  bool goes_on_with_unknown_tokens(const SchedulerOutput& decision) const;
  OutputTaken process_output(bool anything_scheduled);
  std::int64_t take_output();
  bool has_nothing_to_decide() const;
  void forget_voided_tokens();
  Result<bool> end_step(const OutputTaken& output);

  bool observe(bool (StepObserver::*hook)(const StepView&), std::span<const StoppedRequest> stopped,
               std::int64_t output_of_step);
  Result<bool> ended_by(Checked checked);
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
  SchedulerOutput counted_;              // the decision, in the worker's count
  std::vector<StoppedRequest> stopped_;  // ended by the outputs of this step
  std::vector<StaleOutputOfStep> stale_outputs_;
  std::vector<CacheEvent> cache_events_;
  std::function<std::string_view(RequestId)> name_of_ = [this](RequestId id) {
    return std::string_view(requests_.at(id).name);
  };
  bool idle_ = true;
};

// To its end.
Result<RunReport> run_lockstep(const RunConfig& config, const RunParts& parts);

}  // namespace lockstep
