// lockstep check-adapter ENGINE: does a process speak docs/protocols.md?
//
// Sends every message, every kind of refusal, and a few cases of each feature that the engine
// claims (properties/adapter/adapter_check.h). A check of a feature that is not claimed is skipped
// and reported as skipped.
//
// Not checked: whether the engine decides correctly. `lockstep fuzz --decisions ENGINE` does that.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/commands.h"
#include "cli/options/decisions_option.h"
#include "cli/output/reports.h"
#include "cli/output/terminal.h"
#include "properties/adapter/adapter_check.h"

namespace lockstep {
namespace {

struct CheckAdapterOptions {
  DecisionsOptions decisions;
  ReportOptions reports;
};

// {engine, checks: [{check, verdict: holds | fails | skipped, what, why}]}
std::string json_of(const std::string& engine, const std::vector<AdapterCheck>& checks) {
  using Json = nlohmann::ordered_json;
  Json json = {{"engine", engine}, {"checks", Json::array()}};
  for (const AdapterCheck& check : checks) {
    Json entry = {{"check", check.name},
                  {"verdict", !check.skipped.empty() ? "skipped"
                              : check.what.empty()   ? "holds"
                                                     : "fails"}};
    if (!check.what.empty()) entry["what"] = check.what;
    if (!check.skipped.empty()) entry["why"] = check.skipped;
    json["checks"].push_back(std::move(entry));
  }
  return json_text(json);
}

void add_items(const std::vector<AdapterCheck>& checks, CommandReport& report) {
  for (const AdapterCheck& check : checks) {
    ReportedItem item{.name = check.name};
    if (!check.skipped.empty()) {
      item.kind = ItemKind::skipped;
      item.line = check.skipped;
    } else if (!check.what.empty()) {
      item.kind = ItemKind::failed;
      item.check = "adapter";
      item.line = fmt::format("{}: {}", check.name, check.what);
    }
    report.add(std::move(item));
  }
}

Result<int> run_checks(const CheckAdapterOptions& options, CommandReport& report) {
  LS_ASSIGN_OR_RETURN(const auto engines, open_decisions(options.decisions));
  const std::string name = engines->hello().engine.text();
  fmt::print("{}\n", name);
  const auto print = [](const AdapterCheck& check) {
    if (!check.skipped.empty())
      fmt::print("  skipped  {} ({})\n", check.name, check.skipped);
    else if (check.what.empty())
      fmt::print("  holds    {}\n", check.name);
    else
      fmt::print("  FAILS    {}\n           {}\n", check.name, check.what);
    // A check may take seconds: each line is shown when its check ends.
    std::fflush(stdout);
  };
  LS_ASSIGN_OR_RETURN(const auto checks,
                      check_adapter({.engines = engines,
                                     .engine = profile_of(*engines),
                                     .never = features_to_avoid(engines->hello()),
                                     .done = print}));
  const auto failed =
      std::ranges::count_if(checks, [](const AdapterCheck& check) { return !check.what.empty(); });
  const auto skipped = std::ranges::count_if(
      checks, [](const AdapterCheck& check) { return !check.skipped.empty(); });
  fmt::print("\n{} of {} fail, {} skipped\n", failed, counted(std::ssize(checks), "check"),
             skipped);
  if (report.wants_json()) report.set_json(json_of(name, checks));
  add_items(checks, report);
  return failed == 0 ? kExitAgreed : kExitDisagreed;
}

}  // namespace

void add_check_adapter_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<CheckAdapterOptions>();
  options->decisions.option = "ENGINE";
  CLI::App* command = app.add_subcommand(
      "check-adapter", "Check that an engine process speaks the protocol of docs/protocols.md");
  declare_engine_python(*command);
  command
      ->add_option("ENGINE", options->decisions.decisions,
                   "a command that speaks the protocol, vllm[:DIR] or sglang[:DIR]")
      ->required();
  declare_decisions_timeout(*command, options->decisions.timeout_s);
  declare_reports(*command, options->reports, "the checks as JSON");
  run_when_chosen(*command, options, exit_code, run_checks);
}

}  // namespace lockstep
