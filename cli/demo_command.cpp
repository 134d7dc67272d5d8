// lockstep demo: shows in a few seconds what the other commands do, on a bundled trace.
//
// Four parts: the trace agrees with the model; a planted defect is found; the failing case is
// shrunk; the smallest case is explained. Each part uses the same library calls as `replay`,
// `shrink` and `explain`. It runs on the CPU executor, so it needs neither a GPU nor an engine.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

#include "base/data_root.h"
#include "base/output_file.h"
#include "base/stopwatch.h"
#include "cli/commands.h"
#include "cli/failing_case.h"
#include "cli/options/output_option.h"
#include "cli/options/replay_options.h"
#include "cli/output/reports.h"
#include "cli/output/terminal.h"
#include "cli/replay_summary.h"
#include "properties/explain/explain.h"
#include "properties/explain/explain_text.h"

namespace lockstep {
namespace {

// A backend defect that this trace exposes: one token's slot is lost.
constexpr std::string_view kDefect = "drop-slot";
constexpr std::string_view kTrace = "shared_prefixes.jsonl";

struct DemoOptions {
  std::string save_dir;  // empty: nothing is kept
  ReportOptions reports;
};

// Flushes, so that a heading appears before the work that it announces.
void heading(int number, std::string_view text) {
  fmt::print("{}{}. {}\n", number == 1 ? "" : "\n", number, text);
  std::fflush(stdout);
}

// A replay of the trace on the CPU executor. `defect`: planted in the backend; empty: none. Only
// the run with a defect keeps what a saved case needs.
ReplayRequest request_for(const std::string& trace, std::string_view defect) {
  ReplayOptions options;
  options.file = trace;
  options.run.set_text("backend", "simt");
  if (!defect.empty()) options.run.set_text("mutants", defect);
  ReplayRequest request = request_of(options);
  request.saves = !defect.empty();
  request.as_served = true;
  return request;
}

// Errors: the run does not agree, which only a broken installation explains.
Result<void> show_agreement(const std::string& trace, CommandReport& out) {
  heading(1, fmt::format("{} on vLLM-style kernels, compared with the model", kTrace));
  LS_ASSIGN_OR_RETURN(auto open, open_replay(request_for(trace, {})));
  fmt::print("{}\n", configuration_text(open));
  std::fflush(stdout);
  LS_ASSIGN_OR_RETURN(const RunReport report, open.session->run());
  fmt::print("{}", summary_text(report.summary, open));
  if (report.summary.verdict != Verdict::agreed)
    return fail("the bundled trace does not agree: something is wrong with this installation");
  fmt::print("\nAgreed. Every step compared equal.\n");
  out.add({.name = std::string(kTrace)});
  return {};
}

Result<SavedCase> find_defect(const std::string& trace) {
  heading(2, fmt::format("The same with a planted defect, {}: one token's slot is lost", kDefect));
  const ReplayRequest request = request_for(trace, kDefect);
  LS_ASSIGN_OR_RETURN(auto open, open_replay(request));
  LS_ASSIGN_OR_RETURN(const RunReport report, open.session->run());
  if (!report.summary.divergence)
    return fail("the planted defect was not found: something is wrong with this installation");
  fmt::print("{}", to_text(*report.summary.divergence));
  return case_of(request, open, report);
}

Result<int> demo(const DemoOptions& options, CommandReport& out) {
  Stopwatch clock;
  const std::string trace = (data_root() / "traces" / "samples" / kTrace).string();
  LS_RETURN_IF_ERROR(show_agreement(trace, out));
  LS_ASSIGN_OR_RETURN(const SavedCase saved, find_defect(trace));
  heading(3, "Shrunk to the minimal case");
  const FailingCaseOptions judging;
  LS_ASSIGN_OR_RETURN(const Failure failure, failure_of(saved, judging));
  LS_ASSIGN_OR_RETURN(const ShrunkCase shrunk, shrink_case(saved, failure, judging));
  fmt::print("{}", to_text(shrunk));
  heading(4, "Explained");
  const SavedCase& smallest = shrunk.result.smallest;
  fmt::print("{}", to_text(smallest, explain(smallest, backend_factory("simt"))));
  if (!options.save_dir.empty()) {
    LS_RETURN_IF_ERROR(make_output_folder(options.save_dir));
    const auto path = std::filesystem::path(options.save_dir) / "demo.min.case.jsonl";
    LS_RETURN_IF_ERROR(write_saved_case(path.string(), smallest));
    fmt::print("\nSaved: {}\n", path.string());
  }
  out.add({.name = fmt::format("{} is found", kDefect)});
  fmt::print(
      "\nDone in {}. Yours: `lockstep replay TRACE --backend FILE.so` for kernels, `lockstep "
      "audit\nRECORDING` for a scheduler, `lockstep --help` for the rest.\n",
      duration_text(clock.lap()));
  return kExitAgreed;
}

}  // namespace

void add_demo_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<DemoOptions>();
  CLI::App* command = app.add_subcommand(
      "demo", "See it in seconds: a trace agrees, a planted defect is found, shrunk and explained");
  declare_output_folder(*command, "--save", options->save_dir, "folder for the minimal case");
  run_when_chosen(*command, options, exit_code, demo);
}

}  // namespace lockstep
