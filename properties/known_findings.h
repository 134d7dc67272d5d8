// Defects of the engines themselves that docs/findings.md tells of. The model decides as the engine
// does, so generated cases run into them: such a failure is counted by its finding, not as news.
//
// A finding is recognised by the configuration that it needs and by the checks that it can upset;
// any other failure of such a configuration is news. Kernels may stumble over what the engine
// decided: a divergence is no news either where the decisions alone, followed by nobody but the
// audit, break the rule of a finding in that step or before. Not checked here: that the case really
// shows that finding and not another defect behind the same check.
#pragma once

#include <span>
#include <string_view>

#include "properties/judge.h"
#include "traces/saved_case.h"

namespace lockstep {

struct KnownFinding {
  int number = 0;  // in docs/findings.md
  std::string_view title;
  bool (*can_happen)(const SavedCase& saved) = nullptr;
  std::span<const std::string_view> checks;
};

std::span<const KnownFinding> known_findings();
// Null: the outcome is no failure, or is news.
const KnownFinding* known_finding(const SavedCase& saved, const Outcome& outcome);

}  // namespace lockstep
