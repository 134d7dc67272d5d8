// What a recording itself shows, in addition to a run of it.
//
// A run that follows a recording executes the recorded decisions; RecordingAudit checks each one
// before it is executed. A run in which the model decides (--decide model) proves something about
// the recorded decisions only while both are equal. RecordingCheck finds the first step where they
// differ, and audits the recorded decisions themselves.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "properties/audit/auditor.h"
#include "sim/conform/conform.h"
#include "sim/engine/step_observer.h"
#include "sim/recording/run_recorder.h"
#include "sim/session/session.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {

// Audits the steps of a run while it runs; a finding ends the audit and the run.
class StepAudit : public StepObserver {
 public:
  const std::vector<AuditFinding>& findings() const { return findings_; }
  // Returns why the audit cannot follow the steps; empty: it can.
  const std::string& not_audited() const { return not_audited_; }

 protected:
  void open(const RecordingHeader& header, AuditScope scope, AuditedRules rules) {
    not_audited_ = why_not_audited(header);
    if (not_audited_.empty()) auditor_.emplace(header, scope, rules);
  }
  // True if no further step is audited.
  bool is_over() const { return !auditor_ || !findings_.empty(); }
  // Audits a recorded step or the end. REQUIRES: the audit is not over.
  void audit(const RecordedStep& step) {
    auditor_->step(step);
    findings_ = auditor_->take_findings();
  }
  void audit(const RecordingEnd& end) {
    auditor_->end(end);
    findings_ = auditor_->take_findings();
  }

  std::optional<Auditor> auditor_;  // absent: not audited

 private:
  std::string not_audited_;
  std::vector<AuditFinding> findings_;
};

// Ends a run that follows `recording` at the first finding, before its step is executed.
//
// Invariants
// (1) Every recorded step is audited once, in order, as `lockstep audit` does.
// (2) After a finding no step is audited.
class RecordingAudit final : public StepAudit {
 public:
  // REQUIRES: the run follows this recording, from its first step.
  explicit RecordingAudit(std::shared_ptr<const Recording> recording,
                          AuditedRules rules = AuditedRules::all);
  // Audits the recorded step. False: it has findings, and the step must not be executed.
  bool decided(const StepView& view) override;
  // Audits the end line. Must be called after the last step of a run that did not fail; without
  // effect after a finding.
  void end() {
    if (!is_over()) audit(recording_->end);
  }

 private:
  const std::shared_ptr<const Recording> recording_;
};

// Converts a finding to a check failure named "audit.RULE".
CheckFailure failure_of(const AuditFinding& finding);

// Result of comparing a recording with the model and auditing it. Both parts are independent: a
// recording may be audited although the model cannot follow it.
struct RecordingCheck {
  std::optional<ConformMismatch> parts;  // the first difference; absent: none
  std::vector<AuditFinding> findings;
  std::string not_compared;  // why the model cannot follow it; empty: it was compared
  std::string not_audited;   // why the audit cannot follow it; empty: it was audited

  // Returns the verdict of a run that did not fail: `agreed` only if the recording has the same
  // decisions and the audit has no findings. A recording that was not compared counts as `parted`.
  Verdict verdict() const;
};

// Compares and audits the recording. `path`: the file that it was read from, for messages. Never
// fails: what is impossible is stated in not_compared and not_audited.
RecordingCheck check_recording(const std::string& path, std::shared_ptr<const Recording> recording,
                               AuditedRules rules = AuditedRules::all);

// Formats one line: "the recording parts from the model in step 3; audit: 2 findings".
std::string summary_of(const RecordingCheck& check);
// Formats the first difference and at most five findings, one line each. Empty: none.
std::string details_of(const RecordingCheck& check);
// Formats the difference for a record of the model's steps: what follows it is the model's.
std::string parting_of(const ConformMismatch& parts);
nlohmann::ordered_json json_of(const RecordingCheck& check);

// Audits the decisions of a run while it runs. Another engine's are checked, and the run ends at
// the first finding. With the scope hits_only, for the model, it only counts what prefix caching
// finds and why it finds no more; at about 200 ns per prompt token that ends after kTokensMax of
// them.
//
// Invariants
// (1) The audit sits between the loop and its workload and changes neither.
// (2) Every completed step is audited once, in order, up to the first finding or the end.
// (3) Before open() it has ended.
//
// Not counted: hits of runs with a KV connector, as in HitTotals.

class RunAudit final : public StepAudit {
 public:
  // Prompt tokens, after which counting ends.
  static constexpr std::int64_t kTokensMax = 1'000'000;

  // Returns true if hits can be lost to more than evictions: by windows, states, several groups or
  // drafts. Otherwise the counts would say little.
  static bool counts_hits_of(const LockstepConfig& config);
  // `workload` must outlive the audit; the loop must use workload() instead.
  explicit RunAudit(Workload& workload)
      : recorder_(workload, [this](const RecordedStep& step) { take(step); }) {}
  // Must be called before the first step. `config`: of the run.
  void open(const LockstepConfig& config, const DecisionSource& decisions, AuditScope scope,
            AuditedRules rules = AuditedRules::all);

  Workload& workload() { return recorder_; }
  bool decided(const StepView& view) override;
  bool finished(const StepView& view) override;
  // Audits the end. Must be called after the last step of a run that did not fail.
  void end();
  bool has_ended() const;
  // Null: hits are not counted.
  const HitTotals* hits() const;

 private:
  void take(const RecordedStep& step);

  RunRecorder recorder_;
  AuditScope scope_ = AuditScope::hits_only;
};

// Hits of all engines together, without engines that the audit does not follow.
struct CountedHits : HitTotals {
  bool is_whole = true;  // false: RunAudit::kTokensMax ended the count
};
// Returns the hit tokens in percent of those that were in the pool; 100 if none was.
double hit_share(const HitTotals& hits);
// Formats the tokens that were lost, by reason: "7,500 state, 12 last token". Empty: none.
std::string losses_text(const HitTotals& hits);
nlohmann::ordered_json json_of(const HitTotals& hits);

}  // namespace lockstep
