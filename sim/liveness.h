// Whether a run gets anywhere, and why a request that waits for ever does.
#pragma once

#include <cstdint>
#include <string>

#include "sim/decision_source.h"
#include "sim/lockstep.h"

namespace lockstep {

inline constexpr std::int64_t kStuckNamed = 20;

// Requests that preempt each other for ever do run, but nothing is sampled and nobody leaves. Every
// step schedules at least a token, so with all of them counted several times over, that is no
// progress.
class ProgressGuard {
 public:
  explicit ProgressGuard(const LockstepConfig& config) : config_(config) {}
  void arrived() { steps_ = 0; }
  void sampled() { steps_ = 0; }
  void left() { steps_ = 0; }
  // Once a step.
  bool is_stuck(const DecisionSource& decisions);

 private:
  const LockstepConfig& config_;
  std::int64_t steps_ = 0;
};

// "needs 12 blocks for its 190 tokens; 3 of 40 are free and nobody runs who would free any"
std::string why_stuck(const DecisionSource& decisions, const KVCacheConfig& plan, RequestId id);

}  // namespace lockstep
