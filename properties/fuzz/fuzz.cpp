#include "properties/fuzz/fuzz.h"

#include <fmt/core.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/check.h"
#include "base/parallel.h"
#include "properties/judge/failure.h"
#include "properties/judge/known_findings.h"
#include "reference/memory/content.h"

namespace lockstep {
namespace {

// Number of cases that reach every class: the rarest, an abort while preempted, 40 times without a
// backend and about 13 times with one.
constexpr std::int64_t kCasesToSeeAll = 10'000;

// What remains of a judged case.
struct Judged {
  Outcome outcome;
  std::string known;  // the id of the known failure; empty: a new failure
  std::uint64_t seed = 0;
};

Judged judge_seed(const FuzzOptions& options, std::uint64_t seed) {
  SavedCase saved = generate_case(seed, options.generator);
  if (!options.mutant.empty()) saved.mutants = {options.mutant};
  JudgeOptions judging;
  judging.backend = options.backend;
  judging.decisions = options.decisions;
  judging.conforms = options.conforms;
  Judged judged{.outcome = judge(saved, judging), .known = {}, .seed = seed};
  const KnownFinding* const finding = known_finding(saved, judged.outcome, judging);
  const auto of_user = std::ranges::find_if(options.known, [&](const KnownFailure& known) {
    return judged.outcome.failed() && known.check == judged.outcome.check &&
           judged.outcome.what.find(known.text) != std::string::npos;
  });
  if (finding != nullptr) {
    judged.known = fmt::format("{}. {}", finding->number, finding->title);
    judged.outcome.finding = finding->number;
  } else if (of_user != options.known.end()) {
    judged.known = of_user->id;
  }
  return judged;
}

// A sum: any order of cases gives the same hash.
void add_hash(StateHash& sum, std::uint64_t seed, const StateHash& hash) {
  sum.low += mix(hash.low ^ mix(seed));
  sum.high += mix(hash.high ^ mix(~seed));
}

void add_case(const Judged& judged, FuzzReport& report) {
  const Outcome& outcome = judged.outcome;
  ++report.cases;
  report.steps += outcome.steps;
  report.bytes_checked += outcome.bytes_checked;
  report.tally += outcome.tally;
  add_hash(report.state_hash, judged.seed, outcome.state_hash);
  if (outcome.kind == OutcomeKind::agreed) {
    ++report.agreed;
  } else if (outcome.kind == OutcomeKind::refused) {
    const std::size_t reason = outcome.what.rfind(" refuses ");  // npos: all of it
    report.refusals[bucket_of("refused", "", outcome.what.substr(reason + 1))].add(
        {.cases = 1, .first_seed = judged.seed});
    if (++report.refused == 1) {
      report.first_refused_seed = judged.seed;
      report.first_refusal = outcome.what;
    }
  } else if (!judged.known.empty()) {
    report.known[judged.known].add({.cases = 1, .first_seed = judged.seed});
  } else {
    report.failures.push_back({.seed = judged.seed,
                               .kind = outcome.kind,
                               .check = outcome.check,
                               .step = outcome.step,
                               .request = outcome.request,
                               .what = outcome.what,
                               .steps = outcome.steps});
  }
}

// Takes the results of judged cases in, in the order of their seeds.
class FuzzSession {
 public:
  FuzzSession(const FuzzOptions& options, const FuzzCallbacks& callbacks)
      : options_(options), callbacks_(callbacks) {}

  FuzzReport run() {
    report_.engine = options_.generator.engine;
    report_.decided_by = options_.decided_by;
    report_.worked_by = options_.worked_by;
    report_.backend = options_.generator.backend;
    report_.mutant = options_.mutant;
    report_.again = options_.again;
    report_.first_seed = options_.first_seed;
    report_.runs = options_.runs;
    report_.shard = options_.shard;
    report_.shards = options_.shards;
    const std::int64_t others = options_.shards - 1 - options_.shard;
    const std::int64_t cases = (options_.runs + others) / options_.shards;
    for_each_in_parallel(
        cases, options_.jobs, [this](std::int64_t index) { judge_case(index); }, callbacks_.go_on);
    LS_CHECK(waiting_.empty(), "{} cases are judged and not counted", waiting_.size());
    if (report_.shards == 1) report_.runs = report_.cases;
    return std::move(report_);
  }

 private:
  void judge_case(std::int64_t index) {
    const auto place = static_cast<std::uint64_t>(options_.shard + index * options_.shards);
    const std::uint64_t seed = options_.first_seed + place;
    if (callbacks_.starting) callbacks_.starting(seed);
    take(index, judge_seed(options_, seed));
  }

  void take(std::int64_t index, Judged judged) {
    const std::lock_guard lock(mutex_);
    waiting_.emplace(index, std::move(judged));
    while (!waiting_.empty() && waiting_.begin()->first == taken_) {
      const Judged& first = waiting_.begin()->second;
      const auto failures = report_.failures.size();
      add_case(first, report_);
      if (report_.failures.size() > failures)
        hand_out(first, callbacks_.failed);
      else if (first.outcome.finding > 0 && report_.known[first.known].cases == 1)
        hand_out(first, callbacks_.found);
      waiting_.erase(waiting_.begin());
      ++taken_;
    }
    if (callbacks_.progress) callbacks_.progress(report_.cases, std::ssize(report_.failures));
  }

