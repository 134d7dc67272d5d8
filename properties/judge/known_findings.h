// Defects of the engines themselves, listed in docs/findings.md. The model decides as the engine
// does, so generated cases run into them. Such a failure counts as its finding and not as a new
// failure.
//
// A finding is recognised by its repair. If the configuration and the failing check permit the
// finding, the case is judged again with that one defect repaired: by the rule that the engine
// should have, or with the blocks that its plan omits. If the case then passes the step in which it
// failed, it was the finding.
//
// Two findings may cause one failure, and repairing either does not help. If the case passes with
// all rules repaired, it counts as the first possible finding. If it still fails, something else is
// wrong, for example a planted defect: it is a new failure.
//
// A kernel may diverge because of the engine's decision. A divergence is therefore also a finding
// if the decisions themselves, checked by the audit, break the finding's rule in that step or
// before.
//
// With a planted defect in the case, a failure that disappears without the defect is not a finding,
// even if the planted defect only triggers the engine's own.
//
// Not distinguished: a second defect that shows only after the first one's effect.
#pragma once

#include <span>
#include <string_view>

#include "properties/judge/judge.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

// One finding and how to recognise it.
struct KnownFinding {
  int number = 0;  // in docs/findings.md
  std::string_view title;
  // True if the configuration permits the finding.
  bool (*can_happen)(const SavedCase& saved) = nullptr;
  // Outcome::check values by which it may show.
  std::span<const std::string_view> checks;
  // Returns the case without the defect. Null for findings that an engine or its worker identifies.
  // REQUIRES: can_happen(saved).
  SavedCase (*repaired)(const SavedCase& saved) = nullptr;
};

// A defect in which the model does not follow the engine: it continues where the engine stops or
// miscounts.
struct EngineFinding {
  KnownFinding finding;
  std::string_view text;  // part of the engine's message; empty: any
  Reached reached;        // a class that the model must reach in the same case, and pass
};

// Returns the findings that the model's own decisions show, in the order in which they are tried.
std::span<const KnownFinding> known_findings();
// Returns the findings that other engines show, and those that an engine's worker names.
std::span<const EngineFinding> engine_findings();
std::span<const KnownFinding> worker_findings();
// Returns the case under a profile in which every finding that a rule repairs is repaired.
// Unchanged: its release has none.
SavedCase with_all_rules_repaired(const SavedCase& saved);
// Returns the finding with this number, including those that only other engines and workers show.
// Null: no finding of this number can be recognised.
const KnownFinding* finding_of_number(int number);
// Returns the finding that explains the outcome. Null: the outcome is not a failure, or is a new
// one. `backend` is what the outcome was judged with; the case is judged again several times with
// it.
const KnownFinding* known_finding(const SavedCase& saved, const Outcome& outcome,
                                  const BackendFactory& backend = {});

// Returns the finding behind another engine's outcome. `saved.engine` names the profile of its
// release. The model must fail in the same step, by the same check, for the same reason. With a
// connector the model is that of a release modelled with one, with the policies on which findings
// about connectors depend; the step may then differ. If the engine stops or miscounts where the
// model continues, the engine's message identifies the finding.
const KnownFinding* known_finding_of_engine(const SavedCase& saved, const Outcome& outcome);

// Chooses between the two above by `judged_by`, and also recognises findings of an engine's worker.
const KnownFinding* known_finding(const SavedCase& saved, const Outcome& outcome,
                                  const JudgeOptions& judged_by);
// Judges the case under `options` and returns the finding behind its outcome. Null: none, or the
// case agrees.
const KnownFinding* known_finding_of_run(const SavedCase& saved, const JudgeOptions& options);

// Returns what a check demands and why, for a reader new to it. `check`: as in Outcome::check.
// Empty: it has no text.
std::string_view reason_of_check(std::string_view check);

}  // namespace lockstep
