#include "cli/conform_summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "cli/conform_inputs.h"
#include "cli/terminal.h"

namespace lockstep {
namespace {

constexpr std::size_t kMismatchesShown = 10;

// One line for each folder: how many of its recordings agree.
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
  for (const auto& [name, folder] : folders) {
    text += fmt::format("  {:<{}}  {:>4} of {:>4} agree  {:>9} steps{}\n", name, widest,
                        folder.agreed, folder.files, with_commas(folder.steps),
                        folder.agreed == folder.files ? "" : "  <--");
  }
  return text;
}

std::string layouts_text(const std::vector<LayoutConformance>& layouts) {
  std::string text;
  for (const LayoutConformance& file : layouts) {
    text += fmt::format("  {}  {} of {} agree, {} compared{}\n", file.file,
                        with_commas(file.agreed), counted(file.plans, "plan"),
                        counted(file.views, "view"), file.agreed == file.plans ? "" : "  <--");
  }
  return text;
}

std::string mismatch_text(const ConformMismatch& mismatch) {
  const std::string place =
      mismatch.step < 0 ? mismatch.file : fmt::format("{}, step {}", mismatch.file, mismatch.step);
  return fmt::format("\n{}: {}\n  recorded  {}\n  model     {}\n", place, mismatch.what,
                     mismatch.recorded, mismatch.model);
}

// Recorded values are JSON where they come from a schedule and plain text where from a plan.
nlohmann::ordered_json value_of(const std::string& text) {
  auto json = nlohmann::ordered_json::parse(text, nullptr, false);
  return json.is_discarded() ? nlohmann::ordered_json(text) : json;
}

}  // namespace

std::int64_t ConformTotals::files() const {
  return static_cast<std::int64_t>(schedules.files.size() + layouts.size());
}

std::int64_t ConformTotals::plans() const {
  std::int64_t plans = 0;
  for (const LayoutConformance& file : layouts) plans += file.plans;
  return plans;
}

std::int64_t ConformTotals::agreed() const {
  std::int64_t agreed = schedules.agreed;
  for (const LayoutConformance& file : layouts) agreed += file.agreed;
  return agreed;
}

std::vector<ConformMismatch> ConformTotals::mismatches() const {
  std::vector<ConformMismatch> mismatches;
  for (const ConformFile& file : schedules.files) {
    if (file.mismatch) mismatches.push_back(*file.mismatch);
  }
  for (const LayoutConformance& file : layouts) {
    for (const LayoutMismatch& plan : file.mismatches) mismatches.push_back(plan.mismatch);
  }
  return mismatches;
}

std::string summary_text(const ConformTotals& totals) {
  std::string text = folders_text(totals.schedules) + layouts_text(totals.layouts);
  const std::vector<ConformMismatch> mismatches = totals.mismatches();
  const std::size_t shown = std::min(mismatches.size(), kMismatchesShown);
  for (std::size_t i = 0; i < shown; ++i) text += mismatch_text(mismatches[i]);
  if (shown < mismatches.size()) {
    text +=
        fmt::format("\n... and {} more (--json FILE holds them all)\n", mismatches.size() - shown);
  }
  text += refused_text(totals.refused) + "\n";
  if (!totals.schedules.files.empty()) {
    text +=
        fmt::format("{} of {} agree in every field of {}.\n", with_commas(totals.schedules.agreed),
                    counted(static_cast<std::int64_t>(totals.schedules.files.size()), "recording"),
                    counted(totals.schedules.steps, "step"));
  }
  if (totals.schedules.stuck > 0) {
    text += fmt::format(
        "{} with requests that wait for each other for ever; lockstep audit names them.\n",
        totals.schedules.stuck == 1 ? "1 recording ends"
                                    : with_commas(totals.schedules.stuck) + " recordings end");
  }
  if (!totals.layouts.empty()) {
    text += fmt::format("{} of {} agree in every size, stride and offset.\n",
                        with_commas(totals.agreed() - totals.schedules.agreed),
                        counted(totals.plans(), "plan"));
  }
  for (const std::string& what : totals.not_looked_at) {
    text += fmt::format("Not looked at: {}.\n", what);
  }
  return text;
}

std::string summary_json(const ConformTotals& totals) {
  using Json = nlohmann::ordered_json;
  Json mismatches = Json::array();
  for (const ConformMismatch& mismatch : totals.mismatches()) {
    mismatches.push_back({{"file", mismatch.file},
                          {"step", mismatch.step},
                          {"what", mismatch.what},
                          {"recorded", value_of(mismatch.recorded)},
                          {"model", value_of(mismatch.model)}});
  }
  const Json json = {{"files", totals.files()},
                     {"plans", totals.plans()},
                     {"agreed", totals.agreed()},
                     {"steps", totals.schedules.steps},
                     {"stuck", totals.schedules.stuck},
                     {"not_looked_at", totals.not_looked_at},
                     {"mismatches", std::move(mismatches)},
                     {"refused", totals.refused.size()},
                     {"refusals", refused_json(totals.refused)}};
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace lockstep
