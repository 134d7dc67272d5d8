// lockstep conform PATH...: does the model decide exactly as an engine recorded, and plan memory
// the same way?
//
// The model receives the inputs of each recording and must decide the same in every field of every
// step (sim/conform/conform.h). The first difference of a recording ends its comparison. Recorded
// memory plans are derived again, and compared in every size, stride and offset
// (sim/conform/conform_layouts.h).
//
// Not checked: whether the recorded decisions are right (`lockstep audit`), and pages, which are
// neither written nor read.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "base/stop_signal.h"
#include "cli/commands.h"
#include "cli/conform_inputs.h"
#include "cli/output/reports.h"
#include "cli/output/terminal.h"
#include "cuda_backend/views/views.h"
#include "sim/conform/conform.h"
#include "sim/conform/conform_layouts.h"
#include "traces/formats/engine_options.h"

namespace lockstep {
namespace {

// The results of all files.
struct ConformTotals {
  ConformSummary schedules;
  std::vector<LayoutConformance> layouts;
  std::vector<RefusedFile> refused;        // files of both kinds
  std::vector<std::string> not_looked_at;  // what was not compared, one line each

  // files that were compared
  std::int64_t files() const {
    return static_cast<std::int64_t>(schedules.files.size() + layouts.size());
  }
  std::int64_t plans() const {
    std::int64_t plans = 0;
    for (const LayoutConformance& file : layouts) plans += file.plans;
    return plans;
  }
  // recordings and plans that agree: a file of plans counts per plan
  std::int64_t agreed() const {
    std::int64_t agreed = schedules.agreed;
    for (const LayoutConformance& file : layouts) agreed += file.agreed;
    return agreed;
  }
  // The first mismatch of each recording and of each plan, sorted by file.
  std::vector<ConformMismatch> mismatches() const {
    std::vector<ConformMismatch> mismatches;
    for (const ConformFile& file : schedules.files)
      if (file.mismatch) mismatches.push_back(*file.mismatch);
    for (const LayoutConformance& file : layouts)
      for (const LayoutMismatch& plan : file.mismatches) mismatches.push_back(plan.mismatch);
    std::ranges::stable_sort(mismatches, {}, &ConformMismatch::file);
    return mismatches;
  }
};

constexpr std::size_t kMismatchesShown = 10;
constexpr std::int64_t kStuckShown = 3;

// Returns a line per folder with the number of its recordings that agree. An arrow marks a folder
// with a mismatch.
std::string folders_text(const ConformSummary& schedules) {
  struct Folder {
    std::int64_t files = 0, agreed = 0, steps = 0;
  };
  std::map<std::string, Folder> folders;
  for (const ConformFile& file : schedules.files) {
    Folder& folder = folders[std::filesystem::path(file.file).parent_path().string()];
    ++folder.files;
    folder.agreed += file.mismatch ? 0 : 1;
    folder.steps += file.steps;
  }
  std::size_t widest = 0;
  for (const auto& [name, folder] : folders) widest = std::max(widest, name.size());
  std::string text;
  for (const auto& [name, folder] : folders)
    text += fmt::format("  {:<{}}  {:>4} of {:>4} agree  {:>9} steps{}\n", name, widest,
                        folder.agreed, folder.files, with_commas(folder.steps),
                        folder.agreed == folder.files ? "" : "  <--");
  return text;
}

// Returns a line per file of plans.
std::string layouts_text(const std::vector<LayoutConformance>& layouts) {
  std::string text;
  for (const LayoutConformance& file : layouts)
    text += fmt::format("  {}  {} of {} agree, {} compared{}\n", file.file,
                        with_commas(file.agreed), counted(file.plans, "plan"),
                        counted(file.views, "view"), file.agreed == file.plans ? "" : "  <--");
  return text;
}

std::string mismatch_text(const ConformMismatch& mismatch) {
  // Step -1: the header or the end line differs.
  const std::string place =
      mismatch.step < 0 ? mismatch.file : fmt::format("{}, step {}", mismatch.file, mismatch.step);
  return fmt::format("\n{}: {}\n  recorded  {}\n  model     {}\n", place, mismatch.what,
                     mismatch.recorded, mismatch.model);
}

// Returns a value as JSON. A schedule's values are JSON text; a plan's may be plain text, which
// becomes a string.
nlohmann::ordered_json value_of(const std::string& text) {
  auto json = nlohmann::ordered_json::parse(text, nullptr, false);
  return json.is_discarded() ? nlohmann::ordered_json(text) : json;
}

// Returns the engines that were compared with another engine's profile, {engine: profile}. A
// version without a profile is compared with the nearest release, so its mismatches may be real
// differences.
std::map<std::string, std::string> strangers_of(const ConformSummary& schedules) {
  std::map<std::string, std::string> strangers;
  for (const ConformFile& file : schedules.files)
    if (file.engine != file.judged_as) strangers[file.engine] = file.judged_as;
  return strangers;
}

std::vector<std::string> not_checked_of(const ConformTotals& totals) {
  std::vector<std::string> not_checked = {"memory: no page is written or read"};
  if (!totals.schedules.files.empty())
    not_checked.emplace_back("whether recorded decisions are right: `lockstep audit`");
  return not_checked;
}

// Lists recordings that end in a deadlock of the engine. They count as agreed if the model decides
// the same.
std::string stuck_text(const ConformSummary& schedules) {
  if (schedules.stuck == 0) return {};
  std::string text = fmt::format(
      "{} in a deadlock:\n",
      schedules.stuck == 1 ? "1 recording ends" : with_commas(schedules.stuck) + " recordings end");
  std::int64_t shown = 0;
  for (const ConformFile& file : schedules.files)
    if (file.is_stuck && ++shown <= kStuckShown)
      text += fmt::format("  {}: {}\n", file.file, on_one_line(file.wait_cycle));
  if (shown > kStuckShown)
    text += fmt::format("  ... and {} more (--json FILE lists them all)\n",
                        with_commas(shown - kStuckShown));
  return text;
}

std::string summary_text(const ConformTotals& totals) {
  std::string text;
  for (const auto& [engine, judged_as] : strangers_of(totals.schedules))
    text += fmt::format("{} is compared with the profile {}.\n", engine, judged_as);
  text += folders_text(totals.schedules) + layouts_text(totals.layouts);
  const std::vector<ConformMismatch> mismatches = totals.mismatches();
  const std::size_t shown = std::min(mismatches.size(), kMismatchesShown);
  for (std::size_t i = 0; i < shown; ++i) text += mismatch_text(mismatches[i]);
  if (shown < mismatches.size())
    text +=
        fmt::format("\n... and {} more (--json FILE lists them all)\n", mismatches.size() - shown);
  text += refused_text(totals.refused) + "\n";
  if (!totals.schedules.files.empty())
    text +=
        fmt::format("{} of {} agree in every field of {}.\n", with_commas(totals.schedules.agreed),
                    counted(static_cast<std::int64_t>(totals.schedules.files.size()), "recording"),
                    counted(totals.schedules.steps, "step"));
  if (!strangers_of(totals.schedules).empty() && !mismatches.empty())
    text += "`lockstep fit` finds the policies that this engine follows.\n";
  text += stuck_text(totals.schedules);
  text += cut_off_lines(totals.schedules.files);
  if (!totals.layouts.empty())
    text += fmt::format("{} of {} agree in every size, stride and offset.\n",
                        with_commas(totals.agreed() - totals.schedules.agreed),
                        counted(totals.plans(), "plan"));
  for (const std::string& what : totals.not_looked_at)
    text += fmt::format("Not compared: {}.\n", what);
  return text + not_checked_text(not_checked_of(totals));
}

// Keys: files, plans, agreed, steps, stuck, stuck_in: [{file, what}], cut_off: [{file, what}],
// judged_as: {engine: profile}, not_looked_at, not_checked, mismatches: [{file, step, what,
// recorded, model}], refused, refusals: [{file, reason}]. `step` is -1 for the header, and the line
// number in a file of plans.
std::string summary_json(const ConformTotals& totals) {
  using Json = nlohmann::ordered_json;
  Json mismatches = Json::array();
  for (const ConformMismatch& mismatch : totals.mismatches())
    mismatches.push_back({{"file", mismatch.file},
                          {"step", mismatch.step},
                          {"what", mismatch.what},
                          {"recorded", value_of(mismatch.recorded)},
                          {"model", value_of(mismatch.model)}});
  Json stuck = Json::array();
  for (const ConformFile& file : totals.schedules.files)
    if (file.is_stuck) stuck.push_back({{"file", file.file}, {"what", file.wait_cycle}});
  const Json json = {{"files", totals.files()},
                     {"plans", totals.plans()},
                     {"agreed", totals.agreed()},
                     {"steps", totals.schedules.steps},
                     {"stuck", totals.schedules.stuck},
                     {"stuck_in", std::move(stuck)},
                     {"cut_off", cut_off_json(totals.schedules.files)},
                     {"judged_as", strangers_of(totals.schedules)},
                     {"not_looked_at", totals.not_looked_at},
                     {"not_checked", not_checked_of(totals)},
                     {"mismatches", std::move(mismatches)},
                     {"refused", totals.refused.size()},
                     {"refusals", refused_json(totals.refused)}};
  return json_text(json);
}

struct ConformCommandOptions {
  std::vector<std::string> paths;
  std::string engine;
  ReportOptions reports;
  int jobs = 1;
};

// Derives the views of a plan as the CUDA backend does, under the layout rule of the recorded
// engine. Only recordings of plans before the overlaid layout have such views.
Result<PoolViews> backend_views(const KVCacheConfig& plan, AttentionBackend backend,
                                CacheLayout layout) {
  return cuda::derive_views(
      plan, {.backend = backend, .layout = layout, .rule = LayoutRule::vllm_0_22_1});
}

// Compares all inputs. Recordings run in `jobs` threads; files of plans run one after the other. A
// stop signal ends both, and the totals cover what was compared.
ConformTotals compare(ConformInputs inputs, const std::string& engine, int jobs) {
  ConformTotals totals;
  totals.refused = std::move(inputs.refused);
  if (inputs.others > 0)
    totals.not_looked_at.push_back(counted(inputs.others, "file") + " that conform does not read");
  Progress progress("conforming", static_cast<std::int64_t>(inputs.schedules.size()));
  std::int64_t done = 0;
  if (!inputs.schedules.empty()) {
    totals.schedules =
        conform_recordings(std::move(inputs.schedules),
                           {.engine = engine, .jobs = jobs, .done = [&](const std::string& file) {
                              progress.at(++done, file);
                            }});
    const auto& refused = totals.schedules.refused;
    totals.refused.insert(totals.refused.end(), refused.begin(), refused.end());
  }
  for (const std::string& path : inputs.layouts) {
    if (stop_requested()) break;
    auto layouts = conform_layouts(path, backend_views);
    if (layouts)
      totals.layouts.push_back(std::move(*layouts));
    else
      totals.refused.push_back({path, layouts.error().message});
  }
  sort_and_unite(totals.refused);
  return totals;
}

ReportedItem mismatch_item(const std::string& name, const ConformMismatch& mismatch,
                           const CommandReport& report) {
  return {.name = name,
          .kind = ItemKind::failed,
          .check = "conform",
          .line = fmt::format("conform step {} {}: recorded {}, model {}", mismatch.step,
                              mismatch.what, mismatch.recorded, mismatch.model),
          .details = mismatch_text(mismatch),
          .file = mismatch.file,
          .again = report.again({.arguments = {mismatch.file}, .without = {"--jobs"}})};
}

// Adds an item per recording, per plan with a mismatch, per file of plans without one, and per
// refused file.
void add_items(const ConformTotals& totals, CommandReport& report) {
  for (const ConformFile& file : totals.schedules.files)
    report.add(file.mismatch ? mismatch_item(file.file, *file.mismatch, report)
                             : ReportedItem{.name = file.file, .file = file.file});
  for (const LayoutConformance& file : totals.layouts) {
    for (const LayoutMismatch& plan : file.mismatches)
      report.add(mismatch_item(file.file, plan.mismatch, report));
    if (file.mismatches.empty()) report.add({.name = file.file, .file = file.file});
  }
  add_refused(totals.refused, report);
}

Result<int> conform(const ConformCommandOptions& options, CommandReport& report) {
  watch_stop_signals();
  std::string engine;
  if (!options.engine.empty()) {
    LS_ASSIGN_OR_RETURN(engine, engine_named("--engine", options.engine));
  }
  LS_ASSIGN_OR_RETURN(auto inputs, find_conform_inputs(options.paths));
  // Nothing compared: the refusals are the whole output, and go to standard error.
  const ConformTotals totals = compare(std::move(inputs), engine, options.jobs);
  if (report.wants_json()) report.set_json(summary_json(totals));
  if (totals.files() > 0) fmt::print("{}", summary_text(totals));
  add_items(totals, report);
  return judged_exit_code(totals.refused, totals.files(), !totals.mismatches().empty());
}

}  // namespace

void add_conform_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<ConformCommandOptions>();
  options->jobs = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  CLI::App* command = app.add_subcommand(
      "conform", "Compare the model's decisions with an engine's recording, field by field");
  command->footer(
      "A file that cannot be checked is refused with a reason; the others are still checked.\n"
      "Exit status: 0 all agree; 1 some differ; 2 a file is refused, whatever the others give.");
  command->add_option("PATH", options->paths, "recordings or folders of them")->required();
  command->add_option("--engine", options->engine,
                      "profile or engine file to compare with (the recording's engine)");
  declare_reports(*command, options->reports, "the result as JSON");
  command->add_option("--jobs", options->jobs, "files in parallel")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  run_when_chosen(*command, options, exit_code, conform);
}

}  // namespace lockstep
