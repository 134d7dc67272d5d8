// lockstep shrink CASE: what is the smallest case that fails in the same way?
//
// Removes requests, tokens, layers, options and blocks as long as the case still fails by the same
// check (properties/shrink/shrinker.h), and writes the result next to the file. If an engine
// decides or a worker runs, it also writes their part as a recording that repeats without them.
//
// A recording that is followed shrinks by whole requests and steps: changing a recorded decision
// would make it another engine's.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "base/stop_signal.h"
#include "cli/commands.h"
#include "cli/failing_case.h"
#include "cli/options/output_option.h"
#include "cli/output/reports.h"

namespace lockstep {
namespace {

struct ShrinkCommandOptions {
  std::string file;
  std::string output_path;  // empty: next to the file
  ReportOptions reports;
  FailingCaseOptions judging;
};

Result<int> shrink_file(ShrinkCommandOptions& options, CommandReport& report) {
  watch_stop_signals();
  LS_RETURN_IF_ERROR(start_engines(options.judging));
  LS_ASSIGN_OR_RETURN(const auto saved, load_case(options.file, options.judging));
  LS_RETURN_IF_ERROR(start_workers(saved, options.judging));
  fmt::print("{}", halves_text(saved, options.judging));
  const std::string cut_off = cut_off_text(saved);
  if (!cut_off.empty()) fmt::print("{} is {}.\n", options.file, cut_off);
  LS_ASSIGN_OR_RETURN(const auto failure, failure_of(saved, options.judging));
  // Nothing to shrink. For a recording on whose inputs the model decided, the recorded decisions
  // may still have findings.
  if (!failure.failed()) {
    LS_ASSIGN_OR_RETURN(const auto recorded,
                        check_if_recorded(options.file, saved, options.judging));
    if (recorded)
      fmt::print(
          "{}: the model's decisions do not fail, and `shrink` cannot change recorded ones; "
          "{}.\n{}",
          options.file, summary_of(*recorded), details_of(*recorded));
    else
      fmt::print("{} does not fail: there is nothing to shrink.\n{}", options.file,
                 reproduction_text(saved.expected, failure));
    if (report.wants_json()) {
      nlohmann::ordered_json json = {{"file", options.file}, {"fails", false}};
      if (!cut_off.empty()) json["cut_off"] = cut_off;
      if (recorded) json["recording"] = json_of(*recorded);
      report.set_json(json_text(json));
    }
    report.add(item_of(options.file, failure, recorded, report.again(), saved.expected));
    return exit_code_of(saved, failure, recorded);
  }
  LS_ASSIGN_OR_RETURN(const auto shrunk, shrink_case(saved, failure, options.judging));
  const std::string path =
      options.output_path.empty() ? path_of_smallest(options.file) : options.output_path;
  LS_RETURN_IF_ERROR(write_saved_case(path, shrunk.result.smallest));
  const std::string explanation = report.again_of_case("explain", path);
  fmt::print("{}\nWritten: {}\nExplained: {}\n", to_text(shrunk), path, explanation);
  if (const auto& recording = saved.recording;
      saved.decide == Decides::recording && recording && !recording->end.failed_check.empty())
    fmt::print(
        "The recording ends in a failure of its engine: smaller cases need the engine, --decisions "
        "ENGINE.\n");
  if (options.judging.engines != nullptr || options.judging.workers != nullptr) {
    const std::string recording = path_of_recording(path);
    LS_ASSIGN_OR_RETURN(const bool written,
                        write_recording(recording, shrunk.result.smallest, options.judging));
    if (written) fmt::print("Its recording: {}\n", recording);
  }
  if (report.wants_json()) report.set_json(to_json(shrunk));
  report.add(item_of(options.file, shrunk.failure, {}, explanation));
  return exit_code_of(shrunk.failure);
}

}  // namespace

void add_shrink_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<ShrinkCommandOptions>();
  CLI::App* command = app.add_subcommand("shrink", "Shrink a failing case to a minimal one");
  command->add_option("CASE", options->file, "a saved case, or a recording")->required();
  declare_output(*command, "-o,--output", options->output_path,
                 "path of the smaller case (default: NAME.min.case.jsonl in CASE's folder)");
  declare_judging(*command, options->judging);
  command
      ->add_option("--shrink-seconds", options->judging.shrink_seconds,
                   "time limit for shrinking; 0: none")
      ->check(CLI::NonNegativeNumber)
      ->type_name("S");
  command->add_option("--evaluations", options->judging.evaluations_max, "most candidates to try")
      ->check(CLI::Range(1, 1'000'000'000).description(""))
      ->type_name("N")
      ->capture_default_str();
  declare_reports(*command, options->reports, "the result as JSON");
  run_when_chosen(*command, options, exit_code, shrink_file);
}

}  // namespace lockstep
