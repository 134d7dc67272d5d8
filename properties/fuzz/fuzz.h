// Fuzzing: judges many generated cases and summarises them in one report. Seed N gives the same
// case on every machine and in every shard, whatever the number of other cases.
//
// Invariants
// (1) The same options give the same report, byte for byte. It contains no times.
// (2) The reports of all shards of a run, and of runs with consecutive seeds, merge into the report
//     of the whole run, byte for byte. Guided runs are the exception: each shard guides itself.
// (3) A failure that docs/findings.md or the user lists is counted under its id. All others are
//     listed as new.
// (4) cases = agreed + refused + known cases + failures.
//
// Not handled: a case that crashes or hangs the process. FuzzCallbacks::starting reports which case
// a thread judges.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "properties/generate/generator.h"
#include "properties/generate/genes.h"
#include "properties/judge/judge.h"
#include "properties/judge/tally.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

struct FuzzOptions {
  GeneratorOptions generator = {.device_modes = true};
  std::string mutant{};  // planted in every case; empty: none
  BackendFactory backend{};
  // Absent: the model decides. Otherwise generator.engine must name the closest profile of that
  // engine.
  DecisionsFactory decisions{};
  AuditedRules rules = AuditedRules::all;
  std::string decided_by = {};        // name of the deciding engine; empty: the model
  std::string worked_by = {};         // name of the engine whose worker is `backend`; empty: none
  std::string again = {};             // the command that repeats a case, without --seed
  bool again_repeats = false;         // with a corpus: `again` repeats all failures by itself
  bool conforms = false;              // JudgeOptions::conforms
  std::vector<KnownFailure> known{};  // the user's list of failures to ignore, with the findings
  std::uint64_t first_seed = 1;
  std::int64_t runs = 1;   // cases: seeds first_seed .. first_seed + runs - 1
  std::int64_t shard = 0;  // index of this shard; it takes every `shards`-th seed
  std::int64_t shards = 1;
  // Threads; the report does not depend on it.
  int jobs = 1;
  // The first cases of the run. A shard judges its own share of them, but all of them guide it.
  std::vector<CaseGenes> corpus{};
  // Generates the cases after `corpus` from it: most are fresh, the others change cases that
  // reached something first (properties/fuzz/corpus.h). False: every case comes from its seed.
  bool guided = false;

  bool has_corpus() const { return guided || !corpus.empty(); }
};

// Maximum requests of a case with genes, in place of GeneratorOptions::requests_max. Longer traffic
// reaches more states per case, which a guided search can keep; it also costs more per case.
inline constexpr std::int64_t kRequestsOfCorpus = 40;

// A new failure, as a report lists it. The case itself is generated again from the seed.
struct FuzzFailure {
  std::uint64_t seed = 0;
  OutcomeKind kind = OutcomeKind::violation;
  std::string check;
  std::int64_t step = -1;
  std::string request;
  std::string what;
  std::int64_t steps = 0;  // steps that ran, the failing one included
  bool operator==(const FuzzFailure&) const = default;
};

// Failures with the same bucket name, which probably have one cause. The pointers refer to the
// report.
struct FuzzBucket {
  std::string name;  // from bucket_of()
  std::int64_t cases = 0;
  const FuzzFailure* first = nullptr;     // the smallest seed
  const FuzzFailure* smallest = nullptr;  // the fewest steps; among equals the smallest seed
};

// Cases that ran into one known failure, one refusal or one unchecked part.
struct KnownCases {
  std::int64_t cases = 0;
  // `first_seed` means nothing while `cases` is 0, so the first addition replaces it.
  std::uint64_t first_seed = 0;
  // All seeds of a refusal, ascending: a test per seed must know which ones nothing judged. Empty
  // for the others, and in reports of older releases.
  std::vector<std::uint64_t> seeds{};
  void add(const KnownCases& more) {
    if (cases == 0 || more.first_seed < first_seed) first_seed = more.first_seed;
    cases += more.cases;
    seeds.insert(seeds.end(), more.seeds.begin(), more.seeds.end());
    std::inplace_merge(seeds.begin(), seeds.end() - std::ssize(more.seeds), seeds.end());
  }
  bool operator==(const KnownCases&) const = default;
};

