// lockstep mutants [ID...]: does the harness find every known defect?
//
// Plants the defects of the catalogue one by one and searches generated cases for one that fails
// with the defect and agrees without it (properties/mutants/mutant_search.h). A defect that no case
// exposes means that a check or a class of cases is missing: exit status 1.
//
// With --decisions a real engine decides above the backend, and only defects of backends are
// searched for.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <ranges>

#include "base/output_file.h"
#include "base/parallel.h"
#include "base/stop_signal.h"
#include "cli/commands.h"
#include "cli/mutant_bench.h"
#include "cli/options/decisions_option.h"
#include "cli/options/output_option.h"
#include "cli/output/reports.h"
#include "cli/output/terminal.h"
#include "properties/mutants/mutant_search.h"

namespace lockstep {
namespace {

// "2 requests, 3 layers, 9 blocks, 4 steps", or the case in words for a defect of a plan or
// transfer.
std::string minimal_text(const MutantReport& report) {
  if (!report.smallest) return report.plan;
  return fmt::format("{}, {}, {} blocks, {}", counted(report.size.requests, "request"),
                     counted(report.size.layers, "layer"), report.size.blocks,
                     counted(report.steps, "step"));
}

// Returns the time until the middle mutant was caught. REQUIRES: reports is not empty.
double median_seconds(const std::vector<MutantReport>& reports) {
  std::vector<double> seconds;
  for (const MutantReport& report : reports) seconds.push_back(report.seconds);
  std::ranges::nth_element(seconds, seconds.begin() + std::ssize(seconds) / 2);
  return seconds[seconds.size() / 2];
}

std::string list_text(const std::vector<const Mutant*>& mutants) {
  std::string text;
  for (const Mutant* mutant : mutants)
    text += fmt::format("{} ({}, {})\n  what      {}\n  shows     {}\n  found by  {}\n", mutant->id,
                        name_of(mutant->site), mutant->source, mutant->mechanism,
                        mutant->exposed_by, fmt::join(mutant->caught_by, ", "));
  return text + fmt::format("{}\n", counted(std::ssize(mutants), "mutant"));
}

std::string list_json(const std::vector<const Mutant*>& mutants) {
  nlohmann::ordered_json json;
  json["mutants"] = nlohmann::ordered_json::array();
  for (const Mutant* mutant : mutants)
    json["mutants"].push_back({{"id", mutant->id},
                               {"site", name_of(mutant->site)},
                               {"source", mutant->source},
                               {"mechanism", mutant->mechanism},
                               {"exposed_by", mutant->exposed_by},
                               {"caught_by", mutant->caught_by}});
  return json_text(json);
}

std::string mutants_text(const std::vector<MutantReport>& reports) {
  std::string text;
  std::int64_t caught = 0;
  for (const MutantReport& report : reports) {
    caught += report.caught ? 1 : 0;
    // --layout: the defect cannot be expressed in this layout. It counts as neither caught nor
    // missed.
    if (!report.applies()) {
      text += fmt::format("{:<28} none of {} uses this layout\n", report.mutant->id,
                          counted(report.cases, "case"));
      continue;
    }
    if (!report.caught) {
      text += fmt::format("{:<28} NOT CAUGHT in {} ({})\n", report.mutant->id,
                          counted(report.cases, "case"), duration_text(report.seconds));
      if (report.refused > 0)
        text += fmt::format("{:<28} {} refused, the first: {}\n", "",
                            counted(report.refused, "case"), report.refusal);
      continue;
    }
    text += fmt::format("{:<28} {:<26} case {:>4}, {:>7}; {}\n", report.mutant->id,
                        report.failure.check, report.cases, duration_text(report.seconds),
                        minimal_text(report));
    if (!report.as_expected())
      text += fmt::format("{:<28} not the check that the catalogue expects: {}\n", "",
                          fmt::join(report.mutant->caught_by, ", "));
    // Such cases fail for another reason, which the search has found by accident.
    if (report.flawed > 0)
      text += fmt::format("{:<28} {} before it also failed without the defect\n", "",
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
                                    {"cases_refused", report.refused},
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
  return json_text(json);
}

// Writes ID.case.jsonl for every mutant with a shrunk case. Plans and transfers have none.
// `decided_by`: absent: the model decides.
Result<void> save_cases(const std::string& dir, const std::vector<MutantReport>& reports,
                        const std::optional<RecordedEngine>& decided_by) {
  LS_RETURN_IF_ERROR(make_output_folder(dir));
  for (const MutantReport& report : reports) {
    if (!report.smallest) continue;
    SavedCase saved = *report.smallest;
    saved.name = report.mutant->id;
    saved.decided_by = decided_by;
    saved.expected = expected_of(report.failure);
    const auto path = std::filesystem::path(dir) / fmt::format("{}.case.jsonl", report.mutant->id);
    LS_RETURN_IF_ERROR(write_saved_case(path.string(), saved));
  }
  return {};
}

// The options of the command; `search` holds those that the search takes unchanged.
struct MutantsOptions {
  std::vector<std::string> ids;
  bool list = false;
  std::string markdown_path, save_dir;
  ReportOptions reports;
  DecisionsOptions decisions;
  std::string layout;
  int jobs = 1;
  MutantSearchOptions search;
  std::optional<RecordedEngine> decided_by;  // absent: the model
};

// Returns the named mutants in the order given; the whole catalogue without a name.
Result<std::vector<const Mutant*>> chosen(const std::vector<std::string>& ids) {
  std::vector<const Mutant*> mutants;
  for (const std::string& id : ids) {
    const Mutant* mutant = find_mutant(id);
    if (mutant == nullptr)
      return fail("unknown mutant {}; `lockstep mutants --list` lists them", id);
    mutants.push_back(mutant);
  }
  if (ids.empty())
    for (const Mutant& mutant : mutant_catalogue()) mutants.push_back(&mutant);
  return mutants;
}

// Searches for all mutants in `jobs` threads and returns the reports in the order of `mutants`.
// Cases are judged in child processes, so the threads only wait and generate.
std::vector<MutantReport> search_all(const std::vector<const Mutant*>& mutants,
                                     const MutantBench& bench, const MutantsOptions& options) {
  Progress progress("searching", static_cast<std::int64_t>(mutants.size()));
  std::vector<MutantReport> reports(mutants.size());
  std::int64_t done = 0;
  std::mutex line;
  for_each_in_parallel(
      std::ssize(mutants), options.jobs,
      [&](std::int64_t index) {
        const auto i = static_cast<std::size_t>(index);
        reports[i] = search_mutant(*mutants[i], bench, options.search);
        const std::scoped_lock held(line);
        progress.at(++done, mutants[i]->id);
      },
      [] { return !stop_requested(); });
  // A search that a stop signal ended shows nothing about its mutant, unless it has caught it or
  // has used all its cases.
  std::erase_if(reports, [&](const MutantReport& report) {
    return report.mutant == nullptr ||
           (stop_requested() && !report.caught && report.cases < options.search.cases_max);
  });
  return reports;
}

// Starts the engine that decides above the backend, and removes the mutants that cannot be searched
// for below it. Errors: such a mutant that the command line names; several jobs, since one engine
// serves one search at a time.
Result<void> put_below(MutantsOptions& options, MutantBench& bench,
                       std::vector<const Mutant*>& mutants) {
  if (options.jobs > 1) return fail("--jobs with --decisions: an engine runs one search at a time");
  LS_ASSIGN_OR_RETURN(const auto engines, open_decisions(options.decisions));
  options.decided_by = engines->hello().engine;
  bench.decider = {.decisions = decisions_of(engines),
                   .engine = profile_of(*engines),
                   .never = features_to_avoid(engines->hello()),
                   .restart = [engines] { engines->restart(); }};
  for (const Mutant* mutant : mutants)
    if (const std::string why = why_not_below(*bench.decider, *mutant);
        !why.empty() && !options.ids.empty())
      return fail("mutant {} with --decisions: {}", mutant->id, why);
  const auto left_out = std::erase_if(mutants, [&](const Mutant* mutant) {
    return !why_not_below(*bench.decider, *mutant).empty();
  });
  fmt::print("Under the decisions of {}: {}; {} do not apply (other sites, pages or cases)\n",
             engines->hello().engine.text(), counted(std::ssize(mutants), "mutant"), left_out);
  return {};
}

// Adds an item per mutant: failed if it applies and was not caught.
void add_items(const std::vector<MutantReport>& reports, CommandReport& out) {
  for (const MutantReport& report : reports) {
    ReportedItem item{.name = std::string(report.mutant->id)};
    if (!report.caught && report.applies()) {
      item.kind = ItemKind::failed;
      item.check = "mutants";
      item.line = fmt::format("mutants {}: not caught in {}", report.mutant->id,
                              counted(report.cases, "case"));
      item.again = out.again({.arguments = {item.name}, .without = {"--jobs"}});
    }
    out.add(std::move(item));
  }
}

Result<int> mutants(MutantsOptions options, CommandReport& report) {
  LS_ASSIGN_OR_RETURN(auto selected, chosen(options.ids));
  const bool writes_page = !options.markdown_path.empty();
  if (writes_page || options.list) {
    if (writes_page)
      LS_RETURN_IF_ERROR(write_output(options.markdown_path, mutants_markdown()));
    else
      fmt::print("{}", list_text(selected));
    if (report.wants_json()) report.set_json(list_json(selected));
    return kExitAgreed;
  }
  watch_stop_signals();
  if (!options.layout.empty()) {
    options.search.layout = from_name<CacheLayout>(options.layout);
    if (!options.search.layout || !is_overlaid(*options.search.layout))
      return fail("--layout: '{}' is not one of the six layouts ({})", options.layout,
                  fmt::join(kOverlaidLayouts |
                                std::views::transform([](CacheLayout o) { return name_of(o); }),
                            ", "));
  }
  MutantBench bench = mutant_bench();
  if (!options.decisions.decisions.empty()) LS_RETURN_IF_ERROR(put_below(options, bench, selected));
  const std::vector<MutantReport> reports = search_all(selected, bench, options);
  fmt::print("{}", mutants_text(reports));
  if (!options.save_dir.empty())
    LS_RETURN_IF_ERROR(save_cases(options.save_dir, reports, options.decided_by));
  if (report.wants_json()) report.set_json(mutants_json(reports));
  add_items(reports, report);
  // A defect that the layout cannot express is not a missing check.
  const bool all = std::ranges::all_of(
      reports, [](const MutantReport& one) { return one.caught || !one.applies(); });
  return all ? kExitAgreed : kExitDisagreed;
}

}  // namespace

void add_mutants_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<MutantsOptions>();
  CLI::App* command = app.add_subcommand(
      "mutants", "Plant known defects one by one and search for cases that show them");
  command->add_option("ID", options->ids, "ids of mutants (all)");
  command->add_flag("--list", options->list, "describe the mutants; search nothing");
  declare_reports(*command, options->reports, "the result as JSON");
  declare_output(*command, "--markdown", options->markdown_path,
                 "only write the catalogue as a Markdown page");
  declare_output_folder(*command, "--save", options->save_dir, "folder for the minimal cases");
  declare_decisions(*command, options->decisions);
  command->add_option("--jobs", options->jobs, "searches in parallel")->check(CLI::Range(1, 256));
  command->add_option("--cases", options->search.cases_max, "give up after this many cases")
      ->check(CLI::PositiveNumber);
  command->add_option("--seed", options->search.first_seed, "seed of the first case");
  command->add_option("--layout", options->layout,
                      "search only cases with this cache layout: LBNHC, BLHNC, ...");
  command
      ->add_option("--shrink", options->search.shrink_evaluations_max,
                   "most evaluations for shrinking a case; 0: do not shrink")
      ->check(CLI::NonNegativeNumber);
  run_when_chosen(*command, options, exit_code, mutants);
}

}  // namespace lockstep
