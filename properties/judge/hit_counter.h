// Counts what prefix caching finds in a run and why it finds no more, from the run's decisions.
// Only blocks and tokens are followed: nothing is checked. It costs about 200 ns per prompt token,
// so it ends after kTokensMax of them.
//
// Invariants
// (1) The counter sits between the loop and its workload and changes neither.
// (2) Its totals cover every completed step up to its end.
//
// Not counted: runs with a KV connector, as in HitTotals.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "properties/audit/audit.h"
#include "sim/recording/run_recorder.h"
#include "sim/session/session.h"

namespace lockstep {

class HitCounter final : public StepObserver {
 public:
  static constexpr std::int64_t kTokensMax = 1'000'000;

  // Whether hits can be lost to more than an eviction: windows, states, several groups, drafts.
  static bool applies(const LockstepConfig& config);
  explicit HitCounter(Workload& workload)
      : recorder_(workload, [this](const RecordedStep& step) { take(step); }) {}
  // Before the first step. `config`: of the run.
  void open(const LockstepConfig& config, const DecisionSource& decisions);

  Workload& workload() { return recorder_; }
  bool decided(const StepView& view) override { return has_ended() || recorder_.decided(view); }
  bool finished(const StepView& view) override { return has_ended() || recorder_.finished(view); }
  bool has_ended() const { return !auditor_ || auditor_->hits().tokens > kTokensMax; }
  // Absent: the audit does not follow such a run.
  const HitTotals* hits() const { return auditor_ ? &auditor_->hits() : nullptr; }

 private:
  void take(const RecordedStep& step);

  RunRecorder recorder_;
  std::optional<Auditor> auditor_;
};

// Hit tokens of those in the pool, in percent; 100 of nothing.
// Of all engines together, without those that the audit does not follow; absent: there is none.
struct CountedHits : HitTotals {
  bool is_whole = true;  // false: HitCounter::kTokensMax ended the count
};
double hit_share(const HitTotals& hits);
// "7,500 state, 12 last token"; empty: nothing was lost.
std::string losses_text(const HitTotals& hits);
nlohmann::ordered_json json_of(const HitTotals& hits);

}  // namespace lockstep