struct FuzzReport {
  std::string engine;      // empty: any
  std::string decided_by;  // empty: the model
  std::string worked_by;   // empty: no engine's own worker
  std::string backend;
  std::string mutant;
  std::string again;         // FuzzOptions::again; empty in reports of older releases
  bool guided = false;       // FuzzOptions::has_corpus(): no seed gives a case alone
  bool repeats = false;      // ... and `again` repeats all failures
  bool interrupted = false;  // stopped by a signal; read from a file, never written
  std::uint64_t first_seed = 1;
  std::int64_t runs = 0;  // planned cases of the whole run, all shards together
  std::int64_t shard = 0;
  std::int64_t shards = 1;
  // Cases judged by this report's shards.
  std::int64_t cases = 0;
  std::int64_t agreed = 0;
  std::int64_t refused = 0;
  std::uint64_t first_refused_seed = 0;  // 0 and empty while `refused` is 0
  std::string first_refusal;
  std::int64_t steps = 0;
  std::int64_t bytes_checked = 0;
  Tally tally;
  std::map<std::string, KnownCases> known;     // by finding, or by the user's id
  std::map<std::string, KnownCases> refusals;  // by reason, numbers replaced
  // What agreeing cases did not check: with a user's kernels, the lines of RunSummary::not_checked.
  std::map<std::string, KnownCases> left_out;
  // Seeds of judged cases that ran without the backend, ascending: the backend does not apply to
  // them. Empty if there is no backend, and in reports of older releases.
  std::vector<std::uint64_t> without_backend;
  std::vector<FuzzFailure> failures;  // ascending by seed
  StateHash state_hash;               // sum over all cases, so their order does not matter
  std::vector<CaseGenes> corpus{};    // the minimal corpus of a guided run; merged: the union
  bool operator==(const FuzzReport&) const = default;

  // Returns the classes of coverage that this many cases should have reached and did not. Empty for
  // fewer than 10,000 cases, for shards, for one engine, with a mutant and with a user's kernels:
  // such runs reach fewer classes by design.
  std::vector<std::string_view> missing_classes() const;
  // Describes what the agreeing cases do not show, one line each.
  std::vector<std::string> not_checked() const;
  // Returns the command that repeats one failure. A guided run repeats all cases up to the failing
  // one, because each depends on the previous ones. Empty: the report has no command.
  std::string again_with(std::uint64_t seed) const;
  // Groups the failures, the most frequent bucket first. REQUIRES: `failures` outlives the result.
  std::vector<FuzzBucket> buckets() const;
};

// Counts of a report with their keys in JSON, in the order of the file.
inline constexpr std::pair<std::string_view, std::int64_t FuzzReport::*> kFuzzCounts[] = {
    {"cases", &FuzzReport::cases},
    {"agreed", &FuzzReport::agreed},
    {"refused", &FuzzReport::refused},
    {"steps", &FuzzReport::steps},
    {"bytes_checked", &FuzzReport::bytes_checked}};

// Called during the run. All but `starting` and `go_on` are called under a lock, one at a time.
struct FuzzCallbacks {
  // Called before each case; false: stop; absent: never.
  std::function<bool()> go_on;
  std::function<void(std::uint64_t seed)> starting;                         // in the judging thread
  std::function<void(std::int64_t cases, std::int64_t failures)> progress;  // after each case
  std::function<void(const SavedCase& saved, const Outcome& outcome)> failed;  // in seed order
  // The first case of each finding of docs/findings.md, in seed order among the failing ones.
  std::function<void(const SavedCase& saved, const Outcome& outcome)> found;
};

// Judges the cases. It stops early when go_on returns false; `runs` of an unsharded report is then
// the number of cases that were judged. A shard that stopped early must not be merged. REQUIRES: 0
// <= shard < shards, jobs >= 1, runs >= 0.
FuzzReport fuzz(const FuzzOptions& options, const FuzzCallbacks& callbacks = {});

// Merges reports into that of the whole run. Errors: reports of different runs, a missing or
// duplicate shard or seed, an interrupted or incomplete run.
Result<FuzzReport> merge_fuzz_reports(std::span<const FuzzReport> parts);

std::string fuzz_report_to_json(const FuzzReport& report);  // one line, keys in a fixed order
// Reads a report. Errors: not a report of this version, unknown keys, counts that do not add up, or
// more than one report in the file.
Result<FuzzReport> read_fuzz_report(const std::string& path);

}  // namespace lockstep
