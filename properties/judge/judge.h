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

struct Outcome {
  OutcomeKind kind = OutcomeKind::agreed;
  // The check that failed: a phase of sim/verdict/divergence.h ("page_written"), "audit." and a
  // rule of properties/audit/audit.h, "invariant." and a name of
  // properties/invariants/invariants.h, or "liveness"; for a cycle of waiting requests
  // "liveness.head_of_line" or, if the first of them holds blocks, "liveness.partial_load". Of
  // another engine: "engine.exception", "engine.crash", "engine.hang" or "engine.reply", and with
  // JudgeOptions::conforms "conform." and a field of a recorded step. "harness" of that kind.
  // Empty: agreed or refused.
  std::string check;
  std::int64_t step = -1;
  std::int32_t dp_rank =
      -1;  // the data parallel rank that fails; -1: one engine, or the collectives
  std::string request;
  std::string what;
  int finding =
      // number in docs/findings.md, of a failure that the judge has identified; 0: not identified
      0;
  Tally tally;
  StateHash state_hash;
  std::int64_t steps = 0;
  std::int64_t bytes_checked = 0;

  bool failed() const { return kind != OutcomeKind::agreed && kind != OutcomeKind::refused; }
  bool same_failure(const Outcome& other) const {
    return kind == other.kind && check == other.check;
  }
  bool operator==(const Outcome&) const = default;
};

struct JudgeOptions {
  BackendFactory backend = {};      // absent: decisions, audit and invariants alone
  DecisionsFactory decisions = {};  // absent: the model's; else without invariants
  std::function<std::unique_ptr<Workload>()> clients = {};  // absent: those of the case
  StepObserver* observer = nullptr;               // sees every step, the one that fails included
  std::int32_t observed_dp_rank = 0;              // ... of this engine, where there are several
  std::vector<StateHash>* hashes = nullptr;       // receives the chain, one hash a step and engine
  RunSummary* summary = nullptr;                  // receives what the run came to
  std::vector<AuditFinding>* findings = nullptr;  // receives those of the step that fails
  // Receives the observed engine's run as a recording tells it; the step in which it ends, as far
  // as that came.
  Recording* recording = nullptr;
  // Where another engine decides: every field of every step against what the model decides under
  // the profile of the case (sim/conform/conform.h).
  bool conforms = false;
  MarkCollector* marks = nullptr;  // receives what the case reaches, for a guided search
  bool invariants = true;  // false: of the decisions, the audit alone
  AuditScope scope =
      AuditScope::running_engine;  // of a recording that is followed: the whole of it
  AuditedRules rules = AuditedRules::all;
};

// The backend runs when options give one, the case's `backend` is not "none", and the program of a
// step can express the case (it cannot, for example, with drafts and states in mode `all`).
Outcome judge(const SavedCase& saved, const JudgeOptions& options);
Outcome judge(const SavedCase& saved, const BackendFactory& backend = {});

}  // namespace lockstep
