#include "cli/mutants_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/terminal.h"

namespace lockstep {
namespace {

std::string minimal_text(const MutantReport& report) {
  if (!report.smallest) return report.plan;
  return fmt::format("{}, {}, {} blocks, {}", counted(report.size.requests, "request"),
                     counted(report.size.layers, "layer"), report.size.blocks,
                     counted(report.steps, "step"));
}

double median_seconds(const std::vector<MutantReport>& reports) {
  std::vector<double> seconds;
  for (const MutantReport& report : reports) seconds.push_back(report.seconds);
  std::ranges::nth_element(seconds, seconds.begin() + std::ssize(seconds) / 2);
  return seconds[seconds.size() / 2];
}

}  // namespace

std::string list_text(const std::vector<const Mutant*>& mutants) {
  std::string text;
  for (const Mutant* mutant : mutants)
    text += fmt::format("{} ({}, {})\n  what      {}\n  shows     {}\n  found by  {}\n", mutant->id,
                        name_of(mutant->site), mutant->source, mutant->mechanism,
                        mutant->exposed_by, fmt::join(mutant->caught_by, ", "));
  return text + fmt::format("{}\n", counted(std::ssize(mutants), "mutant"));
}

std::string mutants_text(const std::vector<MutantReport>& reports) {
  std::string text;
  std::int64_t caught = 0;
  for (const MutantReport& report : reports) {
    caught += report.caught ? 1 : 0;
    if (!report.caught) {
      text += fmt::format("{:<28} NOT CAUGHT in {} ({})\n", report.mutant->id,
                          counted(report.cases, "case"), duration_text(report.seconds));
      continue;
    }
    text += fmt::format("{:<28} {:<26} case {:>4}, {:>7}; {}\n", report.mutant->id,
                        report.failure.check, report.cases, duration_text(report.seconds),
                        minimal_text(report));
    if (!report.as_expected())
      text += fmt::format("{:<28} not a check that the catalogue expects: {}\n", "",
                          fmt::join(report.mutant->caught_by, ", "));
    if (report.flawed > 0)
      text += fmt::format("{:<28} {} before it failed without the defect too\n", "",
                          counted(report.flawed, "case"));
  }
  return text + fmt::format("\n{} of {} caught; median {}\n", caught,
                            counted(std::ssize(reports), "mutant"),
                            reports.empty() ? "-" : duration_text(median_seconds(reports)));
}

std::string mutants_json(const std::vector<MutantReport>& reports) {
  nlohmann::ordered_json json;
  json["mutants"] = nlohmann::ordered_json::array();
  std::int64_t caught = 0;
  for (const MutantReport& report : reports) {
    caught += report.caught ? 1 : 0;
    nlohmann::ordered_json entry = {{"id", report.mutant->id},
                                    {"site", name_of(report.mutant->site)},
                                    {"source", report.mutant->source},
                                    {"caught", report.caught},
                                    {"as_expected", report.as_expected()},
                                    {"kind", report.failure.kind},
                                    {"check", report.failure.check},
                                    {"what", report.failure.what},
                                    {"seed", report.seed},
                                    {"cases", report.cases},
                                    {"cases_that_fail_without_it", report.flawed},
                                    {"seconds", report.seconds},
                                    {"shrink_seconds", report.shrink_seconds}};
    if (report.smallest)
      entry["smallest"] = {{"requests", report.size.requests}, {"tokens", report.size.tokens},
                           {"groups", report.size.groups},     {"layers", report.size.layers},
                           {"blocks", report.size.blocks},     {"steps", report.steps},
                           {"is_minimal", report.is_minimal}};
    if (!report.plan.empty()) entry["plan"] = report.plan;
    json["mutants"].push_back(std::move(entry));
  }
  json["caught"] = caught;
  json["of"] = reports.size();
  return json.dump(2) + "\n";
}

Result<void> save_cases(const std::string& dir, const std::vector<MutantReport>& reports) {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::create_directories(dir, error);
  if (error) return fail(fmt::format("{}: {}", dir, error.message()));
  for (const MutantReport& report : reports) {
    if (!report.smallest) continue;
    SavedCase saved = *report.smallest;
    saved.name = report.mutant->id;
    const auto path = fs::path(dir) / fmt::format("{}.case.jsonl", report.mutant->id);
    if (auto written = write_saved_case(path.string(), saved); !written) return written;
  }
  return {};
}

}  // namespace lockstep
