// What a recording itself shows, next to a run of it.
//
// A run that follows a recording executes the recorded decisions, and RecordingAudit judges each
// before it is executed. A run in which the model decides (--decide model) holds for the recorded
// decisions only as far as both are equal: RecordingCheck names the first step where they are not,
// and gives the recorded decisions to the audit.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "properties/audit/audit.h"
#include "sim/conform/conform.h"
#include "sim/engine/step_observer.h"
#include "sim/recording/run_recorder.h"
#include "sim/session/session.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {

// Ends a run that follows `recording` at the first finding, before its step is executed.
//
// Invariants
// (1) Every recorded step is audited once, in order, as `lockstep audit` does.
// (2) After a finding no step is audited.
class RecordingAudit final : public StepObserver {
 public:
  explicit RecordingAudit(std::shared_ptr<const Recording> recording);
  bool decided(const StepView& view) override;
  // After the last step of a run that did not fail.
  void end();
  const std::vector<AuditFinding>& findings() const { return findings_; }
  // Why the audit cannot follow the recording; empty: it can.
  const std::string& not_audited() const { return not_audited_; }

 private:
  const std::shared_ptr<const Recording> recording_;
  std::string not_audited_;
  std::unique_ptr<Auditor> auditor_;  // null: not audited
  std::vector<AuditFinding> findings_;
};

// "audit.RULE", step and request of a finding.
CheckFailure failure_of(const AuditFinding& finding);

struct RecordingCheck {
  std::optional<ConformMismatch> parts;  // the first difference; absent: none
  std::vector<AuditFinding> findings;
  std::string not_compared;  // why the model cannot follow it; empty: it was compared
  std::string not_audited;   // why the audit cannot follow it; empty: it was audited

  // Of a run that did not fail: `agreed` only if the recording holds the same decisions and the
  // audit has no findings.
  Verdict verdict() const;
};

// `path`: of the file that it was read from.
RecordingCheck check_recording(const std::string& path, std::shared_ptr<const Recording> recording);

// "the recording parts from the model in step 3; audit: 2 findings"
std::string summary_of(const RecordingCheck& check);
// The first difference and the findings, a line each; empty: none.
std::string details_of(const RecordingCheck& check);
// "In step 3 the recording and the model part here ...": for a narrative of the model's steps.
std::string parting_of(const ConformMismatch& parts);
nlohmann::ordered_json json_of(const RecordingCheck& check);

// Counts what prefix caching finds in a run and why it finds no more, from the run's decisions.
// Only blocks and tokens are followed: nothing is checked. It costs about 200 ns per prompt token,
// so it ends after kTokensMax of them.
//
// Invariants
// (1) The counter sits between the loop and its workload and changes neither.
// (2) Its totals cover every completed step up to its end.
//
// Not counted: runs with a KV connector, as in HitTotals.

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
