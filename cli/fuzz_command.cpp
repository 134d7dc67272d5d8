// lockstep fuzz: do generated caches, engines and traffic agree with the model?
//
// Judges one generated case per seed: decisions by the audit and the invariants, pages by a backend
// (properties/fuzz/fuzz.h). With --decisions another engine decides, with --backend vllm or
// worker:COMMAND an engine's own worker holds the cache. The report depends only on the options, so
// reports of shards merge into the report of the whole run.
//
// A failure that docs/findings.md or --known names is counted and does not fail the run. A long run
// that never reaches a class of cases fails, because its silence would prove nothing.
//
// Not checked: cases that the engine or the backend refuses; they are counted with their reasons.
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <csignal>
#include <ctime>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/output_file.h"
#include "base/stop_signal.h"
#include "base/stopwatch.h"
#include "cli/commands.h"
#include "cli/failing_case.h"
#include "cli/options/kernels_option.h"
#include "cli/options/output_option.h"
#include "cli/output/reports.h"
#include "cli/output/terminal.h"
#include "cuda_backend/backends.h"
#include "properties/fuzz/corpus.h"
#include "properties/fuzz/fuzz.h"
#include "properties/mutants/mutant_search.h"
#include "sim/step/backend_config.h"
#include "traces/formats/engine_options.h"

