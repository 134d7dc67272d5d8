// The state of a run, and its parts by file: lockstep.cpp is the loop, lockstep_requests.cpp who
// comes and goes, lockstep_outputs.cpp what the model samples and a connector's workers move, and
// when the engine hears of it.
//
// (1) A request is live from its arrival until a decision reports it finished: its id is nobody
//     else's until then, although it may have left long before.
// (2) What the model has sampled is known to the worker at once, and to the engine when it
//     processes the step's output: with asynchronous scheduling, a step later.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "sim/device_side.h"
#include "sim/liveness.h"
#include "sim/lockstep.h"
#include "sim/report/timeline_recorder.h"
#include "sim/standstill.h"
#include "sim/state_hash.h"
#include "sim/stopwatch.h"

namespace lockstep {

// What the loop knows of a live request.
struct LiveRequest {
  std::string name;
  std::uint64_t ticket = 0;
  std::int64_t num_prompt_tokens = 0;
  std::int64_t num_output_tokens = 0;  // sampled, whether the engine has seen them or not
  bool live = false;
};

// With asynchronous scheduling and a KV connector also a step that scheduled nothing: what its
// workers report comes in no earlier than what the step before it sampled.
struct StepInFlight {
  std::int64_t step = 0;
  ModelOutput output;
  std::vector<RequestId> rows{};  // with a KV connector: whose they are

  bool is_empty() const { return output.token_ends.empty() && output.kv_connector_output.empty(); }
  // Tokens of its output that are the request's.
  std::int64_t num_sampled(RequestId id) const;
};

class LockstepLoop final : public LockstepRun {
 public:
  LockstepLoop(const LockstepConfig& config, DecisionSource& decisions, Workload& workload,
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
  Result<bool> execute(const AgreedBatch& agreed) override;
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
  bool empty_steps_are_in_flight() const {
    return config_.engine.async_scheduling && workload_.connector() != nullptr;
  }
  ModelOutput& begin_output(const SchedulerOutput& decision);
  Result<void> sample(const SchedulerOutput& decision);
  Result<void> check_output(const SchedulerOutput& decision, const ModelOutput& output) const;
  Result<void> take_connector_report();
  void plan_transfers(const SchedulerOutput& decision);
  void attach_connector_report();
  void count_decision(const SchedulerOutput& decision);
  struct OutputTaken {
    std::int64_t step = -1;  // of which step, the last one; -1: of none, or of none that ran
    bool is_empty = true;
  };
  OutputTaken process_output(bool anything_scheduled);
  std::int64_t take_output();
  bool has_nothing_to_decide() const;
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
  std::vector<StoppedRequest> stopped_;  // by the outputs that came in with this step
  std::function<std::string_view(RequestId)> name_of_ = [this](RequestId id) {
    return std::string_view(requests_[index_of(id)].name);
  };
  bool idle_ = true;
};

}  // namespace lockstep
