// lockstep fuzz
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

#include "cli/commands.h"
#include "cli/exit_code.h"
#include "cli/fuzz_summary.h"
#include "cli/progress.h"
#include "cli/terminal.h"
#include "cuda_backend/simt_backend.h"
#include "properties/fuzz.h"
#include "reference/engine_profile.h"
#include "sim/stopwatch.h"
#include "traces/atomic_file.h"

namespace lockstep {
namespace {

constexpr std::int64_t kRunsByDefault = 1'000;
constexpr std::int64_t kRunsMax = std::int64_t{1} << 40;

struct FuzzCommandOptions {
  std::optional<std::uint64_t> seed;
  std::optional<double> seconds;
  std::optional<std::int64_t> runs;
  int jobs = 1;
  std::string backend = "simt";
  std::string engine;
  std::string mutant;
  std::string check;
  std::string save_dir;
  std::string shard;  // "i/n"
  std::string json_path;
  std::vector<std::string> merge;
};

// The case at hand, for the last words of a process that a check of ours stops.
thread_local std::uint64_t current_seed = 0;

void name_seed_and_abort(int) {
  char text[96];
  const auto end = fmt::format_to_n(text, sizeof text,
                                    "lockstep: stopped in the case of `lockstep fuzz --seed {}`\n",
                                    current_seed);
  [[maybe_unused]] const auto written = write(STDERR_FILENO, text, std::min(end.size, sizeof text));
  std::signal(SIGABRT, SIG_DFL);
  std::abort();
}

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

Result<FuzzOptions> options_of(const FuzzCommandOptions& options) {
  FuzzOptions fuzzing;
  fuzzing.first_seed = options.seed.value_or(1);
  fuzzing.runs = options.seconds ? kRunsMax : options.seed ? 1 : kRunsByDefault;
  if (options.runs) fuzzing.runs = *options.runs;
  fuzzing.jobs = options.jobs;
  fuzzing.mutant = options.mutant;
  fuzzing.generator.engine = options.engine;
  fuzzing.generator.backend = options.backend;
  fuzzing.generator.check = options.check;
  if (options.backend == "simt") fuzzing.backend = make_simt_backend;
  if (Result<void> shard = parse_shard(options.shard, fuzzing); !shard)
    return tl::unexpected(shard.error());
  if (fuzzing.shards > 1 && options.seconds)
    return fail("--seconds with --shard: a run that ends by the clock has no shards; give --runs");
  return fuzzing;
}

Result<void> save(const std::string& folder, SavedCase saved, const Outcome& outcome) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return fail(fmt::format("{}: {}", folder, error.message()));
  const bool has_phase = outcome.kind == OutcomeKind::divergence;
  saved.expected = ExpectedVerdict{.kind = has_phase ? outcome.check : "agreed", .step = {}};
  if (has_phase) saved.expected->step = outcome.step;
  if (outcome.kind == OutcomeKind::stuck) saved.expected->kind = "liveness";
  const std::filesystem::path path = std::filesystem::path(folder) / (saved.name + ".case.jsonl");
  return write_saved_case(path.string(), saved);
}

Result<FuzzReport> run(const FuzzCommandOptions& options, const FuzzOptions& fuzzing) {
  Result<void> saved_all;
  Stopwatch clock;
  double elapsed = 0;
  Progress progress("fuzzing", options.seconds ? 0 : fuzzing.runs / fuzzing.shards);
  FuzzCallbacks callbacks;
  callbacks.starting = [](std::uint64_t seed) { current_seed = seed; };
  callbacks.progress = [&](std::int64_t cases, std::int64_t failures) {
    progress.at(cases, failures == 0 ? std::string() : counted(failures, "failure"));
  };
  if (options.seconds)
    callbacks.go_on = [&] { return (elapsed += clock.lap()) < *options.seconds; };
  if (!options.save_dir.empty())
    callbacks.failed = [&](const SavedCase& saved, const Outcome& outcome) {
      if (saved_all) saved_all = save(options.save_dir, saved, outcome);
    };
  const auto previous = std::signal(SIGABRT, name_seed_and_abort);
  FuzzReport report = fuzz(fuzzing, callbacks);
  std::signal(SIGABRT, previous);
  if (!saved_all) return tl::unexpected(saved_all.error());
  return report;
}

Result<FuzzReport> merge(const std::vector<std::string>& paths) {
  std::vector<FuzzReport> parts;
  for (const std::string& path : paths) {
    Result<FuzzReport> part = read_fuzz_report(path);
    if (!part) return part;
    parts.push_back(std::move(*part));
  }
  return merge_fuzz_reports(parts);
}

int fuzz_main(const FuzzCommandOptions& options) {
  if (!options.engine.empty() && find_engine_profile(options.engine) == nullptr)
    return refuse(fmt::format("--engine: {} is not known; expected one of {}", options.engine,
                              engine_profile_names()));
  const Result<FuzzOptions> fuzzing = options_of(options);
  if (!fuzzing) return refuse(fuzzing.error().message);
  Stopwatch clock;
  const Result<FuzzReport> report =
      options.merge.empty() ? run(options, *fuzzing) : merge(options.merge);
  if (!report) return refuse(report.error().message);
  if (report->cases > 0 && report->refused == report->cases)
    return refuse(fmt::format("every case is refused: {}", report->first_refusal));
  fmt::print("{}", fuzz_summary_text(*report, options.merge.empty() ? clock.lap() : 0));
  if (!options.json_path.empty()) {
    const Result<void> written =
        write_file_atomically(options.json_path, fuzz_report_to_json(*report));
    if (!written) return refuse(written.error().message);
  }
  return fuzz_exit_code(*report);
}

void add_options(CLI::App& command, FuzzCommandOptions& options) {
  command.add_option("--seed", options.seed,
                     "the first case, and the only one unless more are asked");
  command.add_option("--seconds", options.seconds, "as many cases as fit into the time")
      ->check(CLI::PositiveNumber);
  command.add_option("--runs", options.runs, "so many cases, of consecutive seeds")
      ->check(CLI::Range(std::int64_t{1}, kRunsMax));
  command.add_option("--jobs", options.jobs, "cases at a time")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command
      .add_option("--backend", options.backend,
                  "simt: kernels on the CPU executor; none: decisions, audit and invariants")
      ->check(CLI::IsMember({"simt", "none"}))
      ->capture_default_str();
  command.add_option("--engine", options.engine, "an engine profile; by default any");
  command.add_option("--check", options.check, "fast, check or hunt; by default a mixture")
      ->check(CLI::IsMember({"fast", "check", "hunt"}));
  command.add_option("--mutant", options.mutant, "plant a defect in every case");
  command.add_option("--save", options.save_dir, "write failures there as cases");
  command.add_option("--shard", options.shard, "I/N: only every N-th case, from the I-th on");
  command.add_option("--json", options.json_path, "the report as JSON");
  command.add_option("--merge", options.merge,
                     "reports of all shards of a run, instead of running");
}

}  // namespace

void add_fuzz_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<FuzzCommandOptions>();
  CLI::App* command =
      app.add_subcommand("fuzz", "Judge generated cases: caches, engines and traffic out of seeds");
  add_options(*command, *options);
  command->callback([options, &exit_code] { exit_code = fuzz_main(*options); });
}

}  // namespace lockstep
