// Defects of the engines themselves, listed in docs/findings.md. The model decides as the engine
// does, so generated cases run into them: such a failure counts as its finding, not as a new
// failure.
//
// A finding is recognised by its repair. A case that could show it, by its configuration and the
// failing check, is judged again with that one defect repaired: by the rule that the engine should
// have, or with the blocks that its plan omits. If the case then passes the step in which it
// failed, it was the finding. Where two findings cause one failure, repairing either alone does not
// help; if the case passes with all rules repaired, it counts as the first possible one. If it
// still fails, something else is wrong, for example a planted defect, and it is a new failure.
//
// A kernel may diverge on the engine's decision: a divergence may also be a finding where the
// decisions themselves, followed by the audit, break its rule in that step or before.
//
// With a planted defect in the case, a failure that disappears without it is not a finding, even
// where the planted defect only triggers the engine's own.
//
// Not distinguished: a second defect that only shows after the first one's effect.
#pragma once

#include <span>
#include <string_view>

#include "properties/judge/judge.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

struct KnownFinding {
  int number = 0;  // in docs/findings.md
  std::string_view title;
  bool (*can_happen)(const SavedCase& saved) = nullptr;
  std::span<const std::string_view> checks;
  // The case without the defect. REQUIRES: can_happen(saved).
  SavedCase (*repaired)(const SavedCase& saved) = nullptr;
};

std::span<const KnownFinding> known_findings();
// The finding of this number, including those that only other engines show. Null: none.
const KnownFinding* finding_of_number(int number);
// Null: the outcome is not a failure, or is a new failure. `backend` is what the outcome was judged
// with.
const KnownFinding* known_finding(const SavedCase& saved, const Outcome& outcome,
                                  const BackendFactory& backend = {});

// The finding of another engine's outcome: `saved.engine` names the profile of its release, and the
// model fails in the same step, by the same check, for that reason. With a connector the model is
// that of the release modelled with one, with the policies that findings about connectors depend
// on, and the step may differ. Where the engine stops or miscounts and the model continues, the
// engine's message identifies the finding.
const KnownFinding* known_finding_of_engine(const SavedCase& saved, const Outcome& outcome);

// Of an outcome that was judged so: by another engine's decisions or the model's.
const KnownFinding* known_finding(const SavedCase& saved, const Outcome& outcome,
                                  const JudgeOptions& judged_by);
// Of what comes out where the case is judged so.
const KnownFinding* known_finding_of_run(const SavedCase& saved, const JudgeOptions& options);

// What a check demands and why, for a reader new to it. `check` as in
// Outcome::check. Empty: no text.
std::string_view reason_of_check(std::string_view check);

}  // namespace lockstep
