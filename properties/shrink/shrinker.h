// From a case that fails to a small one that fails the same way, by delta debugging: whole requests
// go first, then layers and groups, prompts and outputs token by token, options, the pool, limits
// and times; round after round until a whole round finds nothing.
//
// (1) The result fails as the first case did; `still_fails` has said so of exactly this case.
// (2) Unless the evaluations ran out, nothing can be taken from it: not one request, run of a
//     prompt, token, layer, group, option, fault or setting without losing the failure.
// (3) Same case, predicate and budget: same result.
//
// Of recorded decisions that are followed, requests and steps are removed, and the others kept as
// they were recorded.
// Not tried: changing what engine is simulated, and pairs of removals that fail only together.
#pragma once

#include <cstdint>
#include <optional>

#include "properties/shrink/shrink_trial.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

struct ShrinkOptions {
  std::int64_t evaluations_max = 20'000;
  ShrinkProgress progress;  // may be empty
};

struct ShrinkResult {
  SavedCase smallest;
  std::int64_t steps = 0;        // that it runs, the failing one included
  std::int64_t first_steps = 0;  // of the case that was given
  std::int64_t evaluations = 0;
  std::int64_t accepted = 0;
  bool is_minimal = false;  // false: the evaluations ran out
};

// Nothing: the case does not fail in the first place, or its own file would be refused.
std::optional<ShrinkResult> shrink(const SavedCase& first, const StillFails& still_fails,
                                   const ShrinkOptions& options = {});

}  // namespace lockstep
