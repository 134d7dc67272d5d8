// The judge: runs one saved case and reports its outcome. Every check observes the run: the
// comparison with a backend, the audit, the invariants, and the liveness check.
//
// Invariants
// (1) The same case and the same kind of backend give the same outcome, state hash included.
// (2) The first failing check ends the run and names the outcome; later effects are not judged.
// (3) A case that the reader, the engine or the backend refuses is `refused`: neither agreed nor a
//     failure. A backend that fails during a run is a violation of check `device`.
//
// Not checked: whether the outcome equals the case's `expected` verdict.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "properties/audit/audit.h"
#include "properties/judge/marks.h"
#include "properties/judge/tally.h"
#include "sim/session/session.h"
#include "sim/verdict/run_summary.h"
#include "traces/formats/recording.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

// harness: Lockstep's own code in an engine's process raised, so the engine is not judged.
enum class OutcomeKind : std::uint8_t { agreed, divergence, violation, stuck, refused, harness };

// The outcome of a case. Equal cases give equal outcomes, field by field.
struct Outcome {
  OutcomeKind kind = OutcomeKind::agreed;
  // The check that failed: a phase of sim/verdict/divergence.h ("page_written"), "audit." and a
  // rule of properties/audit/audit.h, "invariant." and a name of
  // properties/invariants/invariants.h, or "liveness". A cycle of waiting requests is
  // "liveness.head_of_line" or, if the first of them holds blocks, "liveness.partial_load". With
  // another engine: "engine.exception", "engine.crash", "engine.hang" or "engine.reply", and with
  // JudgeOptions::conforms "conform." and a field of a recorded step. "harness" of that kind.
  // Empty: agreed or refused.
  std::string check;
  // Step that fails; -1: none, or unknown.
  std::int64_t step = -1;
  std::int32_t dp_rank =
      -1;  // the data parallel rank that fails; -1: one engine, or the collectives
  // Request that fails; empty: none.
  std::string request;
  std::string what;
  int finding =
      // Number in docs/findings.md, of a failure that the judge has identified; 0: not identified.
      0;
  // What the case reached, up to its end or failure.
  Tally tally;
  // Of all steps, the failing one included.
  StateHash state_hash;
  std::int64_t steps = 0;
  // Bytes of the pages that were compared.
  std::int64_t bytes_checked = 0;

  bool failed() const { return kind != OutcomeKind::agreed && kind != OutcomeKind::refused; }
  // Compares what identifies a failure: its position and message may differ between runs of
  // different cases.
  bool same_failure(const Outcome& other) const {
    return kind == other.kind && check == other.check;
  }
  bool operator==(const Outcome&) const = default;
};

// What to judge a case with, and what to collect while it runs. The default judges the model's
// decisions, without a backend.
struct JudgeOptions {
  BackendFactory backend = {};                              // absent: decisions only
  DecisionsFactory decisions = {};                          // absent: the model's
  std::function<std::unique_ptr<Workload>()> clients = {};  // absent: the case's own
  StepObserver* observer = nullptr;   // sees every step, the failing one included
  std::int32_t observed_dp_rank = 0;  // the rank that observer and recording see
  // Receives the chain: one hash per step and engine.
  std::vector<StateHash>* hashes = nullptr;
  RunSummary* summary = nullptr;                  // receives counts, times and verdict
  std::vector<AuditFinding>* findings = nullptr;  // receives those of the failing step
  // Receives the observed engine's run as a recording. Its last step may be incomplete: the run
  // ended there.
  Recording* recording = nullptr;
  // True: if another engine decides, compares every field of every step with the decision of the
  // model under the profile of the case (sim/conform/conform.h).
  bool conforms = false;
  MarkCollector* marks = nullptr;  // receives the marks of the case, for a guided search
  // False: the decisions are checked by the audit only. The invariants read the model's scheduler,
  // so they never run where another engine decides.
  bool invariants = true;
  AuditScope scope =
      AuditScope::running_engine;  // a followed recording is always audited in its entirety
  AuditedRules rules = AuditedRules::all;
  // The run stops after this many steps, and its end is not judged; 0: no limit.
  std::int64_t steps_max = 0;
};

// Judges the case. The backend runs if the options give one, the case's `backend` is not "none",
// and the program of a step can express the case. It cannot, for example, with drafts and states in
// mode `all`; the decisions are then judged without memory. A planted mutant of a backend that does
// not run is `refused`.
Outcome judge(const SavedCase& saved, const JudgeOptions& options);
Outcome judge(const SavedCase& saved, const BackendFactory& backend = {});

// Returns the outcome of a run outside the judge, from the summary of its session. Counts that a
// summary does not have are 0.
Outcome outcome_of(const RunSummary& summary);

}  // namespace lockstep
