// Fuzzing: many generated cases, judged, and one report. Seed N is one case, wherever and with how
// many others it runs.
//
// (1) The same options give the same report, byte for byte: times are not in it.
// (2) Reports of all shards of a run, and of runs of consecutive seeds, merge into the report of
//     the whole run, byte for byte.
// (3) A failure that docs/findings.md tells of, or the user, is counted there; every other one is
//     listed.
#pragma once

#include <cstdint>
#include <functional>
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
  std::string mutant;  // planted in every case; empty: none
  BackendFactory backend;
  // Absent: the model's. Of another engine, that generator.engine is the profile of.
  DecisionsFactory decisions;
  std::string decided_by = {};      // its name; empty: the model
  std::string worked_by = {};       // whose worker `backend` is; empty: no engine's
  std::string again = {};           // the command that repeats a case, less its --seed
  bool again_repeats = false;       // with a corpus: it repeats all failures as it is
  bool conforms = false;            // JudgeOptions::conforms
  std::vector<KnownFailure> known;  // to the user, besides the findings
  std::uint64_t first_seed = 1;
  std::int64_t runs = 1;   // seeds first_seed .. first_seed + runs - 1
  std::int64_t shard = 0;  // of `shards`: the seeds at places shard, shard + shards, ...
  std::int64_t shards = 1;
  int jobs = 1;
  // The first cases of the run; of a shard every N-th, but the shard is guided by all of them.
  std::vector<CaseGenes> corpus{};
  // The cases after them: most are new, the others change cases that reached something
  // first (properties/fuzz/corpus.h). False: seeds.
  bool guided = false;

  bool has_corpus() const { return guided || !corpus.empty(); }
};

// Most requests of a case with genes, in place of GeneratorOptions::requests_max: longer traffic
// reaches more, and costs more per case.
inline constexpr std::int64_t kRequestsOfCorpus = 40;

struct FuzzFailure {
  std::uint64_t seed = 0;
  OutcomeKind kind = OutcomeKind::violation;
  std::string check;
  std::int64_t step = -1;
  std::string request;
  std::string what;
  std::int64_t steps = 0;  // that were run
  bool operator==(const FuzzFailure&) const = default;
};

// Failures that look like one bug.
struct FuzzBucket {
  std::string name;  // bucket_of() them
  std::int64_t cases = 0;
  const FuzzFailure* first = nullptr;     // by seed
  const FuzzFailure* smallest = nullptr;  // of the fewest steps
};

// Cases that ran into something that is known.
struct KnownCases {
  std::int64_t cases = 0;
  std::uint64_t first_seed = 0;
  void add(const KnownCases& more) {
    if (cases == 0 || more.first_seed < first_seed) first_seed = more.first_seed;
    cases += more.cases;
  }
  bool operator==(const KnownCases&) const = default;
};

struct FuzzReport {
  std::string engine;      // empty: any
  std::string decided_by;  // empty: the model
  std::string worked_by;   // empty: no engine's own worker
  std::string backend;
  std::string mutant;
  std::string again;         // as in FuzzOptions; empty in reports of older releases
  bool guided = false;       // the cases of a corpus, or a guided run: no seed alone gives a case
  bool repeats = false;      // ... `again` repeats all failures
  bool interrupted = false;  // by a signal: read from a file, and not written
  std::uint64_t first_seed = 1;
  std::int64_t runs = 0;  // of the whole run, all shards together
  std::int64_t shard = 0;
  std::int64_t shards = 1;
  std::int64_t cases = 0;
  std::int64_t agreed = 0;
  std::int64_t refused = 0;
  std::uint64_t first_refused_seed = 0;  // with refused > 0
  std::string first_refusal;
  std::int64_t steps = 0;
  std::int64_t bytes_checked = 0;
  Tally tally;
  std::map<std::string, KnownCases> known;     // by finding, or by the user's id
  std::map<std::string, KnownCases> refusals;  // by reason, without its numbers
  // Of a user's kernels: what cases that agreed left out, by RunSummary's sentences.
  std::map<std::string, KnownCases> left_out;
  std::vector<FuzzFailure> failures;  // by seed
  StateHash state_hash;               // of all cases, whatever their order
  std::vector<CaseGenes> corpus{};    // the minimal one of a guided run
  bool operator==(const FuzzReport&) const = default;

  // Classes that this number of cases should have reached; empty for shards and narrowed runs.
  std::vector<std::string_view> missing_classes() const;
  // What the cases that agreed do not show, a line each.
  std::vector<std::string> not_checked() const;
  std::string again_with(std::uint64_t seed) const;
  // The most cases first. REQUIRES: `failures` outlive them.
  std::vector<FuzzBucket> buckets() const;
};

// Its counts by their keys in JSON, in the order of the file.
inline constexpr std::pair<std::string_view, std::int64_t FuzzReport::*> kFuzzCounts[] = {
    {"cases", &FuzzReport::cases},
    {"agreed", &FuzzReport::agreed},
    {"refused", &FuzzReport::refused},
    {"steps", &FuzzReport::steps},
    {"bytes_checked", &FuzzReport::bytes_checked}};

struct FuzzCallbacks {
  std::function<bool()> go_on;                       // asked before each case; absent: yes
  std::function<void(std::uint64_t seed)> starting;  // in the thread that judges it
  std::function<void(std::int64_t cases, std::int64_t failures)> progress;     // one at a time
  std::function<void(const SavedCase& saved, const Outcome& outcome)> failed;  // in seed order
  // The first case of each finding of docs/findings.md, among the failed ones in seed order.
  std::function<void(const SavedCase& saved, const Outcome& outcome)> found;
};

// Ends early when go_on says no; `runs` of an unsharded report is then what was run. A shard that
// ended early must not be merged.
FuzzReport fuzz(const FuzzOptions& options, const FuzzCallbacks& callbacks = {});

// Refused: reports of different runs, a shard or seed twice or missing, an interrupted run.
Result<FuzzReport> merge_fuzz_reports(std::span<const FuzzReport> parts);

std::string fuzz_report_to_json(const FuzzReport& report);  // one line
Result<FuzzReport> read_fuzz_report(const std::string& path);

}  // namespace lockstep
