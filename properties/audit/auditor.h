// Leads the ledgers of an audit through a recording, in the order in which a worker executes a
// step: clients and ends, tables, copies and loads, the rows, and the outputs that arrive after it.
//
// Invariants:
// (1) Steps arrive in order; every ledger sees each of them.
// (2) A ledger is absent if the recording has nothing for it, or if its rules are not checked.
// (3) A row that cannot run is reported and left out: the other ledgers do not see it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "properties/audit/block_ledger.h"
#include "properties/audit/draft_ledger.h"
#include "properties/audit/event_ledger.h"
#include "properties/audit/fact_ledger.h"
#include "properties/audit/hit_ledger.h"
#include "properties/audit/kv_transfer_ledger.h"
#include "properties/audit/output_ledger.h"
#include "properties/audit/token_ledger.h"

namespace lockstep {

// Audits one recording, step by step. Ledgers refer to each other, so it stays where it is.
class Auditor {
 public:
  explicit Auditor(const RecordingHeader& header, AuditScope scope = AuditScope::running_engine,
                   AuditedRules rules = AuditedRules::all);
  Auditor(const Auditor&) = delete;

  void step(const RecordedStep& step);
  // Checks the rules about the end, unless the recording is cut off.
  void end(const RecordingEnd& end);
  std::vector<AuditFinding> take_findings() { return core_.findings.take(); }  // `file` is empty
  std::int64_t reads_checked() const { return core_.num_reads; }               // slots and states
  const HitTotals& hits() const { return hits_.totals(); }
  // What the recording does not have, after its end: one line per rule that was not checked.
  std::vector<std::string> not_checked() const;

 private:
  void take_events(const RecordedStep& step, const std::vector<RecordedEvent>& events);
  void take_event(const RecordedStep& step, const RecordedEvent& event, std::int64_t first_step);
  void add(const RecordedEvent& event, std::int64_t first_step);
  void reset_running();
  void preempt(const RecordedStep& step);
  // Rules about ends. Engines without a profile may handle an end one step late.
  void check_told(const AuditRequest& request);
  void report_untold();
  bool is_past_end(const RecordedStep& step, const AuditRequest& request);
  bool keeps_row(const RecordedStep& step, const AuditRequest& request) const;
  // Each happens once.
  void check_preempted(const std::string& name, const AuditRequest* request);
  void check_stopped_once(const RecordedStep& step, const std::string& name,
                          const AuditRequest* request);
  void check_start(const RecordedScheduled& scheduled, const AuditRequest& request, bool is_first);
  std::optional<AuditRow> make_row(const RecordedStep& step, const RecordedScheduled& scheduled);
  void fill_table(const RecordedStep& step, const RecordedScheduled& scheduled,
                  AuditRequest& request);
  void fill_contents(const RecordedScheduled& scheduled, AuditRow& row);
  void run_group(const RecordedStep& step, const std::vector<AuditRow>& rows, std::size_t group);
  void check_step(const RecordedStep& step);
  void take_samples(const RecordedStep& step, const std::vector<AuditRow>& rows);
  void take_outputs(const RecordedStep& step);

  // How a request ended.
  struct End {
    bool is_stopped = false;  // by an output
    // The engine has handled the end when it receives the output of this step: of the one that
    // reports it, or of the first one that runs the request after its client has aborted it.
    std::int64_t handled_in = -1;
  };

  AuditCore core_;
  HitLedger hits_;
  HitLedger* counted_hits_;  // null with a connector: hits are from elsewhere too
  BlockLedger blocks_;
  TokenLedger tokens_;
  std::optional<StateLedger> states_;
  KvTransferLedger transfers_;
  OutputLedger outputs_;
  DraftLedger drafts_;
  SessionLedger sessions_;
  InputLedger inputs_;
  std::optional<EventLedger> events_;
  std::optional<FactLedger> facts_;
  std::optional<PolicyLedger> policy_;
  std::vector<AuditRow> rows_;             // of the step
  PerRequest<std::int64_t> scheduled_in_;  // step that scheduled the request last
  PerRequest<End> ends_;
  bool names_ends_;  // the engine's release does, or a step lists a request that an output ended
  std::vector<AuditFinding> untold_;  // ends of which no client is notified, until names_ends_
};

}  // namespace lockstep
