// Defects of the engines themselves that docs/findings.md tells of. The model decides as the engine
// does, so generated cases run into them: such a failure is counted by its finding, not as news.
//
// A finding is recognised by what happens without it. A case that could show it, by its
// configuration and by the check that fails, is judged once more with that one defect repaired: by
// the rule that the engine should have, or with the blocks that its plan leaves out. If the case
// then gets past the step in which it failed, it was the finding. Where two of them lead to one
// failure, each is repaired in vain; if the case gets past it with all rules repaired, it is the
// first one's that it could be. If it still fails, something else is wrong as well, a planted
// defect for one, and that is news.
//
// Kernels may stumble over what the engine decided: a divergence, too, may be a finding where the
// decisions alone, followed by the audit, break its rule in that step or before.
//
// With a defect planted in the case, what does not happen without it is no finding, even where the
// planted defect only brings the engine's own about.
//
// Not told apart: a second defect that only shows after what the first one did.
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
// Of this number, those that other engines alone show among them. Null: none.
const KnownFinding* finding_of_number(int number);
// Null: the outcome is no failure, or is news. `backend` is what the outcome was judged with.
const KnownFinding* known_finding(const SavedCase& saved, const Outcome& outcome,
                                  const BackendFactory& backend = {});

// Of an outcome of another engine: `saved.engine` names the profile of its release, and the model
// fails in the same step, by the same check, for that reason. Beside a connector that is the model
// of the release that is modelled with one, with the policies that findings about connectors hang
// on, and the step may be another. Where the engine stops or miscounts and the model goes on, a
// finding is told by what the engine says.
const KnownFinding* known_finding_of_engine(const SavedCase& saved, const Outcome& outcome);

// Of an outcome that was judged so: by another engine's decisions or the model's.
const KnownFinding* known_finding(const SavedCase& saved, const Outcome& outcome,
                                  const JudgeOptions& judged_by);
// Of what comes out where the case is judged so.
const KnownFinding* known_finding_of_run(const SavedCase& saved, const JudgeOptions& options);

// What a check demands and why, as a sentence for a reader who has never seen it fail. `check` as
// in Outcome::check. Empty: it has none here.
std::string_view reason_of_check(std::string_view check);

}  // namespace lockstep
