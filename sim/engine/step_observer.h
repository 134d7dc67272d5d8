// Observers of a run, called per step: progress, recorders, timelines, invariants.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "reference/schedule/scheduler.h"
#include "reference/types/engine_config.h"
#include "reference/types/scheduler_types.h"
#include "sim/protocol/backend.h"
#include "sim/verdict/run_summary.h"
#include "traces/formats/run_spec.h"

namespace lockstep {

// The configuration of one engine's loop.

struct RunConfig {
  EngineConfig engine;
  BackendConfig backend;  // its plan says groups and pool, also where the decisions run alone
  CheckBudget budget;
  std::string drafter_not_followed{};  // why; empty: it is, or there is none
  std::int64_t steps_max = 0;          // stop after this many steps; 0: no limit
};

struct StaleOutputOfStep {
  StaleOutput output;
  std::int64_t step = 0;  // whose output it is
};

// Everything about a step that has just been decided (and, with a backend, executed and compared).
// References are valid during the call.
struct StepView {
  const SchedulerOutput& decision;
  std::span<const StoppedRequest> stopped;
  std::span<const StaleOutputOfStep> stale_outputs = {};  // processed with `finished`
  const CacheCounters& counters;
  const DecisionSource& decisions;
  StateHash state_hash = {};  // of the chain up to here
  std::int64_t output_of_step =
      -1;  // asynchronous scheduling: the step whose output was processed; -1: none
  std::int64_t now_ns = 0;                                 // of the workload's clock
  std::span<const CacheEvent> cache_events = {};           // of the whole step, in `finished`
  std::span<const std::uint8_t> resets = {};               // results of reset_prefix_cache, 0 or 1
  const std::function<std::string_view(RequestId)>& name;  // live, or finished in this step

  // REQUIRES: the model's scheduler decides.
  const Scheduler& model() const { return *decisions.model(); }
};

struct Arrival {
  RequestId id{};
  std::string_view name;
  std::int64_t num_prompt_tokens = 0;
  std::int64_t step = 0;  // the first that may schedule it
};

class StepObserver {
 public:
  virtual ~StepObserver() = default;
  // After decide and before the step's output is processed, and after it. False ends the run (the
  // verdict stays what it is).
  virtual bool decided(const StepView&) { return true; }
  virtual bool finished(const StepView&) { return true; }
  // A request arrived; a request ended in the current step.
  virtual void arrived(const Arrival&) {}
  virtual void left(RequestId, FinishReason) {}
};

// Forwards to all observers; false from any of them ends the run. The last observer added is not
// shown a decision at which the run ends.
class ObserverList final : public StepObserver {
 public:
  void add(StepObserver& observer) { observers_.push_back(&observer); }
  bool decided(const StepView& view) override;
  bool finished(const StepView& view) override;
  void arrived(const Arrival& arrival) override;
  void left(RequestId request, FinishReason reason) override;

 private:
  std::vector<StepObserver*> observers_;
};

// "stop", "length", "abort", "error"

}  // namespace lockstep
