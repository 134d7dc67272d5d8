// Whether a run gets anywhere, and why a request that waits for ever does.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "reference/schedule/decision_source.h"
#include "sim/engine/run_config.h"
#include "sim/engine/wait_graph.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {

// Requests that preempt each other for ever do run, but nothing is sampled and nobody leaves. Every
// step schedules at least a token, so with all of them counted several times over, that is no
// progress. Steps in which a fault hinders them do not count, nor those up to a report of a KV
// connector; but of reports alone there may not be too many either: what is loaded and given back
// in turns gets nobody further.
class ProgressGuard {
 public:
  explicit ProgressGuard(const RunConfig& config) : config_(config) {}
  void arrived() { got_further(); }
  void sampled() { got_further(); }
  void left() { got_further(); }
  void hindered() { got_further(); }
  void reported() {
    if (++reports_ <= kReportsMax) steps_ = 0;
  }
  // Once a step.
  bool is_stuck(const DecisionSource& decisions);

 private:
  static constexpr std::int64_t kReportsMax = 256;
  void got_further() { steps_ = reports_ = 0; }

  const RunConfig& config_;
  std::int64_t steps_ = 0;
  std::int64_t reports_ = 0;  // of a connector since anybody got further
};

// Whether nothing runs, and whoever waits with blocks waits for somebody behind it: the model's
// scheduler can tell, nobody else.
bool has_wait_cycle(const RunConfig& config, const DecisionSource& decisions,
                    const HoldingWatch& holding);
// The verdict, who is stuck, and why: "needs about 12 blocks for its 190 tokens; 3 of 40 are free,
// and nobody runs who would free any".
void set_liveness_verdict(const RunConfig& config, const DecisionSource& decisions,
                          const std::function<std::string_view(RequestId)>& name,
                          const HoldingWatch& holding, RunSummary& summary);

}  // namespace lockstep
