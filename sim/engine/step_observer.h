// Observers of a run, called per step: progress, recorders, timelines, invariants.
//
// Invariants
// (1) An observer changes nothing in the run, except that it may end it.
// (2) Per step, the order is: arrived() and left() of its events, decided(), left() of what its
//     output ends, finished().
#pragma once

#include <algorithm>
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

// The configuration of one engine's loop: the engine's options, the memory of its worker, and how
// much is compared per step.

struct RunConfig {
  EngineConfig engine;
  BackendConfig backend;  // its plan gives groups and pool, also without a backend
  CheckBudget budget;
  std::string drafter_not_followed{};  // reason; empty: followed, or none
  std::int64_t steps_max = 0;          // stop after this many steps; 0: no limit
};

// Output of a request that was preempted after its step had been decided, and that step.
struct StaleOutputOfStep {
  StaleOutput output;
  std::int64_t step = 0;  // of the output
};

// Everything about a step that has just been decided (and, with a backend, executed and compared).
// The fields of its output are meaningful only in finished(). References are valid during the call.
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

// A request that the engine has accepted.
struct Arrival {
  RequestId id{};
  std::string_view name;
  std::int64_t num_prompt_tokens = 0;
  std::int64_t step = 0;  // first step that may schedule it
};

class StepObserver {
 public:
  virtual ~StepObserver() = default;
  // Called after the decision of a step, and after its output is processed. False ends the run; the
  // verdict stays as it is. With asynchronous scheduling the processed output may be that of an
  // earlier step, or none.
  virtual bool decided(const StepView&) { return true; }
  virtual bool finished(const StepView&) { return true; }
  // Called when a request arrives, and when a request finishes or is aborted in the current step.
  virtual void arrived(const Arrival&) {}
  virtual void left(RequestId, FinishReason) {}
};

// Forwards to all observers; false from any of them ends the run. An observer that is added after
// the one that returns false from decided() does not receive that decision.
class ObserverList final : public StepObserver {
 public:
  void add(StepObserver& observer) { observers_.push_back(&observer); }
  // Stops at the first false, since the step will not complete.
  bool decided(const StepView& view) override {
    return std::ranges::all_of(observers_, [&](auto* observer) { return observer->decided(view); });
  }
  // All observers receive the finished step, also after a false: recorders must be complete.
  bool finished(const StepView& view) override {
    bool go_on = true;
    for (StepObserver* observer : observers_) go_on &= observer->finished(view);
    return go_on;
  }
  void arrived(const Arrival& arrival) override {
    for (StepObserver* observer : observers_) observer->arrived(arrival);
  }
  void left(RequestId request, FinishReason reason) override {
    for (StepObserver* observer : observers_) observer->left(request, reason);
  }

 private:
  std::vector<StepObserver*> observers_;
};

}  // namespace lockstep