  void hand_out(const Judged& judged,
                const std::function<void(const SavedCase&, const Outcome&)>& take) const {
    if (!take) return;
    SavedCase saved = generate_case(judged.seed, options_.generator);
    if (!options_.mutant.empty()) saved.mutants = {options_.mutant};
    take(saved, judged.outcome);
  }

  const FuzzOptions& options_;
  const FuzzCallbacks& callbacks_;
  std::mutex mutex_;
  FuzzReport report_;
  std::int64_t taken_ = 0;
  std::map<std::int64_t, Judged> waiting_;  // judged before one with a smaller seed
};

}  // namespace

std::vector<std::string_view> FuzzReport::missing_classes() const {
  if (shards != 1 || cases < kCasesToSeeAll || !engine.empty() || !mutant.empty()) return {};
  if (backend.find('.') != backend.npos) return {};  // a plugin's file: not every class is for it
  return tally.missing();
}

std::vector<std::string> FuzzReport::not_checked() const {
  std::vector<std::string> lines;
  if (backend == "none") lines.emplace_back("memory: no backend, decisions only");
  if (refused > 0) lines.push_back(fmt::format("refused cases: {}", refused));
  return lines;
}

std::string FuzzReport::again_with(std::uint64_t seed) const {
  return again.empty() ? "" : fmt::format("{} --seed {}", again, seed);
}

std::vector<FuzzBucket> FuzzReport::buckets() const {
  std::vector<FuzzBucket> found;
  for (const FuzzFailure& failure : failures) {
    const std::string name = bucket_of(failure.check, failure.request, failure.what);
    auto bucket = std::ranges::find(found, name, &FuzzBucket::name);
    if (bucket == found.end())
      bucket = found.insert(found.end(), {.name = name, .first = &failure, .smallest = &failure});
    ++bucket->cases;
    if (failure.steps < bucket->smallest->steps) bucket->smallest = &failure;
  }
  std::ranges::stable_sort(found, std::greater(), &FuzzBucket::cases);
  return found;
}

FuzzReport fuzz(const FuzzOptions& options, const FuzzCallbacks& callbacks) {
  LS_CHECK(options.shards >= 1 && options.shard >= 0 && options.shard < options.shards,
           "shard {} of {}", options.shard, options.shards);
  LS_CHECK(options.jobs >= 1 && options.runs >= 0, "{} jobs, {} runs", options.jobs, options.runs);
  return FuzzSession(options, callbacks).run();
}

Result<FuzzReport> merge_fuzz_reports(std::span<const FuzzReport> parts) {
  if (parts.empty()) return fail("no reports to merge");
  const FuzzReport& first = parts.front();
  std::vector<bool> seen(first.shards);
  FuzzReport whole;
  whole.engine = first.engine;
  whole.decided_by = first.decided_by;
  whole.worked_by = first.worked_by;
  whole.backend = first.backend;
  whole.mutant = first.mutant;
  whole.again = first.again;
  whole.first_seed = first.first_seed;
  whole.runs = first.runs;
  for (const FuzzReport& part : parts) {
    if (part.engine != whole.engine || part.worked_by != whole.worked_by ||
        part.backend != whole.backend || part.mutant != whole.mutant ||
        part.first_seed != whole.first_seed || part.runs != whole.runs ||
        part.shards != std::ssize(seen))
      return fail(
          "the reports are of different runs: engine, backend, mutant, seeds and number "
          "of shards must be equal");
    if (part.interrupted)
      return fail(fmt::format("shard {}/{} was interrupted after {} cases; run it again",
                              part.shard, part.shards, part.cases));
    if (seen[part.shard])
      return fail(fmt::format("shard {}/{} is there twice", part.shard, part.shards));
    seen[part.shard] = true;
    for (const auto& [name, count] : kFuzzCounts) whole.*count += part.*count;
    whole.tally += part.tally;
    for (const auto& [name, of_part] : part.known) whole.known[name].add(of_part);
    for (const auto& [reason, of_part] : part.refusals) whole.refusals[reason].add(of_part);
    whole.failures.insert(whole.failures.end(), part.failures.begin(), part.failures.end());
    whole.state_hash.low += part.state_hash.low;
    whole.state_hash.high += part.state_hash.high;
    if (part.refused > 0 &&
        (whole.refused == part.refused || part.first_refused_seed < whole.first_refused_seed)) {
      whole.first_refused_seed = part.first_refused_seed;
      whole.first_refusal = part.first_refusal;
    }
  }
  if (const auto missing = std::ranges::find(seen, false); missing != seen.end())
    return fail(fmt::format("shard {}/{} is missing", missing - seen.begin(), seen.size()));
  std::ranges::sort(whole.failures, {}, &FuzzFailure::seed);
  return whole;
}

}  // namespace lockstep
