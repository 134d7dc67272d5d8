#include <algorithm>
#include <utility>
#include <vector>

#include "properties/shrink/case_parts.h"
#include "properties/shrink/recorded_case.h"
#include "properties/shrink/shrink_passes.h"

namespace lockstep {
namespace {

// Delta debugging over removals: chunks of half of what there is, then of a quarter, and so on
// down to single things. `attempt` is asked to do without [first, last) of the `size()` things
// that are there.
template <class Size, class Attempt>
void remove_chunks(const Size& size, const Attempt& attempt) {
  for (std::size_t chunk = size(); chunk > 0; chunk /= 2)
    for (std::size_t end = size(); end > 0;) {
      const std::size_t first = end > chunk ? end - chunk : 0;
      attempt(first, end);
      end = std::min(first, size());
    }
}

void drop_steps(ShrinkTrial& trial, std::size_t first, std::size_t last) {
  trial.attempt_with([&](SavedCase& saved) {
    auto& steps = saved.recording->steps;
    steps.erase(steps.begin() + static_cast<std::ptrdiff_t>(first),
                steps.begin() + static_cast<std::ptrdiff_t>(last));
    std::int64_t number = 0;
    for (RecordedStep& step : steps) step.step = number++;
    saved.recording->end = {.steps = number, .unfinished = {}};
  });
}

// A replay takes events, samples and drafts from a recording; what was decided it finds anew.
void drop_decisions(ShrinkTrial& trial) {
  trial.attempt_with([](SavedCase& saved) {
    for (RecordedStep& step : saved.recording->steps) {
      RecordedStep inputs;
      inputs.step = step.step;
      inputs.before = std::move(step.before);
      inputs.during = std::move(step.during);
      inputs.sampled = std::move(step.sampled);
      inputs.drafts = std::move(step.drafts);
      inputs.output_of_step = step.output_of_step;
      step = std::move(inputs);
    }
    saved.recording->end.unfinished.clear();
  });
}

template <class Things>
void remove_each(ShrinkTrial& trial, Things RunSpec::*things) {
  for (std::size_t i = (trial.best().*things).size(); i-- > 0;)
    trial.attempt_with([&](SavedCase& saved) {
      (saved.*things).erase((saved.*things).begin() + static_cast<std::ptrdiff_t>(i));
    });
}

// Earlier, shorter, and with smaller numbers. What a fault does not take is refused, and not tried.
void shrink_fault(ShrinkTrial& trial, std::size_t i) {
  trial.lower(0, [i](SavedCase& saved) { return &saved.faults[i].step; });
  for (std::size_t a = 0; a < trial.best().faults[i].arguments.size(); ++a) {
    const std::int64_t least = trial.best().faults[i].arguments[a].first == "steps" ? 1 : 0;
    trial.lower(least, [i, a](SavedCase& saved) { return &saved.faults[i].arguments[a].second; });
  }
}

}  // namespace

void shrink_records(ShrinkTrial& trial) {
  if (trial.best().recording)
    if (const auto timed = on_a_clock(trial.best())) trial.attempt(*timed);
  if (trial.best().recording) drop_decisions(trial);
  if (trial.best().recording)
    remove_chunks([&] { return trial.best().recording->steps.size(); },
                  [&](std::size_t first, std::size_t last) { drop_steps(trial, first, last); });
  remove_chunks([&] { return num_records(trial.best()); },
                [&](std::size_t first, std::size_t last) {
                  std::vector<bool> keep(num_records(trial.best()), true);
                  std::fill(keep.begin() + static_cast<std::ptrdiff_t>(first),
                            keep.begin() + static_cast<std::ptrdiff_t>(last), false);
                  trial.attempt(with_records(trial.best(), keep));
                });
  remove_each(trial, &SavedCase::faults);
  remove_each(trial, &SavedCase::mutants);
  for (std::size_t i = 0; i < trial.best().faults.size(); ++i) shrink_fault(trial, i);
}

}  // namespace lockstep
