#include "properties/fuzz/fuzz.h"

#include <fmt/core.h>

#include <mutex>

#include "base/check.h"
#include "base/json_fields.h"
#include "base/line_reader.h"
#include "base/number_text.h"
#include "base/parallel.h"
#include "properties/fuzz/corpus.h"
#include "properties/judge/failure.h"
#include "properties/judge/known_findings.h"
#include "reference/memory/content.h"

namespace lockstep {
namespace {

// Cases after which every class should have been reached. The rarest, an abort while preempted,
// occurs about 40 times in that many cases without a backend and about 13 times with one.
constexpr std::int64_t kCasesToSeeAll = 10'000;

// Cases of a guided run that see the same state of the corpus. A smaller batch guides sooner, a
// larger one keeps more threads busy.
constexpr std::int64_t kBatch = 32;

// Shards below runs % shards judge one case more: with 10 cases and 4 shards, 3, 3, 2 and 2.
std::int64_t cases_of_shard(std::int64_t runs, std::int64_t shard, std::int64_t shards) {
  return runs <= shard ? 0 : (runs - 1 - shard) / shards + 1;
}

// What a judged case leaves for the report.
struct Judged {
  Outcome outcome;
  std::vector<std::string> left_out;
  bool lacks_backend = false;  // ran without FuzzOptions::backend
  std::string known;           // id of the known failure; empty: new, or no failure
  std::uint64_t seed = 0;
  SavedCase saved{};      // only of a failure
  JudgedGenes reached{};  // only with genes
};

// Generates and judges one case, and identifies a known failure. Thread-safe. `genes`: null if the
// seed gives the case.
Judged judge_case(const FuzzOptions& options, std::uint64_t seed, const CaseGenes* genes) {
  std::vector<DrawnChoice> drawn;
  SavedCase saved;
  if (genes == nullptr) {
    saved = generate_case(seed, options.generator);
  } else {
    GeneratorOptions longer = options.generator;
    longer.requests_max = kRequestsOfCorpus;
    saved = generate_case(*genes, longer, &drawn);
  }
  saved.name = fmt::format("seed-{}", seed);
  if (!options.mutant.empty()) saved.mutants = {options.mutant};
  JudgeOptions judging;
  judging.backend = options.backend;
  judging.decisions = options.decisions;
  judging.conforms = options.conforms;
  judging.rules = options.rules;
  MarkCollector marks(saved);
  if (genes != nullptr) judging.marks = &marks;
  RunSummary summary;
  // Only a user's kernels and engine may leave parts of an agreeing case unchecked.
  const bool has_kernels = is_user_kernels(saved.backend);
  if (has_kernels || options.decisions) judging.summary = &summary;
  Judged judged{.outcome = judge(saved, judging), .left_out = {}, .known = {}, .seed = seed};
  judged.lacks_backend = options.backend && judged.outcome.kind != OutcomeKind::refused &&
                         judged.outcome.tally[Reached::with_backend] == 0;
  judged.left_out = has_kernels && !judged.lacks_backend ? summary.not_checked : summary.unreported;
  if (judging.summary != nullptr && summary.request_steps == 0)
    judged.left_out.emplace_back("no request was scheduled");
  if (options.rules == AuditedRules::memory)
    judged.left_out.emplace_back("rules about policy (--audit-policy off)");
  // Identifying a finding judges the case again, with repairs; those runs must not add marks.
  judging.marks = nullptr;
  judging.summary = nullptr;
  const KnownFinding* const finding = known_finding(saved, judged.outcome, judging);
  const auto of_user = std::ranges::find_if(options.known, [&](const KnownFailure& known) {
    return judged.outcome.failed() && known.check == judged.outcome.check &&
           judged.outcome.what.find(known.text) != std::string::npos;
  });
  // A finding takes precedence over the user's list: its number is more specific than a text.
  if (finding != nullptr) {
    judged.known = fmt::format("{}. {}", finding->number, finding->title);
    judged.outcome.finding = finding->number;
  } else if (of_user != options.known.end()) {
    judged.known = of_user->id;
  }
  const Outcome& outcome = judged.outcome;
  if (genes != nullptr) {
    // The failure is a mark too. Failures of one bucket share it, so that a frequent failure does
    // not fill the corpus.
    const std::string failure = !outcome.failed() ? std::string()
                                : judged.known.empty()
                                    ? bucket_of(outcome.check, outcome.request, outcome.what)
                                    : judged.known;
    judged.reached = {.genes = *genes,
                      .drawn = std::move(drawn),
                      .marks = marks.finish(outcome.tally, failure),
                      .failed = outcome.kind != OutcomeKind::agreed};
  }
  if (outcome.failed()) judged.saved = std::move(saved);
  return judged;
}

// Adds a case's hash to the sum. The seed is mixed in: two cases that exchange their results change
// the sum.
void add_hash(StateHash& sum, std::uint64_t seed, const StateHash& hash) {
  sum.low += mix(hash.low ^ mix(seed));
  sum.high += mix(hash.high ^ mix(~seed));
}

// Counts a judged case in the report. Must be called in seed order: failures and first refusals
// keep that order.
void add_case(const Judged& judged, FuzzReport& report) {
  const Outcome& outcome = judged.outcome;
  ++report.cases;
  report.steps += outcome.steps;
  report.bytes_checked += outcome.bytes_checked;
  report.tally += outcome.tally;
  add_hash(report.state_hash, judged.seed, outcome.state_hash);
  if (judged.lacks_backend) report.without_backend.push_back(judged.seed);
  if (outcome.kind == OutcomeKind::agreed) {
    ++report.agreed;
    for (const std::string& sentence : judged.left_out)
      // bucket_of() starts with the check and ": "; the empty check leaves those two characters.
      report.left_out[bucket_of("", "", sentence).substr(2)].add(
          {.cases = 1, .first_seed = judged.seed});
  } else if (outcome.kind == OutcomeKind::refused) {
    // npos + 1 is 0: without that word, the whole text is the reason
    const std::size_t reason = outcome.what.rfind(" refuses ");
    report.refusals[bucket_of("refused", "", outcome.what.substr(reason + 1))].add(
        {.cases = 1, .first_seed = judged.seed, .seeds = {judged.seed}});
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

// One run. Threads judge cases in any order; take() counts them in seed order.
//
// Invariants
// (1) Cases below taken_ are counted; waiting_ holds judged cases above it.
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
    report_.guided = options_.has_corpus();
    report_.repeats = options_.again_repeats;
    report_.first_seed = options_.first_seed;
    report_.runs = options_.runs;
    report_.shard = options_.shard;
    report_.shards = options_.shards;
    const std::int64_t cases = cases_of_shard(options_.runs, options_.shard, options_.shards);
    if (options_.guided)
      run_guided(cases);
    else
      run_cases(0, cases);
    LS_CHECK(waiting_.empty(), "{} cases are judged and not counted", waiting_.size());
    if (options_.has_corpus()) report_.corpus = corpus_.minimal();
    // Of a shard, `runs` must stay that of the whole run: merging checks it.
    if (report_.shards == 1) report_.runs = report_.cases;
    return std::move(report_);
  }

 private:
  // Judges the cases with the indexes [first, end) of this shard.
  void run_cases(std::int64_t first, std::int64_t end) {
    for_each_in_parallel(
        end - first, options_.jobs, [&](std::int64_t index) { run_case(first + index); },
        callbacks_.go_on);
  }

  // Adds the corpus cases of the other shards to corpus_ without counting them. Every shard must
  // start from the same corpus, so each pays for judging all of it.
  void read_others() {
    const auto size = std::min(std::ssize(options_.corpus), options_.runs);
    for (std::int64_t place = 0; place < size; ++place) {
      if (place % options_.shards == options_.shard) continue;
      const auto seed = options_.first_seed + static_cast<std::uint64_t>(place);
      const CaseGenes& genes = options_.corpus[static_cast<std::size_t>(place)];
      corpus_.add(std::move(judge_case(options_, seed, &genes).reached));
    }
  }

  // Judges in batches. Each batch changes cases of the previous batches only, so the number of
  // threads does not affect the result.
  void run_guided(std::int64_t cases) {
    read_others();
    while (taken_ < cases) {
      const std::int64_t first = taken_;
      const std::int64_t end = std::min(cases, first + kBatch);
      corpus_.settle();
      run_cases(first, end);
      // The caller stopped the run inside the batch.
      if (taken_ < end) break;
    }
  }

  // Judges one case. `index` counts this shard's cases, `place` those of the whole run.
  void run_case(std::int64_t index) {
    const auto place = static_cast<std::uint64_t>(options_.shard + index * options_.shards);
    const std::uint64_t seed = options_.first_seed + place;
    if (callbacks_.starting) callbacks_.starting(seed);
    std::optional<CaseGenes> genes;
    if (place < options_.corpus.size())
      genes = options_.corpus[place];
    else if (options_.guided) {
      const std::lock_guard lock(mutex_);  // take() of another thread adds to the corpus
      genes = corpus_.next(seed);
    }
    take(index, judge_case(options_, seed, genes ? &*genes : nullptr));
  }

  // Counts a judged case as soon as all earlier ones are counted. A slow case delays the others, so
  // waiting_ may hold up to one case per thread, or more while a very slow one runs.
  void take(std::int64_t index, Judged judged) {
    const std::lock_guard lock(mutex_);
    waiting_.emplace(index, std::move(judged));
    while (!waiting_.empty() && waiting_.begin()->first == taken_) {
      Judged& first = waiting_.begin()->second;
      const auto failures = report_.failures.size();
      add_case(first, report_);
      // Every new failure is passed on, but only the first case of a known finding.
      if (report_.failures.size() > failures)
        hand_out(first, callbacks_.failed);
      else if (first.outcome.finding > 0 && report_.known[first.known].cases == 1)
        hand_out(first, callbacks_.found);
      if (options_.has_corpus()) corpus_.add(std::move(first.reached));
      waiting_.erase(waiting_.begin());
      ++taken_;
    }
    if (callbacks_.progress) callbacks_.progress(report_.cases, std::ssize(report_.failures));
  }

  void hand_out(const Judged& judged,
                const std::function<void(const SavedCase&, const Outcome&)>& take) const {
    if (take) take(judged.saved, judged.outcome);
  }

  // Outlive the session: fuzz() holds both.
  const FuzzOptions& options_;
  const FuzzCallbacks& callbacks_;
  std::mutex mutex_;
  FuzzReport report_;
  Corpus corpus_;
  std::int64_t taken_ = 0;
  std::map<std::int64_t, Judged> waiting_;  // judged, with an earlier one pending
};

}  // namespace

std::vector<std::string_view> FuzzReport::missing_classes() const {
  if (shards != 1 || cases < kCasesToSeeAll || !engine.empty() || !mutant.empty()) return {};
  // A plugin's file, or module:Class: some classes cannot occur.
  if (backend.find_first_of(".:") != backend.npos) return {};
  return tally.missing();
}

std::vector<std::string> FuzzReport::not_checked() const {
  std::vector<std::string> lines;
  if (backend == "none") lines.emplace_back("memory: no backend, decisions only");
  if (!without_backend.empty())
    lines.push_back(fmt::format("memory of {} that ran without the backend, first with seed {}",
                                counted(std::ssize(without_backend), "case"),
                                without_backend.front()));
  if (refused > 0) lines.push_back(fmt::format("refused cases: {}", refused));
  for (const auto& [sentence, of] : left_out)
    lines.push_back(fmt::format("{}: {}, first with seed {}", sentence, counted(of.cases, "case"),
                                of.first_seed));
  return lines;
}

std::string FuzzReport::again_with(std::uint64_t seed) const {
  if (again.empty() || repeats) return again;
  // A case of a guided run depends on all cases before it.
  if (guided)
    return fmt::format("{} --seed {} --runs {}", again, first_seed, seed - first_seed + 1);
  return fmt::format("{} --seed {}", again, seed);
}

std::vector<FuzzBucket> FuzzReport::buckets() const {
  std::vector<FuzzBucket> found;
  for (const FuzzFailure& failure : failures) {
    const std::string name = bucket_of(failure.check, failure.request, failure.what);
    auto bucket = std::ranges::find(found, name, &FuzzBucket::name);
    if (bucket == found.end())
      bucket = found.insert(found.end(), {.name = name, .first = &failure, .smallest = &failure});
    ++bucket->cases;
    // Strictly fewer steps: among equals the smaller seed stays, because failures are sorted by
    // seed.
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

// Checks that the reports, sorted by first seed and shard, are complete: every shard of a run is
// present once, and each run starts at the seed after the previous run's last one.
static Result<void> check_complete(std::span<const FuzzReport> sorted) {
  for (std::size_t i = 0; i < sorted.size();) {
    const FuzzReport& run = sorted[i];
    const auto shard_text = [&](std::int64_t shard) {
      return fmt::format("shard {}/{} from seed {}", shard, run.shards, run.first_seed);
    };
    if (i > 0 && run.first_seed == sorted[i - 1].first_seed)
      return fail(fmt::format("{} occurs twice", shard_text(run.shard)));
    // Merged runs must be consecutive: seeds 1 to 100 and 201 to 300 are not one run.
    if (i > 0 && run.first_seed != sorted[i - 1].first_seed + sorted[i - 1].runs)
      return fail(fmt::format("seeds between two reports are missing, before {}", run.first_seed));
    for (std::int64_t shard = 0; shard < run.shards; ++shard, ++i) {
      if (i == sorted.size() || sorted[i].first_seed != run.first_seed || sorted[i].shard > shard)
        return fail(fmt::format("{} is missing", shard_text(shard)));
      if (sorted[i].shard < shard)
        return fail(fmt::format("{} occurs twice", shard_text(sorted[i].shard)));
      if (sorted[i].runs != run.runs || sorted[i].shards != run.shards)
        return fail("the reports are of different runs: numbers of cases and shards differ");
    }
  }
  return {};
}

// Later reports are compared with the first one in seed order. Its `again` command is kept: the
// parts were started by the same command with different seeds.
Result<FuzzReport> merge_fuzz_reports(std::span<const FuzzReport> parts) {
  if (parts.empty()) return fail("no reports to merge");
  std::vector<FuzzReport> sorted(parts.begin(), parts.end());
  std::ranges::sort(sorted, {},
                    [](const FuzzReport& part) { return std::pair(part.first_seed, part.shard); });
  for (const FuzzReport& part : sorted)
    if (part.interrupted)
      return fail(fmt::format("shard {}/{} was interrupted after {} cases; run it again",
                              part.shard, part.shards, part.cases));
  LS_RETURN_IF_ERROR(check_complete(sorted));
  for (const FuzzReport& part : sorted)
    if (const std::int64_t cases = cases_of_shard(part.runs, part.shard, part.shards);
        part.cases != cases)
      return fail("shard {}/{} from seed {} has {} of its {} cases; run it again", part.shard,
                  part.shards, part.first_seed, part.cases, cases);
  const FuzzReport& first = sorted.front();
  FuzzReport whole;
  whole.engine = first.engine;
  whole.decided_by = first.decided_by;
  whole.worked_by = first.worked_by;
  whole.backend = first.backend;
  whole.mutant = first.mutant;
  whole.again = first.again;
  whole.guided = first.guided;
  whole.repeats = first.repeats;
  whole.first_seed = first.first_seed;
  for (const FuzzReport& part : sorted) {
    if (part.engine != whole.engine || part.decided_by != whole.decided_by ||
        part.worked_by != whole.worked_by || part.backend != whole.backend ||
        part.mutant != whole.mutant || part.guided != whole.guided)
      return fail(
          "the reports are of different runs: engine, decisions, worker, backend, mutant or guided "
          "differs");
    whole.corpus = merged_corpora(whole.corpus, part.corpus);
    // All shards of a run carry the same `runs`.
    if (part.shard == 0) whole.runs += part.runs;
    for (const auto& [name, count] : kFuzzCounts) whole.*count += part.*count;
    whole.tally += part.tally;
    for (const auto& [name, of_part] : part.known) whole.known[name].add(of_part);
    for (const auto& [reason, of_part] : part.refusals) whole.refusals[reason].add(of_part);
    for (const auto& [sentence, of_part] : part.left_out) whole.left_out[sentence].add(of_part);
    whole.failures.insert(whole.failures.end(), part.failures.begin(), part.failures.end());
    whole.without_backend.insert(whole.without_backend.end(), part.without_backend.begin(),
                                 part.without_backend.end());
    whole.state_hash.low += part.state_hash.low;
    whole.state_hash.high += part.state_hash.high;
    // `whole.refused` already includes this part, so equality means that it is the first with a
    // refusal.
    if (part.refused > 0 &&
        (whole.refused == part.refused || part.first_refused_seed < whole.first_refused_seed)) {
      whole.first_refused_seed = part.first_refused_seed;
      whole.first_refusal = part.first_refusal;
    }
  }
  std::ranges::sort(whole.failures, {}, &FuzzFailure::seed);
  std::ranges::sort(whole.without_backend);
  return whole;
}

// The report of a fuzz run as one line of JSON, and back.

namespace {

// Version of the JSON format. A reader refuses other versions.
constexpr std::int64_t kReportVersion = 2;

// Only failures are listed with a kind; `agreed` and `refused` cases are counts.
constexpr JsonWord<OutcomeKind> kKinds[] = {{"divergence", OutcomeKind::divergence},
                                            {"violation", OutcomeKind::violation},
                                            {"stuck", OutcomeKind::stuck},
                                            {"harness", OutcomeKind::harness}};
constexpr form::Between kCount{0, INT64_MAX};
constexpr form::AnyText kText;

// The genes of a case as text. A bad line of genes is reported at its position in the report.
struct GenesText {
  static void read(JsonValue value, CaseGenes& genes) {
    auto found = genes_from_text("corpus", value.string(), 1);
    if (!found) return value.refuse_because(found.error().message);
    genes = std::move(*found);
  }
  static void write(JsonWriter& out, const CaseGenes& genes) { out.string(genes_to_text(genes)); }
};

}  // namespace

// Every class of coverage must be present: a report of a release with other classes is refused
// rather than merged wrongly.
template <class Io>
void fields(Io& io, FieldsOf<Io, Tally>& tally) {
  for (std::size_t i = 0; i < kNumReached; ++i) {
    const auto reached = static_cast<Reached>(i);
    std::int64_t times = tally[reached];
    io.required(name_of(reached), times, kCount);
    if constexpr (Io::kReads) tally.count(reached, times);
  }
}

// An entry with 0 cases is refused: the writer never has one.
template <class Io>
void fields(Io& io, FieldsOf<Io, KnownCases>& known) {
  io.required("cases", known.cases, form::Between{1, INT64_MAX});
  io.required("first_seed", known.first_seed, form::Unsigned{});
  io.optional("seeds", known.seeds, form::Each<form::Unsigned>{});
}

// Reports of older releases have no `steps`.
template <class Io>
void fields(Io& io, FieldsOf<Io, FuzzFailure>& failure) {
  io.required("seed", failure.seed, form::Unsigned{});
  io.required("kind", failure.kind, form::Word<OutcomeKind>{kKinds});
  io.required("check", failure.check, kText);
  io.required("step", failure.step, form::Between{-1, INT64_MAX});
  io.required("request", failure.request, kText);
  io.required("what", failure.what, kText);
  io.defaulted("steps", failure.steps, kCount);
}

static void write_buckets(JsonWriter& out, const FuzzReport& report) {
  out.each(report.buckets(), [&](const FuzzBucket& bucket) {
    out.begin_object().string("bucket", bucket.name).integer("cases", bucket.cases);
    out.key("first_seed").uint64(bucket.first->seed);
    out.key("smallest_seed").uint64(bucket.smallest->seed).end_object();
  });
}

template <class Io>
void fields(Io& io, FieldsOf<Io, FuzzReport>& report) {
  io.constant("lockstep_fuzz", kReportVersion);
  io.required("engine", report.engine, kText);
  io.optional("decided_by", report.decided_by, kText);
  io.optional("worked_by", report.worked_by, kText);
  io.required("backend", report.backend, kText);
  io.required("mutant", report.mutant, kText);
  io.required("first_seed", report.first_seed, form::Unsigned{});
  io.optional("again", report.again, kText);
  if constexpr (Io::kReads) io.optional("interrupted", report.interrupted);
  io.optional("guided", report.guided);
  if (Io::kReads || report.guided) io.defaulted("repeats", report.repeats);
  io.required("runs", report.runs, kCount);
  io.required("shards", report.shards, form::Between{1, 1 << 20});
  // A shard number of the file is below `shards`, as fuzz() requires.
  io.required("shard", report.shard, form::Between{0, report.shards - 1});
  for (const auto& [name, count] : kFuzzCounts) {
    io.required(name, report.*count, kCount);
    if (count != &FuzzReport::refused) continue;
    io.required("first_refused_seed", report.first_refused_seed, form::Unsigned{});
    io.required("first_refusal", report.first_refusal, kText);
  }
  io.required("state_hash", report.state_hash,
              form::Pair<form::Unsigned, form::Unsigned>{"two numbers"});
  io.required("tally", report.tally);
  io.required("known", report.known, form::ById<>{});
  io.defaulted("refusals", report.refusals, form::ById<>{});
  io.optional("left_out", report.left_out, form::ById<>{});
  io.optional("without_backend", report.without_backend, form::Each<form::Unsigned>{});
  io.required("failures", report.failures);
  if constexpr (!Io::kReads) write_buckets(io.out.key("buckets"), report);
  if (Io::kReads || report.guided) io.defaulted("corpus", report.corpus, form::Each<GenesText>{});
  // `buckets` and `not_checked` are derived from the rest, for people and other programs.
  if constexpr (Io::kReads)
    for (const char* follows : {"buckets", "not_checked"}) io.object.optional(follows);
  else
    io.out.key("not_checked").strings(report.not_checked());
}

std::string fuzz_report_to_json(const FuzzReport& report) { return line_of_fields(report); }

// Every case has one outcome: counts that do not add up would be merged into a false verdict.
// Reports of older releases have no `refusals`.
static Result<void> check_counts(const std::string& path, const FuzzReport& report) {
  const auto left = [](std::int64_t cases, const std::map<std::string, KnownCases>& counted) {
    // A sum of the file's counts may overflow; a difference of two counts does not.
    for (const auto& [name, of] : counted) cases = cases < of.cases ? -1 : cases - of.cases;
    return cases;
  };
  if (report.refused > 0 && !report.refusals.empty() && left(report.refused, report.refusals) != 0)
    return fail("{}: \"refusals\" do not add up to \"refused\", {}", path, report.refused);
  std::int64_t known = report.cases;
  for (const std::int64_t count :
       {report.agreed, report.refused, static_cast<std::int64_t>(report.failures.size())})
    known = known < count ? -1 : known - count;
  if (known < 0 || left(known, report.known) != 0)
    return fail("{}: agreed, refused, known and failed cases do not add up to \"cases\", {}", path,
                report.cases);
  return {};
}

Result<FuzzReport> read_fuzz_report(const std::string& path) {
  LS_ASSIGN_OR_RETURN(auto lines, LineReader::open(path));
  std::string_view line;
  LS_ASSIGN_OR_RETURN(const auto got, lines.next(line));
  if (!got) return fail(fmt::format("{}: empty; expected the report of a fuzz run", path));
  JsonReader json(path);
  FuzzReport report;
  if (json.parse(line, lines.number(), lines.is_cut_off())) read_fields(json.root(), report);
  if (!json.ok()) return json.failure();
  LS_RETURN_IF_ERROR(check_counts(path, report));
  LS_ASSIGN_OR_RETURN(const bool has_more, lines.next(line));
  if (has_more) return fail("{}:2: a second report; expected one report per file", path);
  return report;
}

}  // namespace lockstep
