// Faults of a run: a list of faults, each from a given step, that an engine must survive.
// Allocations are refused; the pool shrinks so that requests preempt each other; clients disconnect
// in every phase of a request; outputs arrive early or late.
//
// Invariants
// (1) The same plan in the same run injects the same faults in the same steps.
// (2) Every fault ends, and no effect of it remains. Afterwards every request that fits must
//     finish.
// (3) An abort whose step has come waits until a request is in its phase. It happens once.
//
// In a file: Fault of traces/formats/saved_case.h. In one line: KIND@STEP[+STEPS][:NUMBER],
// separated by commas; the number is the argument of the kind, next to `steps`. Example:
// "pinch_pool@20+8:4" allows 4 blocks in use in steps 20 to 27.
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

// The order is that of kKinds in faults.cpp. Aborts follow the others: is_abort() relies on it.
enum class FaultKind : std::uint8_t {
  refuse_allocation,  // `steps`: the pool allocates no block
  pinch_pool,         // `steps`: at most `blocks` are in use at once
  early_output,       // `steps`: outputs arrive before the next step is decided
  late_output,        // `steps`: outputs are late; requests arrive before them
  // A client disconnects. `place`: index among the requests in that phase, running ones first,
  // modulo their number.
  abort_waiting,      // not scheduled yet
  abort_first_chunk,  // after the first of several chunks of its prompt
  abort_mid_prefill,  // after a later chunk, not the last
  abort_decode,
  abort_preempted,
  abort_in_flight,  // after the decision of a step, before its output arrives
  abort_loading,    // during a load of remote KVs
  abort_again,      // of a request that finished in the previous step
};
inline constexpr std::size_t kNumFaultKinds = static_cast<std::size_t>(FaultKind::abort_again) + 1;
std::string_view name_of(FaultKind kind);
// True if the fault is a client that disconnects; false if it lasts for steps.
bool is_abort(FaultKind kind);

struct PlannedFault {
  FaultKind kind{};
  std::int64_t step = 0;
  std::int64_t steps = 1;   // duration; of kinds that last
  std::int64_t number = 0;  // `blocks` or `place`
  // True if `at` is one of the fault's steps. The subtraction cannot overflow, unlike step + steps.
  bool is_active(std::int64_t at) const { return at >= step && at - step < steps; }
  bool operator==(const PlannedFault&) const = default;
};

// A validated list of faults, in the order given. Faults of one kind may overlap.
class FaultPlan {
 public:
  FaultPlan() = default;
  explicit FaultPlan(std::vector<PlannedFault> faults) : faults_(std::move(faults)) {}

  std::span<const PlannedFault> faults() const { return faults_; }
  bool empty() const { return faults_.empty(); }
  bool is_active(FaultKind kind, std::int64_t step) const;
  // Returns the blocks that may be in use at once in that step: the smallest limit of all active
  // faults. No limit: the largest int64.
  std::int64_t blocks_in_use_max(std::int64_t step) const;
  bool operator==(const FaultPlan&) const = default;

 private:
  std::vector<PlannedFault> faults_;
};

// Validates faults of a file. Errors: an unknown kind; an argument that is missing, unknown or out
// of range.
Result<FaultPlan> fault_plan_of(std::span<const Fault> faults);
// Returns the plan as faults of a file, with every argument of each kind written out.
std::vector<Fault> faults_of(const FaultPlan& plan);
// Parses the one-line form, "refuse_allocation@12+3,pinch_pool@20+8:4,abort_decode@5:1", and writes
// one fault of it.
Result<FaultPlan> fault_plan_from_text(std::string_view text);
std::string to_text(const PlannedFault& fault);

// A workload with a fault plan: clients disconnect, outputs arrive early or late, and the pool
// refuses blocks that it has.
//
// Invariants
// (1) With an empty plan it equals the wrapped workload.
// (2) While a fault blocks the engine, and in the step after it, an idle engine does not end the
//     run: time advances.
// (3) However late an output is, no more steps are in flight than the engine itself allows (vLLM's
//     batch queue, v1/engine/core.py, step_with_batch_queue(): two with asynchronous scheduling).
//     The engine waits while requests arrive.
// (4) An abort is an event like any other: the engine may have finished the request before it
//     receives the abort.

class FaultyWorkload final : public Workload {
 public:
  // REQUIRES: an inner workload that is not scripted, or an empty plan.
  FaultyWorkload(std::unique_ptr<Workload> inner, FaultPlan plan);

  // Watches the scheduler for the phase of each request. REQUIRES: called before the first turn,
  // unless the plan is empty. `scheduler` must outlive this.
  void watch(Scheduler& scheduler) { scheduler_ = &scheduler; }
  // Returns how often the faults of a kind took effect: aborts that happened; steps in which a pool
  // limit was active or an output was late; outputs that arrived early.
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
  // Progress of a live request, from which its prefill phase follows.
  struct Progress {
    std::int64_t num_prompt_tokens = 0;
    std::int64_t num_steps = 0;  // steps that scheduled it since admission
  };

  // True if a limit of the pool is active in that step.
  bool hinders(std::int64_t step) const;
  void count(FaultKind kind) const { ++effects_[static_cast<std::size_t>(kind)]; }
  // True if the request is in the phase that an abort of this kind waits for. Not for abort_again.
  bool is_in_phase(RequestId id, FaultKind kind) const;
  // Returns the requests in a phase: running ones, then skipped and waiting ones in queue order.
  std::vector<std::string> in_phase(FaultKind kind) const;
  // Appends the aborts that are due. `in_flight`: after the decision; else before it.
  void abort_due(bool in_flight, std::vector<WorkloadEvent>& events);

  std::unique_ptr<Workload> inner_;
  FaultPlan plan_;
  Scheduler* scheduler_ = nullptr;
  bool looks_at_requests_ = false;  // true if some fault aborts
  bool limits_pool_ = false;
  std::vector<PlannedFault> aborts_;  // not yet happened
  std::map<std::string, Progress, std::less<>> requests_;
  std::vector<std::string> in_step_;      // scheduled in the current step
  std::vector<std::string> left_before_;  // ended in the previous step
  std::vector<std::string> left_;         // ended in the current step
  std::int64_t step_ = -1;
  mutable std::int64_t last_early_ = -1;  // last step whose output an early_output delivered
  mutable std::array<std::int64_t, kNumFaultKinds> effects_{};  // output_comes_in() counts too
};

// Wraps a workload. Errors: those of fault_plan_of(), and any fault with recorded decisions, whose
// steps are fixed.
Result<std::unique_ptr<FaultyWorkload>> make_faulty_workload(std::unique_ptr<Workload> inner,
                                                             std::span<const Fault> faults);

}  // namespace lockstep
