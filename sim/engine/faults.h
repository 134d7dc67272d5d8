// Faults of a run: a list of faults, each from a given step, that an engine must survive.
// Allocations are refused; the pool shrinks so that requests preempt each other; clients disconnect
// in every phase of a request; outputs arrive early or late.
//
// Invariants
// (1) The same plan in the same run injects the same faults in the same steps.
// (2) Every fault ends and leaves nothing. Afterwards every request that fits must finish.
// (3) From its step on, an abort waits for a request in its phase. It happens once.
//
// In a file: Fault of traces/formats/saved_case.h. In one line: KIND@STEP[+STEPS][:NUMBER],
// separated by commas; the number is the argument of the kind, next to `steps`.
// Not here: faults of transfers, which belong to the connector.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "reference/schedule/scheduler.h"
#include "sim/engine/workload.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

enum class FaultKind : std::uint8_t {
  refuse_allocation,  // `steps`: the pool gives out no block
  pinch_pool,         // `steps`: at most `blocks` are in use at once
  early_output,       // `steps`: outputs arrive before the next step is decided
  late_output,        // `steps`: outputs are late; requests arrive before them
  // A client gives up. `place`: which of the requests in that phase, running ones first.
  abort_waiting,      // not scheduled yet
  abort_first_chunk,  // after the first of several chunks of its prompt
  abort_mid_prefill,  // after a later one, not the last
  abort_decode,
  abort_preempted,
  abort_in_flight,  // of a decided step, before its output arrives
  abort_loading,    // waits for remote KVs
  abort_again,      // of a request that ended in the previous step
};
inline constexpr std::size_t kNumFaultKinds = static_cast<std::size_t>(FaultKind::abort_again) + 1;
std::string_view name_of(FaultKind kind);
bool is_abort(FaultKind kind);

struct PlannedFault {
  FaultKind kind{};
  std::int64_t step = 0;
  std::int64_t steps = 1;   // it lasts; of those that do
  std::int64_t number = 0;  // `blocks` or `place`
  bool is_active(std::int64_t at) const { return at >= step && at - step < steps; }
  bool operator==(const PlannedFault&) const = default;
};

class FaultPlan {
 public:
  FaultPlan() = default;
  explicit FaultPlan(std::vector<PlannedFault> faults) : faults_(std::move(faults)) {}

  std::span<const PlannedFault> faults() const { return faults_; }
  bool empty() const { return faults_.empty(); }
  bool is_active(FaultKind kind, std::int64_t step) const;
  // Blocks that may be in use at once in that step.
  std::int64_t blocks_in_use_max(std::int64_t step) const;
  bool operator==(const FaultPlan&) const = default;

 private:
  std::vector<PlannedFault> faults_;
};

// Refused: an unknown kind, an argument that is missing, unknown or out of range.
Result<FaultPlan> fault_plan_of(std::span<const Fault> faults);
std::vector<Fault> faults_of(const FaultPlan& plan);
// "refuse_allocation@12+3,pinch_pool@20+8:4,abort_decode@5:1", and back.
Result<FaultPlan> fault_plan_from_text(std::string_view text);
std::string to_text(const PlannedFault& fault);

// A workload with a fault plan: clients disconnect, outputs arrive early or late, the pool refuses
// blocks that it has.
//
// Invariants
// (1) With an empty plan it equals the wrapped workload.
// (2) While a fault blocks the engine, and in the step after it, an idle engine does not end the
//     run: time advances.
// (3) However late an output is, no more steps are in flight than the engine itself allows (vLLM's
//     batch queue: two with asynchronous scheduling). The engine waits while requests arrive.

class FaultyWorkload final : public Workload {
 public:
  // REQUIRES: an inner workload that is not scripted, or an empty plan.
  FaultyWorkload(std::unique_ptr<Workload> inner, FaultPlan plan);

  // Watches the scheduler for the phase of each request. REQUIRES: called before the first turn,
  // unless the plan is empty. `scheduler` must outlive this.
  void watch(Scheduler& scheduler) { scheduler_ = &scheduler; }
  // How often the faults of a kind took effect: aborts, or steps that one of the others was there.
  std::int64_t num_effects(FaultKind kind) const {
    return effects_[static_cast<std::size_t>(kind)];
  }
  const FaultPlan& plan() const { return plan_; }

  Result<Turn> next_turn(const LoopState& state, std::vector<WorkloadEvent>& events) override;
  Result<void> sample(std::int64_t step, std::span<const SampledRow> rows,
                      ModelOutput& output) override;
  KVConnector* connector() override { return inner_->connector(); }
  Result<void> connector_report(KVConnectorOutput& report) override {
    return inner_->connector_report(report);
  }
  void while_running(std::vector<WorkloadEvent>& events) override;
  std::optional<bool> output_comes_in(std::int64_t step) const override;
  bool is_hindered(std::int64_t step) const override {
    return hinders(step) || inner_->is_hindered(step);
  }
  void step_done(std::int64_t scheduled_tokens) override;
  void request_left(std::string_view name, std::uint64_t ticket) override;
  void request_refused(std::string_view name, std::uint64_t ticket, const Error& why) override;
  TransferPlanner* transfers() override { return inner_->transfers(); }
  bool is_busy() const override { return inner_->is_busy(); }
  std::optional<std::int64_t> next_due_ns() const override { return inner_->next_due_ns(); }
  void advance_to(std::int64_t now_ns) override { inner_->advance_to(now_ns); }
  bool is_scripted() const override { return inner_->is_scripted(); }
  std::string place() const override { return inner_->place(); }
  std::int64_t now_ns() const override { return inner_->now_ns(); }
  std::int64_t records_consumed() const override { return inner_->records_consumed(); }

 private:
  // What is known of a request that has not left.
  struct Progress {
    std::int64_t num_prompt_tokens = 0;
    std::int64_t num_steps = 0;  // steps that scheduled it since admission
  };

  bool hinders(std::int64_t step) const;
  void count(FaultKind kind) const { ++effects_[static_cast<std::size_t>(kind)]; }
  bool is_in_phase(RequestId id, FaultKind kind) const;
  std::vector<std::string> in_phase(FaultKind kind) const;
  void abort_due(bool in_flight, std::vector<WorkloadEvent>& events);

  std::unique_ptr<Workload> inner_;
  FaultPlan plan_;
  Scheduler* scheduler_ = nullptr;
  bool looks_at_requests_ = false;  // some fault aborts
  bool limits_pool_ = false;
  std::vector<PlannedFault> aborts_;  // that have not happened
  std::map<std::string, Progress, std::less<>> requests_;
  std::vector<std::string> in_step_;      // scheduled in the current step
  std::vector<std::string> left_before_;  // ended in the previous step
  std::vector<std::string> left_;         // ended in the current step
  std::int64_t step_ = -1;
  mutable std::array<std::int64_t, kNumFaultKinds> effects_{};  // output_comes_in() counts too
};

// Refuses faults that fault_plan_of() refuses, and any fault with recorded decisions.
Result<std::unique_ptr<FaultyWorkload>> make_faulty_workload(std::unique_ptr<Workload> inner,
                                                             std::span<const Fault> faults);

}  // namespace lockstep
