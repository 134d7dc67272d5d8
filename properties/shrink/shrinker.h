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

// One smaller case after the other is tried: the trial holds the smallest that still fails, and
// takes another only when it is smaller and fails too.
//
// Invariants
// (1) best() fails the same way as the first case, always; its rank only goes down.
// (2) A candidate that the reader or the engine would refuse, or that would not come back equal
//     from its file, is never tried; neither is one twice.
// (3) The same case, predicate and budget: the same candidates in the same order.

// Steps that a case runs until it fails as the first case did, the failing one included; nothing:
// it does not fail so. REQUIRES: a function of the case alone.
using StillFails = std::function<std::optional<std::int64_t>(const SavedCase&)>;
// After every evaluation: how many there were, and the smallest case.
using ShrinkProgress = std::function<void(std::int64_t evaluations, const SavedCase& best)>;

class ShrinkTrial {
 public:
  // REQUIRES: `first` fails in its step `steps` - 1.
  ShrinkTrial(SavedCase first, std::int64_t steps, StillFails still_fails,
              std::int64_t evaluations_max, ShrinkProgress progress);

  // A copy: what a pass reads of it stays valid when attempt() takes another.
  SavedCase best() const { return best_; }
  std::int64_t steps() const { return steps_; }
  std::int64_t evaluations() const { return evaluations_; }
  std::int64_t accepted() const { return accepted_; }
  bool is_exhausted() const { return evaluations_ >= evaluations_max_ || stop_requested(); }

  // True: the candidate is the best now.
  bool attempt(const SavedCase& changed);
  // The best case with a change.
  template <class Change>
  bool attempt_with(const Change& change) {
    SavedCase candidate = best_;
    change(candidate);
    return attempt(candidate);
  }
  // Brings a number down as far as it goes, `least` first: in the end the number less one does not
  // fail. `number` points into the case that it is given.
  template <class Number>
  bool lower(std::int64_t least, const Number& number) {
    return lower_with(
        least, [&](SavedCase& saved) { return static_cast<std::int64_t>(*number(saved)); },
        [&](SavedCase& saved, std::int64_t value) {
          auto* place = number(saved);
          *place = static_cast<std::remove_pointer_t<decltype(place)>>(value);
        });
  }
  bool lower_with(std::int64_t least, const std::function<std::int64_t(SavedCase&)>& get,
                  const std::function<void(SavedCase&, std::int64_t)>& set);

 private:
  bool could_be_smaller(const CaseRank& candidate) const;

  SavedCase best_;
  std::int64_t steps_;
  CaseRank rank_;
  BrokenRules broken_rules_;  // of the first case
  StillFails still_fails_;
  std::int64_t evaluations_max_;
  ShrinkProgress progress_;
  std::int64_t evaluations_ = 0;
  std::int64_t accepted_ = 0;
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::optional<std::int64_t>> tried_;
};

// The passes: the ways in which a case is made smaller. A pass tries what it knows once through and
// leaves the best case behind; shrink() goes round them until none gets anywhere.

// Whole parts of the input: records by delta debugging, recorded steps, faults, mutants; a
// recording as the trace of its requests.
void shrink_records(ShrinkTrial& trial);
// Prompts run by run and token by token, outputs, and every other property of a request.
void shrink_requests(ShrinkTrial& trial);
// When things arrive: together, and at the start.
void shrink_arrivals(ShrinkTrial& trial);
// Groups, layers, heads, elements, states, blocks and their sizes, windows, the pool.
void shrink_plan(ShrinkTrial& trial);
// Options to their defaults one by one, limits down.
void shrink_options(ShrinkTrial& trial);
// All counts of tokens at once, by half: prompts, outputs, blocks, windows, limits.
void shrink_scale(ShrinkTrial& trial);

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