namespace lockstep {
namespace {

constexpr std::size_t kBucketsShown = 20;

struct FuzzCommandOptions {
  std::optional<std::uint64_t> seed;  // absent: 1, and more than one case
  std::optional<double> seconds;      // absent: no time limit
  std::optional<std::int64_t> runs;   // absent: 1 with a seed, unlimited with seconds, else 1,000
  std::optional<std::int64_t> failures_max;  // absent: no limit
  int jobs = 1;
  std::optional<std::string> backend;  // absent: simt; with --decisions none
  DecisionsOptions decisions;
  WorkerOptions worker;
  std::string known_path;
  std::string engine;
  std::string mutant;
  std::string check;
  std::string save_dir;
  bool saves_findings = false;
  bool saves_as_found = false;  // without shrinking
  bool shows_coverage = false;
  bool guided = false;
  std::string corpus_path;
  double shrink_seconds = 60;  // per case
  std::string shard;           // "i/n"
  ReportOptions reports;
  std::vector<std::string> merge;  // reports to merge instead of running
  int interrupted_by = 0;          // the signal that stopped the merged run; 0: none
};

// Cases, steps and bytes per second of the whole run, shrinking included. REQUIRES: seconds > 0.
std::string rate_text(const FuzzReport& report, double seconds) {
  const auto per_second = [&](std::int64_t count) {
    return static_cast<std::int64_t>(static_cast<double>(count) / seconds);
  };
  return fmt::format("{} cases, {} steps, {} checked per second",
                     with_commas(per_second(report.cases)), with_commas(per_second(report.steps)),
                     size_text(per_second(report.bytes_checked)));
}

// Returns all classes with their counts, two per line.
std::string tally_text(const Tally& tally) {
  std::string text = "\nCases and events by class:\n";
  for (std::size_t i = 0; i < kNumReached; ++i) {
    const auto reached = static_cast<Reached>(i);
    text += fmt::format("  {:<25}{:>11}", name_of(reached), with_commas(tally[reached]));
    if (i % 2 == 1 || i + 1 == kNumReached) text += "\n";
  }
  return text;
}

// Returns the smallest failure of each bucket, at most kBucketsShown of them, with the command that
// repeats it.
std::string buckets_text(const FuzzReport& report, std::span<const FuzzBucket> buckets) {
  std::string text;
  for (const FuzzBucket& bucket : buckets.first(std::min(buckets.size(), kBucketsShown))) {
    const FuzzFailure& failure = *bucket.smallest;
    text += fmt::format("\n{}, {}: seed {}, {}", counted(bucket.cases, "case"), failure.check,
                        failure.seed, name_of(failure.kind));
    if (failure.step >= 0) text += fmt::format(" in step {}", failure.step);
    if (!failure.request.empty()) text += fmt::format(", request {}", on_one_line(failure.request));
    text += fmt::format("\n  {}\n  {}\n", failure.what, report.again_with(failure.seed));
  }
  if (buckets.size() > kBucketsShown)
    text += fmt::format("\n... and {} more buckets; --json FILE lists them all\n",
                        buckets.size() - kBucketsShown);
  return text;
}

// Every case has one of four outcomes; known failures are those that are left.
std::int64_t num_known(const FuzzReport& report) {
  return report.cases - report.agreed - report.refused - std::ssize(report.failures);
}

// The verdict is "none" if no case failed and none agreed: all were refused, or showed known
// findings.
std::string verdict_text(const FuzzReport& report, std::size_t num_buckets) {
  const auto missing = report.missing_classes();
  std::string text;
  if (!report.failures.empty())
    text = fmt::format(
        "Verdict: FAILED. {} of {} in {}\n", counted(std::ssize(report.failures), "failure"),
        counted(report.cases, "case"), counted(static_cast<std::int64_t>(num_buckets), "bucket"));
  if (!missing.empty())
    text += fmt::format("{}Never seen in {}: {}\n", text.empty() ? "Verdict: FAILED. " : "",
                        counted(report.cases, "case"), fmt::join(missing, ", "));
  if (!text.empty()) return text;
  return fmt::format("Verdict: {}. {} of {}{}\n", report.agreed > 0 ? "agreed" : "none",
                     with_commas(report.agreed), counted(report.cases, "case"),
                     report.interrupted ? ", then interrupted" : "");
}

std::string fuzz_summary_text(const FuzzReport& report, double seconds, bool shows_coverage) {
  const std::vector<FuzzBucket> buckets = report.buckets();
  std::string text = verdict_text(report, buckets.size()) + buckets_text(report, buckets) + "\n";
  if (!report.decided_by.empty()) text += row_text("decisions", report.decided_by);
  if (!report.worked_by.empty()) text += row_text("cache", report.worked_by);
  text += row_text("cases", with_commas(report.cases),
                   fmt::format("{} agreed, {} refused, {} of known findings, {} failed",
                               with_commas(report.agreed), report.refused, num_known(report),
                               report.failures.size()));
  if (report.guided)
    text += row_text("corpus", counted(std::ssize(report.corpus), "case"),
                     "that cover all classes reached");
  text += row_text("steps", with_commas(report.steps));
  text += row_text("checked", size_text(report.bytes_checked), "of pages");
  if (seconds > 0) text += row_text("time", duration_text(seconds), rate_text(report, seconds));
  text += row_text("state hash", to_hex(report.state_hash));
  if (report.cases > 1 && shows_coverage) text += tally_text(report.tally);
  for (const auto& [name, known] : report.known)
    text += fmt::format("\nknown: {}: {}, first with seed {}\n", name, counted(known.cases, "case"),
                        known.first_seed);
  if (report.refused > 0)
    text += fmt::format("\nrefused: {}, first with seed {}: {}\n", counted(report.refused, "case"),
                        report.first_refused_seed, report.first_refusal);
  if (report.refusals.size() > 1)
    for (const auto& [reason, cases] : report.refusals)
      text += fmt::format("  {:>5}  first with seed {}: {}\n", cases.cases, cases.first_seed,
                          reason.substr(reason.find(' ') + 1));
  return text + not_checked_text(report.not_checked());
}

// Mixed failures are a disagreement. Deadlocks, and errors of Lockstep's own code, have exit
// statuses of their own only if there is no other failure.
int fuzz_exit_code(const FuzzReport& report) {
  if (!report.missing_classes().empty()) return kExitDisagreed;
  if (report.failures.empty()) return kExitAgreed;
  const auto all_are = [&](OutcomeKind kind) {
    return std::ranges::all_of(report.failures,
                               [=](const FuzzFailure& failure) { return failure.kind == kind; });
  };
  if (all_are(OutcomeKind::harness)) return kExitRefused;
  return all_are(OutcomeKind::stuck) ? kExitStuck : kExitDisagreed;
}

constexpr std::int64_t kRunsByDefault = 1'000;
constexpr std::int64_t kRunsMax = std::int64_t{1} << 40;  // more cases than any run judges

// The case that this thread judges, for the last message of a process that a failed check stops.
thread_local std::uint64_t current_seed = 0;
std::string command_of_case;  // repeats a case, without its --seed

// Handles SIGABRT: names the seed that repeats the crash, and aborts with the default action, for a
// core file. Formats into a local buffer without allocating, since the heap may be damaged.
void name_seed_and_abort(int) {
  char text[4096];
  const auto end =
      fmt::format_to_n(text, sizeof text, "lockstep: stopped in the case of `{} --seed {}`\n",
                       command_of_case, current_seed);
  [[maybe_unused]] const auto written = write(STDERR_FILENO, text, std::min(end.size, sizeof text));
  std::signal(SIGABRT, SIG_DFL);
  std::abort();
}

// Reads "I/N" with 0 <= I < N; empty: one shard. %n checks that nothing follows.
Result<void> parse_shard(const std::string& text, FuzzOptions& fuzzing) {
  if (text.empty()) return {};
  int read = 0;
  long long shard = 0;
  long long shards = 0;
  if (std::sscanf(text.c_str(), "%lld/%lld%n", &shard, &shards, &read) != 2 ||
      read != static_cast<int>(text.size()) || shard < 0 || shards < 1 || shard >= shards)
    return fail(fmt::format("--shard: {}; expected I/N with 0 <= I < N", text));
  fuzzing.shard = shard;
  fuzzing.shards = shards;
  return {};
}

// Reads the known failures and drops expired entries, so that their failures are reported again.
// Dates are compared as text, in UTC; the last day still counts.
Result<std::vector<KnownFailure>> known_today(const std::string& path) {
  LS_ASSIGN_OR_RETURN(auto known, read_known_file(path));
  const std::string today = fmt::format("{:%F}", fmt::gmtime(std::time(nullptr)));
  std::erase_if(known, [&](const KnownFailure& failure) {
    const bool is_over = !failure.until.empty() && failure.until < today;
    if (is_over) fmt::print("{}: known until {}; reported again\n", failure.id, failure.until);
    return is_over;
  });
  return known;
}

// Refuses a scheduler and a worker of different releases of one engine: a scheduler plans for the
// worker of its own release, and a mismatch would be reported as a failure of either. Different
// engines are allowed.
Result<void> check_halves(const ForeignEngines& decider, const ForeignEngines& worker) {
  const RecordedEngine& decides = decider.hello().engine;
  const RecordedEngine& works = worker.hello().engine;
  if (decides.name != works.name || decides.version == works.version) return {};
  return fail(
      fmt::format("--decisions is {} but the worker of --backend is {}; use one release for both",
                  decides.text(), works.text()));
}

// Starts the worker that --backend names and restricts generated cases to what it supports. Errors:
// options that need a backend of this program.
Result<void> put_on_worker(FailingCaseOptions& judging, FuzzOptions& fuzzing) {
  const std::string& backend = fuzzing.generator.backend;
  if (!fuzzing.mutant.empty())
    return fail(fmt::format(
        "--mutant does not apply to --backend {}; plant a worker's defect with --plant", backend));
  if (!fuzzing.generator.check.empty() && fuzzing.generator.check != "fast")
    return fail(fmt::format(
        "--check does not apply to --backend {}: its memory accesses cannot be watched", backend));
  LS_ASSIGN_OR_RETURN(judging.workers, open_workers(backend, judging.worker));
  if (judging.engines != nullptr)
    LS_RETURN_IF_ERROR(check_halves(*judging.engines, *judging.workers));
  if (fuzzing.generator.engine.empty()) fuzzing.generator.engine = profile_of(*judging.workers);
  fit_generator(judging.workers->hello(), fuzzing.generator);
  fuzzing.backend = worker_factory(judging.workers);
  fuzzing.worked_by = worker_of(*judging.workers, judging.worker).text();
  return {};
}

// Reads the corpus. Without --guided its cases are the whole run; with --guided they come first,
// and the file may be absent because the run writes it.
Result<void> begin_with_corpus(const FuzzCommandOptions& options, FuzzOptions& fuzzing) {
  const std::string& path = options.corpus_path;
  if (options.guided) LS_RETURN_IF_ERROR(check_output(path));
  if (!options.guided || std::filesystem::exists(path)) {
    LS_ASSIGN_OR_RETURN(fuzzing.corpus, read_corpus(path));
  }
  if (options.guided) return {};
  if (options.runs || options.seconds || options.seed)
    return fail("--corpus runs its own cases; add --guided for --runs, --seconds or --seed");
  if (fuzzing.corpus.empty()) return fail(fmt::format("--corpus {}: contains no case", path));
  fuzzing.runs = std::ssize(fuzzing.corpus);
  return {};
}

// Combines the command line with what the engine and the worker support. Errors: options that
// contradict each other or this machine.
Result<FuzzOptions> options_of(const FuzzCommandOptions& options, FailingCaseOptions& judging) {
  const std::shared_ptr<ForeignEngines>& engines = judging.engines;
  std::string engine;
  if (!options.engine.empty()) {
    LS_ASSIGN_OR_RETURN(engine, engine_named("--engine", options.engine));
  }
  FuzzOptions fuzzing;
  fuzzing.first_seed = options.seed.value_or(1);
  fuzzing.runs = options.seconds ? kRunsMax : options.seed ? 1 : kRunsByDefault;
  if (options.runs) fuzzing.runs = *options.runs;
  fuzzing.jobs = options.jobs;
  if (!options.mutant.empty() && find_mutant(options.mutant) == nullptr)
    return fail("--mutant: unknown mutant {}; `lockstep mutants --list` lists them",
                options.mutant);
  fuzzing.mutant = options.mutant;
  fuzzing.guided = options.guided;
  fuzzing.rules = options.decisions.rules();
  if (!options.corpus_path.empty()) LS_RETURN_IF_ERROR(begin_with_corpus(options, fuzzing));
  // A real engine's decisions are judged without pages unless --backend says otherwise.
  const std::string backend = options.backend.value_or(engines == nullptr ? "simt" : "none");
  if (engines != nullptr) {
    if (!options.mutant.empty())
      return fail(
          "--mutant does not apply to --decisions: mutants are planted in the model, which does "
          "not decide");
    // The nearest profile decides the options of the generated cases.
    if (engine.empty()) engine = profile_of(*engines);
    fuzzing.generator.never = features_to_avoid(engines->hello());
    limit_caches(engines->hello(), fuzzing.generator);
    // Without --conform no model has to follow the decisions, so cases of a release that is not
    // modelled with connectors may have one.
    fuzzing.generator.any_release_connects = !options.decisions.conforms;
    fuzzing.decisions = decisions_of(engines);
    fuzzing.decided_by = engines->hello().engine.text();
    fuzzing.conforms = options.decisions.conforms;
  }
  fuzzing.generator.engine = std::move(engine);
  fuzzing.generator.backend = backend;
  fuzzing.generator.check = options.check;
  if (backend == "simt") fuzzing.backend = make_simt_backend;
  if (backend == "cuda") {
    if (!options.check.empty() && options.check != "fast")
      return fail("--check: --backend cuda has only mode fast; --backend simt has " +
                  options.check);
    if (std::string why; !gpu_available(&why)) return fail("--backend cuda: " + why);
    fuzzing.generator.check = "fast";
    fuzzing.backend = make_gpu_backend;
  }
  // A plugin runs outside of captured graphs, and its accesses are not watched.
  if (is_user_kernels(backend)) {
    fuzzing.generator.check = "fast";
    fuzzing.generator.never.add(Feature::captured_graphs);
    LS_RETURN_IF_ERROR(check_kernels(backend));
    fuzzing.backend = backend_factory(backend);
  }
  LS_RETURN_IF_ERROR(check_worker_options(backend, judging.worker));
  if (is_engine_worker(backend)) LS_RETURN_IF_ERROR(put_on_worker(judging, fuzzing));
  if (!options.known_path.empty()) {
    LS_ASSIGN_OR_RETURN(fuzzing.known, known_today(options.known_path));
  }
  LS_RETURN_IF_ERROR(parse_shard(options.shard, fuzzing));
  // A shard that ends early leaves seeds that no other shard runs.
  if (fuzzing.shards > 1 && (options.seconds || options.failures_max))
    return fail(
        "--shard needs a fixed number of cases; use --runs instead of --seconds and --failures");
  return fuzzing;
}

// The result of one process.
struct FuzzPart {
  FuzzReport report;
  std::string saved{};      // a line per file that was written
  Result<void> is_saved{};  // the first error of saving: the report comes before it
};

// Runs the cases in `jobs` threads, then saves and shrinks what failed, when no thread is left.
Result<FuzzPart> run(const FuzzCommandOptions& options, const FuzzOptions& fuzzing,
                     const FailingCaseOptions& judging) {
  FuzzCases cases(options.save_dir, judging);
  FuzzPart part;
  Result<void>& saved_all = part.is_saved;
  {
    Stopwatch clock;
    double elapsed = 0;
    Progress progress("fuzzing", options.seconds ? 0 : fuzzing.runs / fuzzing.shards);
    FuzzCallbacks callbacks;
    std::atomic<std::int64_t> failed = 0;
    callbacks.starting = [](std::uint64_t seed) { current_seed = seed; };
    callbacks.progress = [&](std::int64_t done, std::int64_t failures) {
      failed = failures;
      progress.at(done, failures == 0 ? std::string() : counted(failures, "failure"));
    };
    command_of_case = fuzzing.again;
    // Called by one thread at a time, so `elapsed` needs no lock.
    callbacks.go_on = [&] {
      elapsed += clock.lap();
      return !stop_requested() && (!options.seconds || elapsed < *options.seconds) &&
             (!options.failures_max || failed < *options.failures_max);
    };
    if (!options.save_dir.empty())
      callbacks.failed = [&](const SavedCase& saved, const Outcome& outcome) {
        if (saved_all) saved_all = cases.keep(saved, outcome);
      };
    if (options.saves_findings)
      callbacks.found = [&](const SavedCase& saved, const Outcome& outcome) {
        if (saved_all) saved_all = cases.keep_finding(saved, outcome);
      };
    // Only while cases run: an abort elsewhere belongs to no seed.
    const auto previous = std::signal(SIGABRT, name_seed_and_abort);
    part.report = fuzz(fuzzing, callbacks);
    std::signal(SIGABRT, previous);
  }
  if (saved_all) saved_all = cases.finish(options.saves_as_found ? 0 : options.shrink_seconds);
  part.saved = cases.text();
  return part;
}

// Reads reports and merges them; the order on the command line does not matter.
Result<FuzzReport> merge(const std::vector<std::string>& paths) {
  std::vector<FuzzReport> parts;
  for (const std::string& path : paths) {
    Result<FuzzReport> part = read_fuzz_report(path);
    if (!part) return part;
    parts.push_back(std::move(*part));
  }
  return merge_fuzz_reports(parts);
}

Result<FuzzPart> run_or_merge(const FuzzCommandOptions& options, const std::string& again) {
  if (!options.merge.empty()) {
    LS_ASSIGN_OR_RETURN(auto merged, merge(options.merge));
    if (!options.corpus_path.empty() && !merged.guided)
      return fail("--corpus with --merge: the reports are not of --guided runs");
    return FuzzPart{.report = std::move(merged)};
  }
  FailingCaseOptions judging;
  judging.decisions = options.decisions;
  judging.worker = options.worker;
  LS_RETURN_IF_ERROR(start_engines(judging));
  LS_ASSIGN_OR_RETURN(auto fuzzing, options_of(options, judging));
  fuzzing.again = again;
  fuzzing.again_repeats = !options.corpus_path.empty();
  return run(options, fuzzing, judging);
}

// Adds an item per failure, per known finding, for the refused cases, for classes that were never
// reached, and for all cases that agreed together.
void add_items(const FuzzReport& report, CommandReport& out) {
  for (const FuzzFailure& failure : report.failures)
    out.add({.name = fmt::format("seed {}", failure.seed),
             .kind = ItemKind::failed,
             .check = failure.check,
             .line = stable_line(failure.check, failure.step, failure.request, failure.what),
             .again = report.again_with(failure.seed)});
  for (const auto& [name, known] : report.known)
    out.add({.name = name,
             .kind = ItemKind::known,
             .line = fmt::format("{} of a known finding: {}", counted(known.cases, "case"), name)});
  if (report.refused > 0)
    out.add({.name = "refused cases",
             .kind = ItemKind::skipped,
             .line = fmt::format("{}, first with seed {}: {}", counted(report.refused, "case"),
                                 report.first_refused_seed, report.first_refusal)});
  if (const auto missing = report.missing_classes(); !missing.empty())
    out.add({.name = "classes",
             .kind = ItemKind::failed,
             .check = "fuzz.classes",
             .line = fmt::format("fuzz.classes: never seen: {}", fmt::join(missing, ", "))});
  if (report.agreed > 0) out.add({.name = counted(report.agreed, "case") + " that agreed"});
}

// Refuses options of a search with --merge, which runs nothing and would ignore them.
Result<void> check_merges_only(const FuzzCommandOptions& options, const CommandReport& out) {
  const std::string command =
      out.again({.without = {"--merge", "--corpus", "--coverage", "--interrupted-by"}});
  const std::size_t given = command.find(" --");
  if (given == command.npos && options.save_dir.empty()) return {};
  return fail("--merge runs nothing; omit the options of a search: {}",
              given == command.npos ? "--save" : command.substr(given + 1));
}

Result<int> fuzz_main(const FuzzCommandOptions& options, CommandReport& out) {
  Stopwatch clock;
  watch_stop_signals();
  std::vector<std::string> without = {
      "--seed",  "--runs",          "--seconds",   "--failures",       "--jobs",          "--merge",
      "--known", "--save-findings", "--no-shrink", "--shrink-seconds", "--interrupted-by"};
  // A shard of a guided run changes its own cases, so its --shard repeats them. The cases of its
  // failures are in its corpus.
  if (!options.guided) without.emplace_back("--shard");
  if (!options.corpus_path.empty()) without.insert(without.end(), {"--guided", "--shard"});
  const std::string again = out.again({.without = without});
  if (!options.merge.empty()) LS_RETURN_IF_ERROR(check_merges_only(options, out));
  LS_ASSIGN_OR_RETURN(const FuzzPart part, run_or_merge(options, again));
  const FuzzReport& report = part.report;
  if (options.interrupted_by != 0) std::raise(options.interrupted_by);
  if (out.wants_json()) out.set_json(fuzz_report_to_json(report));
  // Nothing was judged, so agreement would be a false result.
  if (report.cases > 0 && report.refused == report.cases)
    return fail(fmt::format("every case is refused: {}", report.first_refusal));
  // Cases that run without the backend agree even if it refuses all others.
  if (report.backend != "none" && report.refused > 0 && report.failures.empty() &&
      report.tally[Reached::with_backend] == 0)
    return fail("no case ran on {}; {} refused, first with seed {}: {}", report.backend,
                counted(report.refused, "case"), report.first_refused_seed, report.first_refusal);
  fmt::print("{}", fuzz_summary_text(report, options.merge.empty() ? clock.lap() : 0,
                                     options.shows_coverage));
  if ((options.guided || !options.merge.empty()) && !options.corpus_path.empty())
    LS_RETURN_IF_ERROR(write_output(options.corpus_path, corpus_to_text(report.corpus)));
  if (!part.saved.empty()) fmt::print("\nSaved:\n{}", part.saved);
  add_items(report, out);
  LS_RETURN_IF_ERROR(part.is_saved);
  return fuzz_exit_code(report);
}

void add_options(CLI::App& command, FuzzCommandOptions& options) {
  command.add_option("--seed", options.seed,
                     "seed of the first case; without --runs or --seconds, of the only case");
  command.add_option("--seconds", options.seconds, "run cases for N seconds")
      ->check(CLI::PositiveNumber);
  command.add_option("--runs", options.runs, "number of cases, with consecutive seeds (1000)")
      ->check(CLI::Range(std::int64_t{1}, kRunsMax));
  command.add_option("--failures", options.failures_max, "stop after N new failures")
      ->check(CLI::Range(std::int64_t{1}, kRunsMax))
      ->type_name("N");
  command.add_option("--jobs", options.jobs, "cases in parallel")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command
      .add_option("--backend", options.backend,
                  "simt: kernels on the CPU; cuda: on a GPU; none: decisions, audit and "
                  "invariants; FILE.so: your kernels; vllm[:DIR] or worker:COMMAND: an engine's "
                  "own worker (simt; with --decisions none)")
      ->check(backend_among({"simt", "cuda", "none"}));
  declare_decisions(command, options.decisions);
  declare_checks(command, options.decisions);
  declare_worker(command, options.worker);
  declare_kernels(command, [&options](const std::string& backend) { options.backend = backend; });
  command.add_option("--known", options.known_path,
                     "file of known failures, each with your id (docs/fuzzing.md)");
  command.add_option("--engine", options.engine, "engine profile (one per case)");
  command.add_option("--check", options.check, "fast, check or hunt (a mixture)")
      ->check(CLI::IsMember({"fast", "check", "hunt"}));
  command.add_option("--mutant", options.mutant,
                     "plant this defect in every case (lockstep mutants --list)");
  CLI::Option* save =
      declare_output_folder(command, "--save", options.save_dir,
                            "folder for failing cases; the smallest of each bucket is shrunk");
  command
      .add_flag("--save-findings", options.saves_findings,
                "also save the first case of each known finding, as finding-N")
      ->needs(save);
  command.add_flag("--no-shrink", options.saves_as_found, "save cases as found, without shrinking")
      ->needs(save);
  command
      .add_option("--shrink-seconds", options.shrink_seconds, "time limit for shrinking one case")
      ->check(CLI::PositiveNumber)
      ->needs(save)
      ->capture_default_str();
  command.add_flag("--guided", options.guided,
                   "mutate cases that reached a class first, with longer traffic");
  command
      .add_option("--corpus", options.corpus_path,
                  "cases to run first; with --guided or --merge, also the file of the new corpus")
      ->type_name("FILE");
  command.add_flag("--coverage", options.shows_coverage,
                   "print how often each class was generated or reached");
  command.add_option("--shard", options.shard,
                     "I/N: run only every N-th case, starting with the I-th");
  declare_reports(command, options.reports, "the report as JSON");
  command.add_option("--merge", options.merge,
                     "merge the reports of all shards or of consecutive seeds; run nothing");
  // Of lockstep_campaign, which a signal stopped: all outputs are marked as interrupted.
  command.add_option("--interrupted-by", options.interrupted_by)
      ->check(CLI::IsMember({SIGINT, SIGTERM}))
      ->group("");
}

}  // namespace

void add_fuzz_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<FuzzCommandOptions>();
  CLI::App* command =
      app.add_subcommand("fuzz", "Check generated cases: caches, engines and traffic, from seeds");
  add_options(*command, *options);
  run_when_chosen(*command, options, exit_code, fuzz_main);
}

}  // namespace lockstep
