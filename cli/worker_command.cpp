// lockstep worker ENGINE PATH...: does an engine's own worker handle memory as recorded decisions
// require?
//
// Runs the recordings one after the other on one worker process, which imports its engine once, and
// prints a row per folder. Each run is that of `lockstep replay FILE --backend ENGINE`, without the
// audit; that command shows a single file in detail.
//
// Not checked: what the worker refuses. Refusals are counted by their reason, and the status is 2.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/child_process.h"
#include "base/output_file.h"
#include "base/stop_signal.h"
#include "cli/commands.h"
#include "cli/conform_inputs.h"
#include "cli/options/output_option.h"
#include "cli/options/replay_options.h"
#include "cli/options/worker_option.h"
#include "cli/output/reports.h"
#include "cli/output/terminal.h"
#include "cli/worker_facts.h"
#include "properties/judge/recording_check.h"
#include "sim/conform/conform.h"
#include "sim/step/backend_config.h"

namespace lockstep {
namespace {

struct WorkerCommandOptions {
  std::string engine;
  std::vector<std::string> paths;
  WorkerOptions worker;
  std::int64_t files_max = 0;  // of a folder; 0: all
  std::string json_path;
  std::string facts_dir;  // folder for recordings with worker facts; empty: none
};

// The results of one folder's recordings.
struct Family {
  std::int64_t files = 0, agreed = 0, diverged = 0, parted = 0, steps = 0;
  double seconds = 0;  // in the worker, all steps together
  std::set<std::string> not_checked;
  std::map<std::string, std::int64_t> refused;             // files by reason
  std::vector<std::pair<std::string, std::string>> found;  // file, what
};

using Workers = std::shared_ptr<ForeignEngines>;

// A run on the worker, and what decided in it.
struct WorkerRun {
  RunSummary summary;
  Decides decide = Decides::recording;
};

// Replays one recording on the worker, and with --save-facts writes it together with what the
// worker did in each step.
Result<WorkerRun> run_on_worker(const std::string& file, const WorkerCommandOptions& options,
                                const Workers& workers) {
  ReplayOptions replay;
  replay.file = file;
  replay.run.spec.backend = options.engine;
  replay.run.add(run_field("backend"));
  FactsOfRun facts;
  const bool keeps_facts = !options.facts_dir.empty();
  const BackendOf backend_of = [&](const PreparedReplay&) -> Result<BackendFactory> {
    return worker_factory(workers, keeps_facts ? facts.sink() : FactsSink());
  };
  LS_ASSIGN_OR_RETURN(auto prepared, open_replay(request_of(replay), nullptr, backend_of));
  LS_ASSIGN_OR_RETURN(RunReport report, prepared.session->run());
  WorkerRun run{.summary = std::move(report.summary), .decide = prepared.run.decide};
  if (!keeps_facts) return run;
  // Recordings of different folders may have the same name, so the folder is part of it.
  const std::filesystem::path path(file);
  const std::string name = path.parent_path().filename().string() + "-" + path.filename().string();
  LS_RETURN_IF_ERROR(facts.write(*prepared.recording,
                                 (std::filesystem::path(options.facts_dir) / name).string(),
                                 worker_of(*workers, options.worker)));
  return run;
}

// Returns the first line of an error message without the file's name, so that equal refusals of
// different files count as one.
std::string reason_of(const std::string& message, const std::string& file) {
  std::string reason = message;
  if (reason.starts_with(file)) reason = reason.substr(std::min(reason.size(), file.size() + 1));
  while (!reason.empty() && (reason.front() == ' ' || reason.front() == ':')) reason.erase(0, 1);
  return reason.substr(0, reason.find('\n'));
}

// Runs one file and counts its outcome: refused, diverged, parted or agreed. Exactly one of them
// grows.
void judge_file(const std::string& file, const WorkerCommandOptions& options,
                const Workers& workers, Family& family, std::vector<RefusedFile>& refused) {
  ++family.files;
  const auto run = run_on_worker(file, options, workers);
  if (!run) {
    ++family.refused[reason_of(run.error().message, file)];
    refused.push_back({file, run.error().message});
    return;
  }
  const RunSummary& summary = run->summary;
  family.steps += summary.steps;
  family.not_checked.insert(summary.not_checked.begin(), summary.not_checked.end());
  family.seconds += summary.seconds.execute;
  if (summary.divergence) {
    ++family.diverged;
    family.found.emplace_back(
        file, fmt::format("step {}, {}: {}", summary.divergence->step,
                          name_of(summary.divergence->phase), summary.divergence->message));
    return;
  }
  // `parted`: the worker agrees with the model's decisions, which are not the recorded ones.
  if (run->decide == Decides::recording) {
    ++family.agreed;
  } else if (const auto model = conform_recording(file); !model || model->mismatch) {
    ++family.parted;
    family.found.emplace_back(file, model ? fmt::format("step {}: {}", model->mismatch->step,
                                                        parting_of(*model->mismatch))
                                          : model.error().message);
  } else {
    ++family.agreed;
  }
}

// A row with the counts and the worker's seconds per step; then refusals by reason, and files that
// diverged or parted.
std::string family_text(const std::string& name, const Family& family) {
  std::int64_t refused = 0;
  for (const auto& [reason, count] : family.refused) refused += count;
  std::string text = fmt::format(
      "  {:<36}{:>6}{:>8}{:>9}{:>8}{:>9}{:>9}\n", name, family.files, family.agreed,
      family.diverged, refused, with_commas(family.steps),
      family.steps == 0 ? "" : fmt::format("{:.3f}", family.seconds / double(family.steps)));
  for (const auto& [reason, count] : family.refused)
    text += fmt::format("      refused, {}: {}\n", counted(count, "file"), reason);
  for (const auto& [file, what] : family.found) text += fmt::format("      {}: {}\n", file, what);
  return text;
}

nlohmann::ordered_json family_json(const std::string& name, const Family& family) {
  nlohmann::ordered_json json{{"family", name},
                              {"files", family.files},
                              {"agreed", family.agreed},
                              {"diverged", family.diverged},
                              {"parted", family.parted},
                              {"steps", family.steps},
                              {"seconds", family.seconds},
                              {"not_checked", family.not_checked}};
  json["refused"] = family.refused;
  for (const auto& [file, what] : family.found)
    json["found"].push_back({{"file", file}, {"what", what}});
  return json;
}

Result<int> run_worker(const WorkerCommandOptions& options) {
  watch_stop_signals();
  if (!is_engine_worker(options.engine))
    return fail("ENGINE {}: expected vllm, vllm:DIR or worker:COMMAND", options.engine);
  LS_RETURN_IF_ERROR(check_worker_options(options.engine, options.worker));
  LS_ASSIGN_OR_RETURN(const ConformInputs inputs, find_conform_inputs(options.paths));
  if (inputs.schedules.empty() && !inputs.refused.empty())
    return fail(inputs.refused.front().reason);
  LS_ASSIGN_OR_RETURN(const auto engines, open_workers(options.engine, options.worker));
  fmt::print("{}\n  {:<36}{:>6}{:>8}{:>9}{:>8}{:>9}{:>9}\n",
             worker_of(*engines, options.worker).text(), "folder", "files", "agreed", "diverged",
             "refused", "steps", "s/step");
  std::map<std::string, std::vector<std::string>> folders;
  for (const std::string& file : inputs.schedules)
    folders[std::filesystem::path(file).parent_path().filename().string()].push_back(file);
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  std::int64_t judged = 0, diverged = 0;
  std::set<std::string> not_checked;
  std::vector<RefusedFile> refused = inputs.refused;
  for (const auto& [name, files] : folders) {
    Family family;
    for (const std::string& file : files) {
      if (stop_requested())
        family.not_checked.insert(
            fmt::format("other files: interrupted by {}", signal_name(stop_signal())));
      if (stop_requested() || (options.files_max > 0 && family.files == options.files_max)) break;
      judge_file(file, options, engines, family, refused);
    }
    judged += family.agreed + family.diverged + family.parted;
    not_checked.insert(family.not_checked.begin(), family.not_checked.end());
    diverged += family.diverged;
    fmt::print("{}", family_text(name, family));
    std::fflush(stdout);
    json.push_back(family_json(name, family));
    if (stop_requested()) break;
  }
  fmt::print("{}{}", refused_text(inputs.refused),
             not_checked_text(std::vector(not_checked.begin(), not_checked.end())));
  if (!options.json_path.empty())
    LS_RETURN_IF_ERROR(write_output(options.json_path, json_text(json)));
  if (stop_requested()) return 128 + stop_signal();
  // Refused files outweigh findings. Nothing judged at all is a refusal too.
  if (judged == 0 && refused.empty()) return kExitRefused;
  return judged_exit_code(refused, judged, diverged > 0);
}

}  // namespace

void add_worker_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<WorkerCommandOptions>();
  CLI::App* command = app.add_subcommand(
      "worker", "Run recorded decisions on an engine's own worker, many files in one process");
  command->add_option("ENGINE", options->engine, "vllm[:DIR], or worker:COMMAND")->required();
  command->add_option("PATH", options->paths, "recordings or folders of them")->required();
  declare_worker(*command, options->worker);
  command->add_option("--files", options->files_max, "most files per folder; 0: all")
      ->type_name("N");
  declare_output(*command, "--json", options->json_path, "the table as JSON");
  command
      ->add_option(
          "--save-facts", options->facts_dir,
          "folder for each recording with what the worker did (FOLDER-FILE), for `lockstep audit`")
      ->check(CLI::ExistingDirectory.description(""))
      ->type_name("DIR");
  command->callback([options, &exit_code] { exit_code = exit_status(run_worker(*options)); });
}

}  // namespace lockstep
