// lockstep fit RECORDING...: which policies does an engine without a profile follow?
//
// Searches the table of policies for the combination under which the model decides exactly as
// recorded (sim/conform/fit.h), starting from every release. Prints the nearest release, the
// policies that differ from it with the recording that shows each, and the policies that these
// recordings leave open.
//
// Not checked: whether the recorded decisions are right (`lockstep audit`).
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "base/output_file.h"
#include "base/stop_signal.h"
#include "cli/commands.h"
#include "cli/conform_inputs.h"
#include "cli/options/output_option.h"
#include "cli/output/reports.h"
#include "cli/output/terminal.h"
#include "sim/conform/fit.h"
#include "traces/formats/engine_options.h"

namespace lockstep {
namespace {

struct FitCommandOptions {
  std::vector<std::string> paths;
  std::vector<std::string> left_out;  // releases that must not be found
  std::string save_path;              // engine file of the profile found; empty: none
  std::string cut_path;               // recording that no combination explains; empty: none
  ReportOptions reports;
  int jobs = 1;
};

using Words = std::vector<std::string_view>;

Words words_of(const Policy& policy, const std::vector<std::int64_t>& values) {
  Words words;
  for (const std::int64_t value : values) words.push_back(policy.word(value));
  return words;
}

std::string place_of(const ConformMismatch& mismatch) {
  return mismatch.step < 0 ? mismatch.file
                           : fmt::format("{}, step {}", mismatch.file, mismatch.step);
}

// Lists only policies that differ from the nearest release. Two policies may explain the same
// recordings: the second is printed as an alternative.
std::string nearest_text(const Fit& fit) {
  const EngineProfile& release = engine_profile(fit.nearest->name);
  const auto different = differences(*fit.profile, release);
  std::string text = fmt::format("\nNearest release: {}\n", fit.nearest->name);
  if (different.empty()) return text + "No policy differs from it.\n";
  text += "Policies that differ from it:\n";
  for (const PolicyEvidence& each : fit.evidence) {
    if (std::ranges::find(different, each.policy) == different.end()) continue;
    text += fmt::format("  {} = {} (release: {})", each.policy->name, each.policy->word(each.value),
                        each.policy->word(each.policy->get(release)));
    if (each.first)
      text += fmt::format("; shown by {}, first {}", counted(each.parting, "recording"),
                          place_of(*each.first));
    text += fmt::format("\n    {}\n", each.policy->effect);
    for (const PolicyFlip& flip : each.instead)
      text += fmt::format("    Or instead: {} = {}\n", flip.policy->name,
                          flip.policy->word(flip.value));
  }
  return text;
}

// Lists policies that have another value under which all recordings agree too, and the kind of
// workload that would decide. A policy that no release has ever changed is left out.
std::string undetermined_text(const Fit& fit) {
  std::string text;
  for (const PolicyEvidence& each : fit.evidence) {
    if (each.also.empty() || !each.policy->has_history()) continue;
    if (text.empty()) text = "\nNot determined: these recordings agree with several values.\n";
    text += fmt::format("  {:<36} {}, or {}; shown by {}\n", each.policy->name,
                        each.policy->word(each.value),
                        fmt::join(words_of(*each.policy, each.also), ", "), each.policy->shown_by);
  }
  return text;
}

// Without an agreeing combination the engine has a behaviour outside the table. The recording with
// the shortest agreed beginning shows it first.
std::string verdict_text(const Fit& fit) {
  const auto num_files = std::ssize(fit.summary.files);
  if (fit.is_stopped)
    return fmt::format("\nThe search was stopped. So far {} of {} agree with\n  --engine {}\n",
                       with_commas(fit.summary.agreed), counted(num_files, "recording"),
                       fit.profile->name);
  if (fit.agrees())
    return fmt::format("\nAll {} agree in every field of {}:\n  --engine {}\n",
                       counted(num_files, "recording"), counted(fit.summary.steps, "step"),
                       fit.profile->name);
  const ConformMismatch& parts = *fit.new_behaviour();
  return fmt::format(
      "\nNo combination of policies agrees: the policy table lacks a behaviour of this engine.\n"
      "{} of {} agree with\n  --engine {}\nFirst difference:\n{}: {}\n  recorded  {}\n"
      "  model     {}\n",
      with_commas(fit.summary.agreed), counted(num_files, "recording"), fit.profile->name,
      place_of(parts), parts.what, parts.recorded, parts.model);
}

std::string json_of(const Fit& fit) {
  using Json = nlohmann::ordered_json;
  Json policies = Json::array();
  for (const PolicyEvidence& each : fit.evidence) {
    Json entry = {{"name", each.policy->name},
                  {"value", each.policy->word(each.value)},
                  {"determined", each.is_determined()},
                  {"recordings", each.parting}};
    if (!each.also.empty()) entry["or"] = words_of(*each.policy, each.also);
    for (const PolicyFlip& flip : each.instead)
      entry["instead"].push_back(
          {{"name", flip.policy->name}, {"value", flip.policy->word(flip.value)}});
    if (each.first) entry["first"] = {{"file", each.first->file}, {"step", each.first->step}};
    policies.push_back(std::move(entry));
  }
  Json json = {{"agrees", fit.agrees()},
               {"nearest", fit.nearest->name},
               {"engine", fit.profile->name},
               {"recordings", fit.summary.files.size()},
               {"agreed", fit.summary.agreed},
               {"steps", fit.summary.steps},
               {"tried", fit.tried},
               {"cut_off", cut_off_json(fit.summary.files)},
               {"policies", std::move(policies)}};
  if (const ConformMismatch* parts = fit.new_behaviour())
    json["new_behaviour"] = {{"file", parts->file},
                             {"step", parts->step},
                             {"what", parts->what},
                             {"recorded", parts->recorded},
                             {"model", parts->model}};
  return json_text(json);
}

// Writes the recording that differs first, up to and including the step in which it differs: the
// smallest input that shows the new behaviour.
Result<void> save_cut(const Fit& fit, const std::string& path) {
  const ConformMismatch& parts = *fit.new_behaviour();
  LS_ASSIGN_OR_RETURN(const Recording recording, read_recording(parts.file));
  LS_ASSIGN_OR_RETURN(auto writer, RecordingWriter::create(path, recording.header));
  std::int64_t steps = 0;
  for (const RecordedStep& step : recording.steps) {
    if (step.step > parts.step && parts.step >= 0) break;
    LS_RETURN_IF_ERROR(writer.write(step));
    ++steps;
  }
  // A shortened recording is marked as cut off, because its requests are not finished.
  return writer.close(steps == std::ssize(recording.steps)
                          ? recording.end
                          : RecordingEnd{.steps = steps, .unfinished = {}, .is_cut_off = true});
}

Result<int> run_fit(const FitCommandOptions& options, CommandReport& report) {
  watch_stop_signals();
  LS_ASSIGN_OR_RETURN(const auto inputs, find_conform_inputs(options.paths));
  if (!inputs.refused.empty()) return fail(inputs.refused.front().reason);
  FitOptions fitting{.left_out = {}, .jobs = options.jobs};
  for (const std::string& name : options.left_out) {
    const Release* release = find_release(name);
    if (release == nullptr)
      return fail("--leave-out {}: expected one of {}", name, release_names());
    fitting.left_out.push_back(release);
  }
  if (fitting.left_out.size() >= releases().size()) return fail("--leave-out: no release is left");
  Progress progress("fitting", 0);
  std::int64_t rounds = 0;
  fitting.at = [&](const std::string& what) { progress.at(++rounds, what); };
  Result<Fit> searched = fit_policies(inputs.schedules, fitting);
  if (!searched && stop_requested() && report.wants_json())
    report.set_json(json_text({{"agrees", false}, {"recordings", inputs.schedules.size()}}));
  LS_ASSIGN_OR_RETURN(const Fit fit, std::move(searched));
  if (report.wants_json()) report.set_json(json_of(fit));
  fmt::print("{} of {}, {}\n{}{}{}{}", counted(std::ssize(fit.summary.files), "recording"),
             fit.summary.files.front().engine,
             counted(fit.tried, "combination") + " of policies tried",
             cut_off_lines(fit.summary.files), verdict_text(fit),
             fit.is_stopped ? "" : nearest_text(fit), undetermined_text(fit));
  if (!options.save_path.empty()) {
    LS_RETURN_IF_ERROR(write_output(options.save_path, engine_file_text(*fit.profile)));
    fmt::print("Engine file: {}\n", options.save_path);
  }
  if (!options.cut_path.empty() && fit.new_behaviour() != nullptr) {
    LS_RETURN_IF_ERROR(save_cut(fit, options.cut_path));
    fmt::print("Its recording, cut after that step: {}\n", options.cut_path);
  }
  ReportedItem item{.name = fit.summary.files.front().engine};
  if (const ConformMismatch* parts = fit.new_behaviour()) {
    item.kind = ItemKind::failed;
    item.check = "fit";
    item.line = fmt::format("fit step {} {}: recorded {}, model {}", parts->step, parts->what,
                            parts->recorded, parts->model);
    item.details = verdict_text(fit);
    item.file = parts->file;
  }
  report.add_run(std::move(item));
  return fit.agrees() ? kExitAgreed : kExitDisagreed;
}

}  // namespace

void add_fit_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<FitCommandOptions>();
  options->jobs = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  CLI::App* command =
      app.add_subcommand("fit", "Find the policies of an engine from its recordings");
  command->footer(
      "Starts from every release and ignores the engine that the recordings name.\n"
      "Exit status: 0 a combination of policies agrees with all recordings; 1 none does.");
  command->add_option("RECORDING", options->paths, "recordings of one engine, or folders of them")
      ->required();
  declare_output(*command, "--save", options->save_path,
                 "the profile found as an engine file, for --engine");
  declare_output(*command, "--cut", options->cut_path,
                 "if none agrees: the recording that differs first, cut after that step");
  command->add_option("--leave-out", options->left_out, "releases to exclude");
  declare_reports(*command, options->reports, "the result as JSON");
  command->add_option("--jobs", options->jobs, "recordings in parallel")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  run_when_chosen(*command, options, exit_code, run_fit);
}

}  // namespace lockstep
