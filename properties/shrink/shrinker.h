// Shrinks a failing case to a small one that fails in the same way, by delta debugging. Whole
// requests go first, then layers and groups, prompts and outputs token by token, options, the pool,
// limits and times. Rounds repeat until a whole round changes nothing.
//
// Invariants
// (1) The result fails as the first case did: `still_fails` has returned steps for exactly this
//     case.
// (2) Unless the evaluations run out, no single part can be removed without losing the failure: no
//     request, run of a prompt, token, layer, group, option, fault or setting.
// (3) The same case, predicate and budget give the same result.
//
// With recorded decisions that are followed, only requests and steps are removed; the rest stays as
// recorded.
//
// Not tried: a different engine, and removals that lose the failure one by one but not together.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <type_traits>
#include <utility>

#include "base/stop_signal.h"
#include "properties/shrink/case_parts.h"
#include "reference/memory/content.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

// The state of a shrink: it holds the smallest failing case so far, and accepts a candidate only if
// it is smaller and also fails.
//
// Invariants
// (1) best() fails in the same way as the first case. Its rank only decreases.
// (2) No candidate is evaluated twice. Candidates that the reader or the engine would refuse are
//     not evaluated.
// (3) What is evaluated and kept is the candidate as its file restores it.
// (4) The same case, predicate and budget give the same candidates in the same order.

// Returns the steps that a case runs until it fails as the first case did, the failing one
// included. Nothing: it does not fail in that way. A failure after more than `steps_max` steps is
// useless, so the run may stop; 0: no limit. REQUIRES: the result depends only on case and limit.
using StillFails =
    std::function<std::optional<std::int64_t>(const SavedCase&, std::int64_t steps_max)>;
// Called after every evaluation, with their number and the smallest case so far.
using ShrinkProgress = std::function<void(std::int64_t evaluations, const SavedCase& best)>;

class ShrinkTrial {
 public:
  // REQUIRES: `first` fails in its step `steps` - 1, and its file restores it.
  ShrinkTrial(SavedCase first, std::int64_t steps, StillFails still_fails,
              std::int64_t evaluations_max, ShrinkProgress progress);

  // A copy: what a pass reads of it stays valid when attempt() accepts another case.
  SavedCase best() const { return best_; }
  std::int64_t steps() const { return steps_; }
  std::int64_t evaluations() const { return evaluations_; }
  std::int64_t accepted() const { return accepted_; }
  // The budget is spent, or a stop signal arrived.
  bool is_exhausted() const { return evaluations_ >= evaluations_max_ || stop_requested(); }

  // Evaluates the candidate, unless it cannot be smaller or was evaluated before. True: it is the
  // best case now.
  bool attempt(const SavedCase& changed);
  // Attempts the best case with a change.
  template <class Change>
  bool attempt_with(const Change& change) {
    SavedCase candidate = best_;
    change(candidate);
    return attempt(candidate);
  }
  // Lowers a number as far as possible, trying `least` first and then by halves: in the end the
  // number less one does not fail. `number` returns a pointer into the case that it receives.
  template <class Number>
  bool lower(std::int64_t least, const Number& number) {
    return lower_with(
        least, [&](SavedCase& saved) { return static_cast<std::int64_t>(*number(saved)); },
        [&](SavedCase& saved, std::int64_t value) {
          auto* place = number(saved);
          *place = static_cast<std::remove_pointer_t<decltype(place)>>(value);
        });
  }
  // The same for numbers that are not a single field. Takes a logarithmic number of evaluations per
  // accepted value.
  bool lower_with(std::int64_t least, const std::function<std::int64_t(SavedCase&)>& get,
                  const std::function<void(SavedCase&, std::int64_t)>& set);

 private:
  // Returns the steps that a smaller candidate may run; 0: any number.
  std::int64_t steps_max(const CaseRank& candidate) const;
  // True if a candidate with any number of steps could have a smaller rank than the best case.
  bool could_be_smaller(const CaseRank& candidate) const;

  SavedCase best_;
  std::int64_t steps_;
  CaseRank rank_;
  BrokenRules broken_rules_;  // rules that the first case breaks
  StillFails still_fails_;
  std::int64_t evaluations_max_;
  ShrinkProgress progress_;
  std::int64_t evaluations_ = 0;
  std::int64_t accepted_ = 0;
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::optional<std::int64_t>> tried_;
};

// The passes: ways of making a case smaller. A pass tries each of its changes once and leaves the
// best case in the trial; shrink() repeats them until none succeeds.

// Removes whole parts of the input: records by delta debugging, recorded steps, faults, mutants. A
// recording becomes the trace of its requests, if the failure permits it.
void shrink_records(ShrinkTrial& trial);
// Shortens prompts run by run and token by token, and outputs, and removes every other property of
// a request.
void shrink_requests(ShrinkTrial& trial);
// Moves arrivals together and to the start.
void shrink_arrivals(ShrinkTrial& trial);
// Removes groups and layers; lowers heads, elements, states, block sizes, windows and the pool.
void shrink_plan(ShrinkTrial& trial);
// Resets options to their defaults one by one, and lowers limits.
void shrink_options(ShrinkTrial& trial);
// Halves all counts of tokens at once: prompts, outputs, blocks, windows, limits.
void shrink_scale(ShrinkTrial& trial);

struct ShrinkOptions {
  // Limit on judged cases.
  std::int64_t evaluations_max = 20'000;
  ShrinkProgress progress;  // may be empty
};

struct ShrinkResult {
  SavedCase smallest;
  std::int64_t steps = 0;        // steps that it runs, the failing one included
  std::int64_t first_steps = 0;  // steps of the given case
  // Cases that were judged, the given one included.
  std::int64_t evaluations = 0;
  // Candidates that became the best case.
  std::int64_t accepted = 0;
  bool is_minimal = false;  // false: the evaluations ran out, or a stop signal arrived
};

// Shrinks the case. Nothing: the case does not fail in the first place, or its own file would be
// refused.
std::optional<ShrinkResult> shrink(const SavedCase& first, const StillFails& still_fails,
                                   const ShrinkOptions& options = {});

}  // namespace lockstep
