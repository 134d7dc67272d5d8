// The loop: decide a step, write it down as a program, run it on the backend, compare everything
// with the memory model, advance. Without a backend the decisions alone are run (the model's own
// speed).
//
// (1) Same configuration, workload and seed: same decisions, same checks, same chain of state
//     hashes.
// (2) The first divergence ends the run; it is in the summary, not an Error.
// (3) An Error is what the user can cause (a bad trace, a refused configuration) or a device that
//     failed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "reference/types/engine_config.h"
#include "reference/types/scheduler_defect.h"
#include "reference/types/scheduler_types.h"
#include "sim/connectors/connect.h"
#include "sim/engine/decision_source.h"
#include "sim/engine/workload.h"
#include "sim/hidden_states/hidden_state_defect.h"
#include "sim/hidden_states/hidden_states.h"
#include "sim/protocol/backend.h"
#include "sim/ranks/dp_step.h"
#include "sim/report/timeline.h"
#include "sim/verdict/run_summary.h"
#include "traces/formats/run_spec.h"

namespace lockstep {

struct LockstepConfig {
  EngineConfig engine;
  BackendConfig device;  // device.plan says groups and pool, with or without a backend
  SchedulerDefect scheduler_defect = SchedulerDefect::none;  // planted in whoever decides
  ConnectorConfig connector;          // what a workload that has none of its own is given
  DataParallelOptions data_parallel;  // several engines: sim/ranks/data_parallel.h runs them
  HiddenStateDefect hidden_state_defect = HiddenStateDefect::none;  // planted in their files
  CheckBudget budget;
  std::int64_t steps_max = 0;  // stop after so many; 0: no limit
  bool draw = false;           // collect a timeline
  TimelineLimits timeline;
};

// BackendConfig for an engine and a plan: rows, widths and tokens as the engine's options say.
BackendConfig make_device_config(const EngineConfig& engine, KVCacheConfig plan,
                                 AttentionBackend attention_backend = AttentionBackend::flash_attn);
// Ranks that keep memory of their own: pipeline stages, in each the ranks of prefill context
// parallelism, in each the tensor parallel ranks, among which decode context parallelism deals out
// tokens. Where a plan says what one rank holds (tp_size 1), those of context parallelism alone.
std::int32_t num_ranks(const BackendConfig& device);
BackendConfig device_of_rank(const BackendConfig& device, std::int32_t rank);
// Refused: degrees that the plan cannot be cut into.
Result<void> check_ranks(const BackendConfig& device);
// ... and numbers of engines that nobody runs.
Result<void> check_ranks(const LockstepConfig& config);
// flash_attn where it takes the plan's blocks. An engine's scheduler may be recorded with smaller
// ones: any_size.
AttentionBackend attention_backend_for(const KVCacheConfig& plan);
// A plan for the groups of a recording: one tensor per place in the group, pages padded to the
// largest so that all groups draw from one pool.
Result<KVCacheConfig> plan_for_groups(std::vector<KVCacheGroupSpec> groups,
                                      std::int64_t num_blocks);

// Everything about a step that has just been decided (and, with a backend, executed and compared),
// for progress and for conform. References are valid during the call.
struct StepView {
  const SchedulerOutput& decision;
  std::span<const StoppedRequest> stopped;
  const CacheCounters& counters;
  const DecisionSource& decisions;
  StateHash state_hash;              // of the chain up to here
  std::int64_t output_of_step = -1;  // asynchronous scheduling: whose output came in; -1: none
  std::span<const CacheEvent> cache_events;  // of the whole step, in `finished`
  std::span<const std::uint8_t> resets;  // 0 or 1, results of the step's reset_prefix_cache events
  const std::function<std::string_view(RequestId)>& name;  // live, or finished in this step
};
// After decide and before the step's output is processed, and after it.
class StepObserver {
 public:
  virtual ~StepObserver() = default;
  // False ends the run (the verdict stays what it is).
  virtual bool decided(const StepView&) { return true; }
  virtual bool finished(const StepView&) { return true; }
  // Before `finished`: hidden states of requests that the step's output has ended, compared.
  virtual bool extracted(std::span<const HiddenStates>) { return true; }
};

struct RunReport {
  RunSummary summary;
  Timeline timeline;  // empty unless LockstepConfig::draw
  std::int64_t records_consumed = 0;
  // Each data parallel rank by itself, where LockstepConfig::draw asks for it; else none.
  std::vector<RunReport> engines;
};

// A run that somebody else drives, step by step: two engines side by side. Whatever it was started
// with must outlive it.
class LockstepRun {
 public:
  virtual ~LockstepRun() = default;
  // A turn of the workload, and its step. False: the run has ended.
  virtual Result<bool> advance() = 0;
  // The last step did nothing: the next one does nothing either, unless something arrives.
  virtual bool is_idle() const = 0;

  // advance() in parts, for whoever has something to say between them (data_parallel.h): asks the
  // workload what happens before the next step, decides it, runs it. False: the run has ended.
  virtual Result<Turn> take_turn(const LoopState& state) = 0;
  virtual Result<bool> decide() = 0;
  virtual std::int64_t num_scheduled_tokens() const = 0;  // of the step decided
  virtual Result<bool> execute(const AgreedBatch& agreed) = 0;
  // Requests run, or are preempted, and nothing comes of it.
  virtual bool is_stuck() = 0;
  // The verdict: nothing runs any more, and who waits for what.
  virtual void set_stuck() = 0;

  virtual const RunSummary& summary() const = 0;
  // Once, at the end.
  virtual Result<RunReport> finish() = 0;
};

// `ranks`: one backend for each of num_ranks(device), made with the device that device_of_rank()
// says; none: the decisions alone. `observer` may be null.
Result<std::unique_ptr<LockstepRun>> start_lockstep(const LockstepConfig& config,
                                                    DecisionSource& decisions, Workload& workload,
                                                    std::span<Backend* const> ranks,
                                                    StepObserver* observer = nullptr);
// The same, to its end.
Result<RunReport> run_lockstep(const LockstepConfig& config, DecisionSource& decisions,
                               Workload& workload, std::span<Backend* const> ranks,
                               StepObserver* observer = nullptr);
// One rank. `backend` may be null.
Result<RunReport> run_lockstep(const LockstepConfig& config, DecisionSource& decisions,
                               Workload& workload, Backend* backend,
                               StepObserver* observer = nullptr);

}  // namespace lockstep
