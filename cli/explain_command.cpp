// lockstep explain CASE: what happens in a failing case, step by step, and why does it fail?
//
// Judges the case first, then runs it again under observation. Prints the last steps before the
// failure: arrivals, decisions, and which request holds which block; and the finding of
// docs/findings.md, if it is a known one. A recording is explained in the same way, with its own
// decisions.
//
// Not shown: the content of the cache. A divergence quotes the page that differs.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "cli/commands.h"
#include "cli/failing_case.h"
#include "cli/output/reports.h"
#include "cli/output/terminal.h"
#include "properties/explain/explain.h"
#include "properties/explain/explain_text.h"

namespace lockstep {
namespace {

struct ExplainOptions {
  std::string file;
  ReportOptions reports;
  std::size_t steps = 12;  // steps shown before the failure; 0: all
  FailingCaseOptions judging;
};

Result<int> explain_case(ExplainOptions& options, CommandReport& report) {
  LS_RETURN_IF_ERROR(start_engines(options.judging));
  LS_ASSIGN_OR_RETURN(const auto saved, load_case(options.file, options.judging));
  LS_RETURN_IF_ERROR(start_workers(saved, options.judging));
  fmt::print("{}", halves_text(saved, options.judging));
  LS_ASSIGN_OR_RETURN(const auto failure, failure_of(saved, options.judging));
  LS_ASSIGN_OR_RETURN(auto recorded, check_if_recorded(options.file, saved, options.judging));
  report.add(item_of(options.file, failure, recorded, report.again(), saved.expected));
  if (failure.kind == "crash" || failure.kind == "hang") {
    // Only the judge's child process can run such a case: nothing is known about its steps.
    fmt::print("The case ends in a {}: {}\n{}\n", failure.kind, failure.check, failure.what);
    if (report.wants_json())
      return fail("--json: a case that crashes or hangs has no explanation to write");
  } else {
    Explanation explanation = explain_judged(saved, judge_options(saved, options.judging));
    explanation.recorded = recorded;
    if (report.wants_json()) report.set_json(to_json(saved, explanation));
    fmt::print("{}{}", to_text(saved, explanation, {.steps_max = options.steps}),
               finding_text(failure));
  }
  fmt::print("{}", reproduction_text(saved.expected, failure));
  return exit_code_of(saved, failure, recorded);
}

}  // namespace

void add_explain_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<ExplainOptions>();
  CLI::App* command =
      app.add_subcommand("explain", "Explain a case step by step, and why it fails");
  command->add_option("CASE", options->file, "a saved case, or a recording")->required();
  command->add_option("--steps", options->steps, "the last N steps; 0: all")
      ->type_name("N")
      ->capture_default_str();
  declare_judging(*command, options->judging);
  declare_reports(*command, options->reports, "the explanation as JSON");
  run_when_chosen(*command, options, exit_code, explain_case);
}

}  // namespace lockstep
