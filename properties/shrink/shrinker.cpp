#include "properties/shrink/shrinker.h"

#include <utility>

#include "properties/shrink/shrink_passes.h"

namespace lockstep {

std::optional<ShrinkResult> shrink(const SavedCase& first, const StillFails& still_fails,
                                   const ShrinkOptions& options) {
  // As its file gives it back: a field that a file does not keep could not be a cause.
  auto read = saved_case_from_text(first.name, saved_case_to_text(first));
  if (!read) return std::nullopt;
  SavedCase start = std::move(*read);
  // What the case says it shows is said of the first one; whoever keeps the result says it anew.
  start.expected.reset();
  const std::optional<std::int64_t> steps = still_fails(start);
  if (!steps) return std::nullopt;
  ShrinkTrial trial(std::move(start), *steps, still_fails, options.evaluations_max,
                    options.progress);
  std::int64_t accepted = -1;
  while (accepted != trial.accepted() && !trial.is_exhausted()) {
    accepted = trial.accepted();
    shrink_records(trial);
    shrink_scale(trial);
    shrink_plan(trial);
    shrink_requests(trial);
    shrink_options(trial);
    shrink_arrivals(trial);
  }
  return ShrinkResult{.smallest = trial.best(),
                      .steps = trial.steps(),
                      .first_steps = *steps,
                      .evaluations = trial.evaluations() + 1,
                      .accepted = trial.accepted(),
                      .is_minimal = !trial.is_exhausted()};
}

}  // namespace lockstep
