#include "properties/shrink/shrinker.h"

#include <utility>

#include "properties/shrink/shrink_trial.h"

namespace lockstep {

// The end of a recording says why its engine failed; no recorded decision leads there.
static bool depends_on_decisions(const SavedCase& saved) {
  return saved.decide == Decides::model || !saved.recording ||
         saved.recording->end.failed_check.empty();
}

std::optional<ShrinkResult> shrink(const SavedCase& first, const StillFails& still_fails,
                                   const ShrinkOptions& options) {
  // As its file restores it: a field that a file does not keep could not be a cause.
  auto read = saved_case_from_text(first.name, saved_case_to_text(first));
  if (!read) return std::nullopt;
  SavedCase start = std::move(*read);
  // `expected` describes the first case; the caller that keeps the result sets it again.
  start.expected.reset();
  const std::optional<std::int64_t> steps = still_fails(start);
  if (!steps) return std::nullopt;
  ShrinkTrial trial(std::move(start), *steps, still_fails, options.evaluations_max,
                    options.progress);
  std::int64_t accepted = -1;
  while (accepted != trial.accepted() && !trial.is_exhausted()) {
    accepted = trial.accepted();
    if (!depends_on_decisions(trial.best())) break;
    shrink_records(trial);
    // Recorded decisions hold for the recorded prompts, cache and options.
    if (trial.best().decide == Decides::recording) continue;
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

namespace {

// 128 bits of a text: two candidates with equal ones count as the same.
std::pair<std::uint64_t, std::uint64_t> digest_of(const std::string& text) {
  std::uint64_t a = kEmptyPrefix;
  std::uint64_t b = ~kEmptyPrefix;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    a = mix(a ^ byte);
    b = mix(b + byte * kWordStep);
  }
  return {a, b};
}

}  // namespace

ShrinkTrial::ShrinkTrial(SavedCase first, std::int64_t steps, StillFails still_fails,
                         std::int64_t evaluations_max, ShrinkProgress progress)
    : best_(std::move(first)),
      steps_(steps),
      rank_(rank_of(best_, steps)),
      broken_rules_(broken_rules(best_)),
      still_fails_(std::move(still_fails)),
      evaluations_max_(evaluations_max),
      progress_(std::move(progress)) {}

// Steps are only known after a run: a candidate may only do without one if nothing before them is
// larger, and, where all before is equal, something behind them is smaller.
bool ShrinkTrial::could_be_smaller(const CaseRank& candidate) const {
  CaseRank at_best = candidate;
  at_best[kRankOfSteps] = rank_[kRankOfSteps];
  return at_best < rank_;
}

bool ShrinkTrial::attempt(const SavedCase& changed) {
  if (!could_be_smaller(rank_of(changed, 0))) return false;
  if ((broken_rules(changed) & ~broken_rules_) != 0) return false;
  const std::string text = saved_case_to_text(changed);
  // As its file restores it: it has no field that its kind of cache does not use, and runs that
  // continue one another are one.
  auto read = saved_case_from_text(changed.name, text);
  if (!read || !could_be_smaller(rank_of(*read, 0))) return false;
  SavedCase& candidate = *read;
  const auto digest = digest_of(text);
  auto tried = tried_.find(digest);
  if (tried == tried_.end()) {
    if (is_exhausted()) return false;
    ++evaluations_;
    tried = tried_.emplace(digest, still_fails_(candidate)).first;
    if (progress_) progress_(evaluations_, best_);
  }
  if (!tried->second) return false;
  const CaseRank rank = rank_of(candidate, *tried->second);
  if (!(rank < rank_)) return false;
  best_ = std::move(candidate);
  steps_ = *tried->second;
  rank_ = rank;
  ++accepted_;
  return true;
}

bool ShrinkTrial::lower_with(std::int64_t least, const std::function<std::int64_t(SavedCase&)>& get,
                             const std::function<void(SavedCase&, std::int64_t)>& set) {
  bool any = false;
  for (bool went = true; went;) {
    went = false;
    SavedCase now = best_;
    const std::int64_t value = get(now);
    for (std::int64_t gap = value - least; gap > 0 && !went; gap /= 2)
      went = attempt_with([&](SavedCase& saved) { set(saved, value - gap); });
    any |= went;
  }
  return any;
}

}  // namespace lockstep
