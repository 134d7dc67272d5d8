// What is made to go wrong in a run: a list of faults, each from a step on, that an engine must
// survive. Allocations are refused, the pool is pinched so that requests preempt each other,
// clients give up at every phase of a request, outputs come in early or late.
//
// (1) The same plan in the same run: the same things go wrong in the same steps.
// (2) Every fault ends, and nothing of it remains: afterwards whatever fits must finish.
// (3) An abort waits from its step on for a request in its phase, and happens once.
//
// In a file: Fault of traces/formats/saved_case.h. In one line: KIND@STEP[+STEPS][:NUMBER], by
// commas; the number is the argument that the kind takes beside `steps`.
// Not here: faults of transfers, which a connector has of its own.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

enum class FaultKind : std::uint8_t {
  refuse_allocation,  // `steps`: the pool gives no block to anybody
  pinch_pool,         // `steps`: at most `blocks` are in use at once
  early_output,       // `steps`: an output comes in before the next step is decided
  late_output,        // `steps`: an output takes its time; who arrives meanwhile finds it waiting
  // A client gives up. `place`: which of the requests in that phase, running ones first.
  abort_waiting,      // not scheduled yet
  abort_first_chunk,  // after the first of several chunks of its prompt
  abort_mid_prefill,  // after a later one, not the last
  abort_decode,
  abort_preempted,
  abort_in_flight,  // of a step that has been decided, before its output comes in
  abort_loading,    // waits for remote KVs
  abort_again,      // one that has left in the step before
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

// Refused: a kind that nobody knows, an argument that is missing, unknown or out of range.
Result<FaultPlan> fault_plan_of(std::span<const Fault> faults);
std::vector<Fault> faults_of(const FaultPlan& plan);
// "refuse_allocation@12+3,pinch_pool@20+8:4,abort_decode@5:1", and back.
Result<FaultPlan> fault_plan_from_text(std::string_view text);
std::string to_text(const PlannedFault& fault);

}  // namespace lockstep
