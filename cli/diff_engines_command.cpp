// lockstep diff-engines TRACE
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <array>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "base/atomic_file.h"
#include "cli/commands.h"
#include "cli/replay_options.h"
#include "cli/terminal.h"
#include "reference/profiles/engine_profile.h"
#include "sim/conform/engine_diff.h"
#include "sim/session/session.h"
#include "sim/setup/replay_setup.h"
#include "sim/verdict/run_summary.h"
#include "traces/formats/recording_trace.h"
#include "traces/importers/open_trace.h"

namespace lockstep {
namespace {

struct DiffOptions {
  ReplayOptions replay;
  std::array<std::string, 2> engines;
};

// A workload that can be started again and again, and the configuration that both engines get.
struct Prepared {
  LockstepConfig config;
  MakeWorkload make_workload;
};

// A recording's requests, on a clock that puts them before the steps they were recorded at.
Result<Prepared> prepare_recording(const ReplayOptions& options, LockstepConfig config) {
  LS_ASSIGN_OR_RETURN(auto recording, read_recording(options.file));
  constexpr std::int64_t kStepNs = 1'000'000;
  Result<Trace> trace = trace_of(recording, kStepNs);
  if (!trace) return fail(fmt::format("{}: {}", options.file, trace.error().message));
  TraceWorkloadOptions workload;
  workload.step_time = {.base_ns = kStepNs, .per_token_ns = 0};
  workload.num_spec_tokens = config.engine.num_spec_tokens;
  auto shared = std::make_shared<const Trace>(std::move(*trace));
  return Prepared{std::move(config), [shared, workload]() -> Result<std::unique_ptr<Workload>> {
                    return make_trace_workload(shared, workload);
                  }};
}

Result<Prepared> prepare(ReplayOptions options) {
  options.run.set_text("backend", "none");
  LS_ASSIGN_OR_RETURN(const auto format, detect_format(options.file));
  if (format == FileFormat::saved_case)
    return fail(
        fmt::format("{}: a saved case is one run; `lockstep replay` takes it", options.file));
  LS_ASSIGN_OR_RETURN(auto replay, prepare_replay(request_of(options)));
  if (format == FileFormat::recording) return prepare_recording(options, std::move(replay.config));
  return Prepared{
      std::move(replay.config),
      [trace = std::move(replay.trace), workload = workload_options_of(replay.run)]()
          -> Result<std::unique_ptr<Workload>> { return make_trace_workload(trace, workload); }};
}

void print_row(std::string_view what, std::int64_t left, std::int64_t right) {
  fmt::print("  {:<22}{:>18}{:>18}{:>14}\n", what, with_commas(left), with_commas(right),
             left == right ? std::string("=") : fmt::format("{:+}", right - left));
}

void print_totals(const EngineDiff& diff) {
  const RunSummary& l = diff.sides[0].summary;
  const RunSummary& r = diff.sides[1].summary;
  fmt::print("  {:<22}{:>18}{:>18}{:>14}\n", "", diff.sides[0].engine, diff.sides[1].engine,
             "difference");
  print_row("steps", l.steps, r.steps);
  print_row("request-steps", l.request_steps, r.request_steps);
  print_row("scheduled tokens", l.scheduled_tokens, r.scheduled_tokens);
  print_row("prompt tokens hit", l.cached_tokens, r.cached_tokens);
  print_row("requests with a hit", l.hits, r.hits);
  print_row("preemptions", l.preemptions, r.preemptions);
  print_row("hashes stored", l.stored, r.stored);
  print_row("hashes evicted", l.evictions, r.evictions);
  print_row("requests finished", l.finished_requests, r.finished_requests);
  print_row("requests stuck", l.stuck_total, r.stuck_total);
}

void print_partings(const EngineDiff& diff) {
  const std::optional<std::int64_t> first = diff.first_step();
  if (!first) {
    fmt::print("\nThe decisions are the same in every step.\n");
    return;
  }
  fmt::print("\nWhere they part first:\n");
  for (std::size_t f = 0; f < kNumDecisionFields; ++f) {
    const auto& step = diff.first_difference[f];
    fmt::print("  {:<12}{}\n", name_of(static_cast<DecisionField>(f)),
               step ? fmt::format("step {}", with_commas(*step)) : "nowhere");
  }
  for (const EngineSide& side : diff.sides)
    fmt::print("\nStep {} of {}:\n{}", with_commas(*first), side.engine, side.first_parting);
}

std::string to_json(const EngineDiff& diff) {
  using Json = nlohmann::ordered_json;
  Json json;
  for (const EngineSide& side : diff.sides) json["engines"][side.engine] = json_of(side.summary);
  for (std::size_t f = 0; f < kNumDecisionFields; ++f) {
    const auto& step = diff.first_difference[f];
    json["first_difference"][std::string(name_of(static_cast<DecisionField>(f)))] =
        step ? Json(*step) : Json(nullptr);
  }
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

// Options of a replay that mean nothing here.
Result<void> check_options(const ReplayOptions& options) {
  const std::pair<bool, std::string_view> useless[] = {
      {options.run.has("engine"), "--engine"},    {options.run.has("backend"), "--backend"},
      {options.run.has("check"), "--check"},      {options.run.has("mutants"), "--mutant"},
      {!options.report_path.empty(), "--report"}, {!options.save_dir.empty(), "--save"}};
  for (const auto& [given, name] : useless)
    if (given)
      return fail(fmt::format(
          "{}: diff-engines runs the decisions of two engines alone; leave it out", name));
  return {};
}

Result<int> diff(const DiffOptions& options) {
  LS_RETURN_IF_ERROR(check_options(options.replay));
  for (const std::string& engine : options.engines)
    if (find_engine_profile(engine) == nullptr)
      return fail(fmt::format("--engines: {} is not known; expected two of {}", engine,
                              engine_profile_names()));
  LS_ASSIGN_OR_RETURN(auto prepared, prepare(options.replay));
  LS_ASSIGN_OR_RETURN(
      const EngineDiff found,
      diff_engines(std::move(prepared.config), options.engines, prepared.make_workload));
  fmt::print("{}\n\n", options.replay.file);
  print_totals(found);
  print_partings(found);
  if (!options.replay.json_path.empty())
    LS_RETURN_IF_ERROR(write_file_atomically(options.replay.json_path, to_json(found)));
  return found.first_step() ? kExitDisagreed : kExitAgreed;
}

}  // namespace

void add_diff_engines_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<DiffOptions>();
  options->engines = {std::string(engine_profiles().front().name),
                      std::string(engine_profiles().back().name)};
  CLI::App* command = app.add_subcommand(
      "diff-engines", "Run one trace under two profiles: where decisions part, and what it costs");
  command->add_option("--engines", options->engines, "two profiles (the oldest and the newest)");
  declare_replay_options(*command, options->replay);
  command->callback([options, &exit_code] { exit_code = exit_status(diff(*options)); });
}

}  // namespace lockstep
