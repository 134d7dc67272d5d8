// lockstep replay FILE: do the model and a backend agree on every step of this input?
//
// Runs a request trace, a benchmark, a recording or a saved case. The model or an engine decides, a
// backend executes, and after every step tables, slots, pages and outputs are compared with the
// model's expectations. A recording is audited as well; a saved case is judged by the check that
// failed it.
//
// The exit status follows the first of: a refused input, the verdict of the run, a saved failure
// that is not reproduced, recorded totals that are missed.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/output_file.h"
#include "base/stop_signal.h"
#include "cli/commands.h"
#include "cli/failing_case.h"
#include "cli/options/engine_model.h"
#include "cli/options/output_option.h"
#include "cli/options/replay_options.h"
#include "cli/output/reports.h"
#include "cli/output/terminal.h"
#include "cli/replay_summary.h"
#include "cli/worker_facts.h"
#include "properties/judge/known_findings.h"
#include "reference/profiles/engine_profile.h"
#include "sim/report/step_hasher.h"
#include "sim/report/timeline.h"
#include "sim/step/backend_config.h"

namespace lockstep {
namespace {

// Returns the output path of one data parallel rank: "out.dp1.json" for "out.json". With one
// engine, and for a device, the path itself.
std::string path_of_rank(const std::string& path, std::size_t dp_rank, std::size_t dp_size) {
  const std::filesystem::path whole(path);
  // A device takes the output of every rank.
  if (dp_size == 1 || (exists(whole) && !is_regular_file(whole))) return path;
  return (whole.parent_path() /
          fmt::format("{}.dp{}{}", whole.stem().string(), dp_rank, whole.extension().string()))
      .string();
}

// With several engines, these outputs are a file per data parallel rank. None may be another file
// of the command.
Result<void> check_outputs_of_ranks(const ReplayOptions& options, std::size_t dp_size) {
  if (dp_size == 1) return {};
  std::vector<std::string> taken = {options.file, options.reports.json_path,
                                    options.reports.junit_path, options.reports.summary_path};
  for (const std::string& path : {options.hashes_path, options.cache_events_path,
                                  options.report_path, options.perfetto_path}) {
    if (path == "-")
      return fail("-: each of {} data parallel ranks writes a file of its own; name one", dp_size);
    for (std::size_t rank = 0; rank < dp_size && !path.empty(); ++rank) {
      const std::string of_rank = path_of_rank(path, rank, dp_size);
      if (std::ranges::any_of(taken, [&](const auto& at) { return is_same_file(at, of_rank); }))
        return fail("{}: data parallel rank {} would write it, and the command already names it",
                    of_rank, rank);
      taken.push_back(of_rank);
    }
  }
  return {};
}

// Observes one engine: shows progress, collects the events of the prefix cache, and ends the run at
// a stop signal, after the current step.
class WatchSteps final : public StepObserver {
 public:
  // `shows`: true for one of several engines, which shows the progress of all of them.
  WatchSteps(const ReplayOptions& options, const OpenReplay& prepared, bool shows)
      : clients_(prepared.session->clients()), collects_(!options.cache_events_path.empty()) {
    if (shows) progress_.emplace("replaying", prepared.num_records);
  }

  bool finished(const StepView& view) override {
    if (is_shown())
      progress_->at(clients_.records_consumed(),
                    fmt::format("step {}", with_commas(view.decision.step)));
    if (collects_) cache_events_ += cache_events_line(view.decision.step, view.cache_events);
    return !stop_requested();
  }
  const std::string& cache_events() const { return cache_events_; }

 private:
  bool is_shown() const { return progress_ && progress_->shown(); }

  const Workload& clients_;
  std::optional<Progress> progress_;
  const bool collects_;
  std::string cache_events_;
};

// Opens a hasher per engine; none without --hashes. A deque, because the session refers to them.
Result<std::deque<StepHasher>> open_hashers(const ReplayOptions& options, OpenReplay& prepared) {
  std::deque<StepHasher> hashers;
  if (options.hashes_path.empty()) return hashers;
  const auto engines = prepared.session->engines();
  for (std::size_t rank = 0; rank < engines.size(); ++rank) {
    const auto& ranks = engines[rank].ranks;
    const StepHashesHeader header{.engine = prepared.config.engine.engine,
                                  .backend = ranks.empty() ? "none" : std::string(ranks[0]->name()),
                                  .has_pages = !ranks.empty()};
    const std::string path = path_of_rank(options.hashes_path, rank, engines.size());
    LS_ASSIGN_OR_RETURN(auto writer, StepHashesWriter::create(path, header));
    StepHasher& hasher = hashers.emplace_back(std::move(writer));
    prepared.session->observe(static_cast<std::int32_t>(rank), hasher);
    prepared.session->check(static_cast<std::int32_t>(rank), hasher);
  }
  return hashers;
}

// Runs the session and writes the outputs that grow with it: hashes, cache events, hidden states.
Result<RunReport> run_with_progress(const ReplayOptions& options, OpenReplay& prepared,
                                    HiddenStateFolder* folder) {
  std::deque<WatchSteps> watches;
  const auto dp_size = static_cast<std::int32_t>(prepared.session->engines().size());
  for (std::int32_t dp_rank = 0; dp_rank < dp_size; ++dp_rank)
    prepared.session->observe(dp_rank, watches.emplace_back(options, prepared, dp_rank == 0));
  if (folder != nullptr)
    prepared.session->give_hidden_states(
        [folder](std::span<const HiddenStates> requests) { return folder->write(requests); });
  LS_ASSIGN_OR_RETURN(auto hashers, open_hashers(options, prepared));
  auto report = prepared.session->run();
  if (!report) return report;
  if (folder != nullptr)
    fmt::print("Hidden states: {} in {} ({})\n\n", counted(folder->num_files(), "file"),
               options.hidden_states_dir, size_text(folder->num_bytes()));
  for (std::size_t rank = 0; rank < hashers.size(); ++rank)
    LS_RETURN_IF_ERROR(hashers[rank].close(
        report->engines.empty() ? report->summary : report->engines[rank], stop_requested()));
  if (options.cache_events_path.empty()) return report;
  for (std::size_t rank = 0; rank < watches.size(); ++rank) {
    const std::string path = path_of_rank(options.cache_events_path, rank, watches.size());
    LS_RETURN_IF_ERROR(write_output(path, watches[rank].cache_events()));
  }
  return report;
}

int exit_code_of(Verdict verdict) {
  if (passes(verdict)) return kExitAgreed;
  if (verdict == Verdict::liveness) return kExitStuck;
  return verdict == Verdict::harness ? kExitRefused : kExitDisagreed;
}

// Returns the command that repeats the run, without options about its outputs.
std::string again_of(const CommandReport& out) {
  return out.again({.without = {"--shrink", "--shrink-seconds", "--jobs"}});
}

// Writes --report and --perfetto, a file per engine, and prints their paths.
Result<void> leave_drawings(const ReplayOptions& options, const OpenReplay& prepared,
                            const RunReport& report, const std::string& again) {
  const std::size_t dp_size = prepared.session->engines().size();
  for (std::size_t rank = 0; rank < dp_size; ++rank) {
    ReportInfo info{std::filesystem::path(options.file).filename().string(), again,
                    configuration_text(prepared)};
    if (dp_size > 1) info.title += fmt::format(", data parallel rank {} of {}", rank, dp_size);
    const RunSummary& summary = dp_size > 1 ? report.engines[rank] : report.summary;
    const Timeline timeline = prepared.session->take_timeline(static_cast<std::int32_t>(rank));
    std::string_view before = rank == 0 ? "\n" : "";
    if (!options.report_path.empty()) {
      const std::string path = path_of_rank(options.report_path, rank, dp_size);
      LS_RETURN_IF_ERROR(write_html_report(path, info, summary, timeline));
      fmt::print("{}Report: {}\n", std::exchange(before, ""), path);
    }
    if (!options.perfetto_path.empty()) {
      const std::string path = path_of_rank(options.perfetto_path, rank, dp_size);
      LS_RETURN_IF_ERROR(write_output(path, perfetto_trace(info.title, summary, timeline)));
      fmt::print("{}Trace: {} (open it in ui.perfetto.dev)\n", before, path);
    }
  }
  return {};
}

// Returns the case that repeats the run.
Result<SavedCase> case_of_run(const ReplayOptions& options, const OpenReplay& prepared,
                              const RunReport& report, FailingCaseOptions judging) {
  if (prepared.format == FileFormat::saved_case) return load_case(options.file, judging);
  return case_of(request_of(options), prepared, report);
}

// Returns the failure of the run, or the one that the judge found. If another engine decides,
// `finding` is set where the failure is a known defect of its release.
Result<Failure> failure_of(const ReplayOptions& options, const OpenReplay& prepared,
                           const RunReport& report, const FailingCaseOptions& judging,
                           const OtherVerdicts& others) {
  if (others.judged) return *others.judged;
  const Outcome outcome = outcome_of(report.summary);
  Failure failure = failure_of(outcome);
  if (!outcome.failed() || judging.engines == nullptr || stop_requested()) return failure;
  LS_ASSIGN_OR_RETURN(const SavedCase saved, case_of_run(options, prepared, report, judging));
  if (const KnownFinding* known = known_finding(saved, outcome, judge_options(saved, judging)))
    failure.finding = known->number;
  return failure;
}

// Sets the JSON and writes the drawings.
Result<void> leave_result(const ReplayOptions& options, const OpenReplay& prepared,
                          const RunReport& report, const HiddenStateFolder* folder,
                          const OtherVerdicts& others, const Failure& failure, CommandReport& out) {
  if (out.wants_json())
    out.set_json(
        summary_json(options, prepared, report.summary, folder, others.recorded, failure.finding));
  const bool draws = !options.report_path.empty() || !options.perfetto_path.empty();
  return draws ? leave_drawings(options, prepared, report, again_of(out)) : Result<void>();
}

// Sets the verdict of a run that ended because another engine decided differently from the model.
Result<void> take_mismatch(const ConformingRun& conforming, RunReport& report) {
  const LiveConform& live = conforming.live();
  if (live.error()) return fail("--conform: " + live.error()->message);
  if (!live.mismatch() || report.summary.verdict != Verdict::agreed) return {};
  report.summary.verdict = Verdict::mismatch;
  report.summary.mismatch = live.mismatch();
  return {};
}

// Returns the run as one item. `missed`: the recorded totals that the run did not reach; empty:
// none. An interrupted run without a failure is skipped, not passed.
ReportedItem item_of(const ReplayOptions& options, const RunSummary& summary,
                     const OtherVerdicts& others, const std::string& missed,
                     const std::string& reproduction, const std::string& again) {
  ReportedItem item{.name = options.file, .file = options.file, .again = again};
  const bool runs_through = passes(summary.verdict) && missed.empty();
  if (runs_through && reproduction.empty()) {
    if (summary.verdict == Verdict::agreed || summary.verdict == Verdict::parted) return item;
    item.kind = ItemKind::skipped;
    item.line = summary.verdict == Verdict::done
                    ? "nothing was compared"
                    : fmt::format("interrupted after {}", counted(summary.steps, "step"));
    return item;
  }
  item.kind = ItemKind::failed;
  if (runs_through) {
    fail_to_reproduce(item, reproduction);
    return item;
  }
  item.check = name_of(summary.verdict);
  item.details = verdict_text(summary, others);
  if (summary.divergence) {
    const Divergence& found = *summary.divergence;
    item.check = name_of(found.phase);
    item.line = stable_line(item.check, found.step, found.request, found.message);
  } else if (summary.engine_failure) {
    item.line = stable_line(item.check, summary.steps, {}, summary.engine_failure->what);
  } else if (summary.mismatch) {
    item.check = summary.mismatch->check;
    item.line = stable_line(item.check, summary.mismatch->step, {}, summary.mismatch->what);
  } else if (summary.violation) {
    const CheckFailure& found = *summary.violation;
    item.check = found.check;
    item.line = stable_line(found.check, found.step, found.request, found.what);
  } else if (summary.verdict == Verdict::audit) {
    item.check = fmt::format("audit.{}", name_of(others.recorded->findings.front().rule));
    item.line = line_of(others.recorded->findings.front());
  } else if (summary.verdict == Verdict::liveness) {
    item.line = stable_line(
        item.check, summary.steps, {},
        summary.stuck.empty() ? "requests wait forever"
                              : fmt::format("{}: {}", summary.stuck[0].name, summary.stuck[0].why));
  } else {
    item.check = "totals";
    item.line = "totals: differ from the recorded totals";
    item.details = missed;
  }
  return item;
}

// Shrinks the saved case and writes the result next to it. Loads it from the file, so that what is
// shrunk is exactly what a user can repeat. Returns the command that explains it; without a smaller
// case `again`, which runs the saved one.
Result<std::string> leave_smallest(const std::string& path, FailingCaseOptions judging,
                                   const CommandReport& out, std::string again) {
  LS_ASSIGN_OR_RETURN(const auto saved, load_case(path, judging));
  const auto shrunk = shrink_again(saved, judging);
  if (!shrunk) {
    fmt::print("Not shrunk: {}\n", shrunk.error().message);
    return again;
  }
  const std::string smallest = path_of_smallest(path);
  LS_RETURN_IF_ERROR(write_saved_case(smallest, shrunk->result.smallest));
  std::string explanation = out.again_of_case("explain", smallest);
  fmt::print("\nShrunk: {}\nWritten: {}\nExplained: {}\n", to_text(*shrunk), smallest, explanation);
  return explanation;
}

// Returns the path of the case in the folder: FOLDER/NAME.case.jsonl, numbered if another case is
// there. Evidence of an earlier run stays.
std::string free_path(const std::string& folder, SavedCase& saved) {
  const std::string name = saved.name;
  for (int number = 1;; ++number) {
    if (number > 1) saved.name = fmt::format("{}-{}", name, number);
    std::string path = (std::filesystem::path(folder) / (saved.name + ".case.jsonl")).string();
    const auto there = read_saved_case(path);
    std::error_code status;
    if (!std::filesystem::exists(path, status) ||
        (there && saved_case_to_text(*there) == saved_case_to_text(saved)))
      return path;
  }
}

// Saves the failing run as a case, and with --shrink its smallest form. Returns the command that
// shows the failure again; empty: the run did not fail.
Result<std::string> leave_case(const ReplayOptions& options, const OpenReplay& prepared,
                               const RunReport& report, const FailingCaseOptions& judging,
                               const CommandReport& out) {
  const Verdict verdict = report.summary.verdict;
  if (passes(verdict)) return std::string();
  // The recording shows the failure itself. Only a run that follows it is also a case.
  const bool is_followed = prepared.run.decide == Decides::recording;
  if (prepared.recording && verdict == Verdict::audit && judging.engines == nullptr &&
      (options.save_dir.empty() || !is_followed))
    return fmt::format("lockstep {} {}", is_followed ? "explain" : "audit",
                       shell_word(options.file));
  if (options.save_dir.empty()) return again_of(out);
  SavedCase saved = case_of(request_of(options), prepared, report);
  // By the name of its check, the judge finds it again; a replay of the case alone audits nothing.
  if (is_followed && report.summary.violation && saved.expected)
    saved.expected->check = report.summary.violation->check;
  saved.decided_by = decider_of(judging);
  saved.worked_by = worker_of(judging);
  LS_RETURN_IF_ERROR(make_output_folder(options.save_dir));
  const std::string path = free_path(options.save_dir, saved);
  LS_RETURN_IF_ERROR(write_saved_case(path, saved));
  std::string again = out.again_of_case("replay", path);
  fmt::print("Saved: {}\nReproduce: {}\n", path, again);
  if (!options.shrink || stop_requested()) return again;
  return leave_smallest(path, judging, out, std::move(again));
}

// Refuses outputs of ranks that replace a file of the command, options of another worker, and
// --save-facts for an input or backend without facts: they are written into a recording, and only
// an engine's own worker reports them.
Result<void> check_options_of_run(const ReplayOptions& options, const PreparedReplay& prepared) {
  const auto dp_size = static_cast<std::size_t>(prepared.config.data_parallel.dp_size);
  LS_RETURN_IF_ERROR(check_outputs_of_ranks(options, dp_size));
  LS_RETURN_IF_ERROR(check_worker_options(prepared.run.backend, options.worker));
  if (options.facts_path.empty()) return {};
  if (prepared.format != FileFormat::recording)
    return fail("--save-facts: {} is a {}; facts are written into a recording", options.file,
                name_of(prepared.format));
  if (is_engine_worker(prepared.run.backend)) return {};
  return fail(
      "--save-facts: --backend {} is not an engine's worker; expected vllm[:DIR] or worker:COMMAND",
      prepared.run.backend);
}

// A saved case and its outcome here.
struct JudgedCase {
  SavedCase saved;
  Failure failure;
};

// Judges a saved case that names the check that failed it. Absent: another input, or the run itself
// shows the failure. Its run is audited by the rules that the judge applies.
Result<std::optional<JudgedCase>> judge_saved(const ReplayOptions& options,
                                              FailingCaseOptions& judging) {
  LS_ASSIGN_OR_RETURN(const FileFormat format, detect_format(options.file));
  if (format != FileFormat::saved_case) return std::nullopt;
  if (options.run.has("backend")) judging.backend = options.run.spec.backend;
  LS_ASSIGN_OR_RETURN(auto saved, load_case(options.file, judging));
  if (rules_for(saved, judging) == AuditedRules::memory) judging.decisions.audit_policy = "off";
  if (!saved.expected || saved.expected->check.empty()) return std::nullopt;
  LS_RETURN_IF_ERROR(check_options_of_saved_case(request_of(options)));
  LS_RETURN_IF_ERROR(start_workers(saved, judging));
  LS_ASSIGN_OR_RETURN(auto failure, failure_of(saved, judging));
  return JudgedCase{.saved = std::move(saved), .failure = std::move(failure)};
}

// True if a run in this process would not survive the failure (a crash, a hang) or not show it
// (invariants, collectives without a backend).
bool is_judged_alone(const JudgedCase& judged) {
  const Failure& failure = judged.failure;
  return failure.kind == "crash" || failure.kind == "hang" ||
         failure.check.starts_with("invariant.") ||
         (failure.check == "collective" && judged.saved.backend == "none");
}

// Reports a case that only the judge can run.
int leave_judged(const ReplayOptions& options, const JudgedCase& judged, CommandReport& out) {
  const auto& [saved, failure] = judged;
  const std::string words =
      failure.kind == "crash" || failure.kind == "hang"
          ? fmt::format("{} in {}\n  {}", failure.kind, failure.check, failure.what)
          : stable_line(failure.check, failure.step, failure.request, failure.what);
  fmt::print("{} ({})\nVerdict: {}\n{}", options.file, name_of(FileFormat::saved_case), words,
             reproduction_text(saved.expected, failure));
  std::vector<std::string_view> given;
  for (const auto& [option, path] : {std::pair{"--report", &options.report_path},
                                     {"--perfetto", &options.perfetto_path},
                                     {"--hashes", &options.hashes_path},
                                     {"--cache-events", &options.cache_events_path}})
    if (!path->empty()) given.push_back(option);
  if (!given.empty())
    fmt::print("Not written: {}. {} judges this case\n", fmt::join(given, ", "),
               failure.kind == "crash" || failure.kind == "hang" ? "Another process" : "No run");
  if (out.wants_json()) {
    nlohmann::ordered_json json = {{"file", options.file}, {"verdict", expected_of(failure).kind}};
    json.update(json_of(failure));
    out.set_json(json_text(json));
  }
  out.add(item_of(options.file, failure, {}, again_of(out), saved.expected));
  return exit_code_of(saved, failure);
}

// Adds the judge's failure to the summary, unless the run shows it itself. The judge ends at its
// first failure, and a run at what it can see.
void take_judged(const Failure& failed, RunSummary& summary) {
  const bool is_shown = (failed.kind == "divergence" && summary.divergence) ||
                        (failed.kind == "stuck" && summary.verdict == Verdict::liveness) ||
                        (failed.check.starts_with("engine.") && summary.engine_failure);
  if (is_shown) return;
  const bool is_mismatch = failed.check.starts_with("conform.");
  (is_mismatch ? summary.mismatch : summary.violation) = {
      .check = failed.check, .step = failed.step, .what = failed.what, .request = failed.request};
  if (is_mismatch) summary.verdict = Verdict::mismatch;
}

// Adds the verdicts of the judge, the audit and the model to that of the run. A failure that the
// judge found comes first, then the run's own, then the recording's difference or the audit's
// findings.
void take_verdicts(const ReplayOptions& options, const OpenReplay& prepared, OtherVerdicts& others,
                   RunSummary& summary) {
  // Another engine gets the recording's inputs; its decisions are not those of the recording.
  if (prepared.recording && others.audit == nullptr && options.decisions.decisions.empty())
    others.recorded = check_recording(options.file, prepared.recording, options.decisions.rules());
  if (others.judged && others.judged->failed()) {
    take_judged(*others.judged, summary);
  } else if (summary.verdict == Verdict::agreed && others.recorded) {
    summary.verdict = others.recorded->verdict();
  } else if (summary.verdict == Verdict::agreed) {
    const auto take = [&](auto& audit) {
      if (!stop_requested()) audit.end();
      if (!summary.violation && !audit.findings().empty())
        summary.violation = failure_of(audit.findings().front());
    };
    if (others.audit != nullptr) take(*others.audit);
    for (const auto& audit : others.engines) take(*audit);
  }
  if (summary.violation)
    summary.verdict =
        summary.violation->check.starts_with("audit.") ? Verdict::audit : Verdict::violation;
  if (passes(summary.verdict) && stop_requested()) summary.verdict = Verdict::interrupted;
  if (summary.verdict == Verdict::agreed && !others.has_compared(summary))
    summary.verdict = Verdict::done;
}

// Adds what this run left out: layers without pages, and for a followed recording whatever another
// command would check.
void add_not_checked(const ReplayOptions& options, const OpenReplay& prepared,
                     const OtherVerdicts& others, RunSummary& summary) {
  if (const std::int32_t kept = prepared.run.recipe.layers_per_group; kept > 0)
    summary.not_checked.push_back(fmt::format(
        "pages of the layers that --layers-per-group {} leaves out of each group", kept));
  if (options.decisions.rules() == AuditedRules::memory)
    summary.not_checked.emplace_back("rules about policy (--audit-policy off)");
  if (const std::string* reason = others.not_audited(); reason != nullptr && !reason->empty())
    summary.not_checked.push_back("the audit: " + *reason);
  if (others.audit == nullptr) return;
  if (prepared.config.engine.host_pool_num_blocks > 0)
    summary.not_checked.push_back("all_resident: whether a step reads rows of the host");
  const std::string& engine = prepared.recording->header.options.config.engine;
  summary.not_checked.push_back(
      find_engine_profile(engine) == nullptr
          ? fmt::format("whether a model decides the same: {} has no profile", engine)
          : fmt::format("whether the model of {} decides the same (lockstep conform {})", engine,
                        shell_word(options.file)));
}

// Prints the files, the configuration, and which engine decides and works.
void print_head(const ReplayOptions& options, const FailingCaseOptions& judging,
                const OpenReplay& prepared) {
  std::string files = options.file;
  for (const std::string& shard : options.shards) files += ", " + shard;
  fmt::print("{} ({})\n{}\n", files, name_of(prepared.format), configuration_text(prepared));
  fmt::print(
      "{}{}",
      decider_text(prepared.decided_by, prepared.config.engine.engine, judging.engines.get()),
      worker_text(prepared.worked_by, prepared.run.backend, worker_of(judging)));
  std::fflush(stdout);
}

// A saved failure that does not fail is not a success, unless the run was interrupted before it.
int exit_code(const OpenReplay& prepared, const RunSummary& summary, const Failure& failure,
              const std::string& missed) {
  const int verdict = exit_code_of(summary.verdict);
  if ((verdict == kExitAgreed || failure.failed()) && is_gone(prepared.expected, failure) &&
      !stop_requested())
    return kExitNotReproduced;
  return verdict == kExitAgreed && !missed.empty() ? kExitDisagreed : verdict;
}

// Returns whether the run reached the recorded totals; empty: the file has none.
std::string totals_text(const OpenReplay& prepared, const std::string& missed) {
  if (!prepared.totals || stop_requested()) return {};
  return missed.empty() ? "The recorded totals match exactly.\n"
                        : "The recorded totals do NOT match\n" + missed;
}

Result<int> replay(ReplayOptions& options, CommandReport& out) {
  watch_stop_signals();
  LS_RETURN_IF_ERROR(take_engine_model(options.run.spec.recipe.model, options.from));
  ReplayRequest request = request_of(options);
  request.as_served = true;
  FactsOfRun facts;
  FailingCaseOptions judging;  // how the run is repeated, if it fails
  judging.shrink_seconds = options.shrink_seconds;
  judging.decisions = options.decisions;
  judging.worker = options.worker;
  LS_RETURN_IF_ERROR(start_engines(judging));
  OtherVerdicts others;
  // Before the run, because only the judge isolates a crash or a hang in a child process.
  LS_ASSIGN_OR_RETURN(const auto judged, judge_saved(options, judging));
  if (judged && is_judged_alone(*judged)) return leave_judged(options, *judged, out);
  if (judged) others.judged = judged->failure;
  // Called with the prepared run: only that says which worker a saved case needs.
  const BackendOf backend_of = [&](const PreparedReplay& run) -> Result<BackendFactory> {
    if (!is_engine_worker(run.run.backend)) return replay_backend(run.run.backend);
    if (judging.workers == nullptr) {
      judging.worker = with_case(options.worker, run.worked_by);
      LS_ASSIGN_OR_RETURN(judging.workers, open_workers(run.run.backend, judging.worker));
    }
    return worker_factory(judging.workers, options.facts_path.empty() ? FactsSink() : facts.sink());
  };
  LS_ASSIGN_OR_RETURN(auto prepared,
                      open_replay(request, judging.engines, backend_of, options.decisions.conforms,
                                  judging.decisions.rules()));
  LS_RETURN_IF_ERROR(check_options_of_run(options, prepared));
  std::optional<HiddenStateFolder> folder;
  if (!options.hidden_states_dir.empty()) {
    folder.emplace(options.hidden_states_dir);
    LS_RETURN_IF_ERROR(
        folder->check(prepared.config, !prepared.session->engines().front().ranks.empty()));
  }
  print_head(options, judging, prepared);
  if (prepared.recording && prepared.run.decide == Decides::recording) {
    // Observes before execution, so that a wrong decision never reaches the backend.
    others.audit = std::make_unique<RecordingAudit>(prepared.recording, judging.decisions.rules());
    prepared.session->observe(0, *others.audit);
  }
  if (judging.engines != nullptr) others.engines = prepared.audits;
  LS_ASSIGN_OR_RETURN(auto report,
                      run_with_progress(options, prepared, folder ? &*folder : nullptr));
  if (prepared.conforming != nullptr)
    LS_RETURN_IF_ERROR(take_mismatch(*prepared.conforming, report));
  take_verdicts(options, prepared, others, report.summary);
  add_not_checked(options, prepared, others, report.summary);
  const RunSummary& summary = report.summary;
  const std::string missed = stop_requested() ? "" : missed_totals(prepared, summary);
  fmt::print("{}{}", faults_text(prepared, summary), summary_text(summary, prepared));
  LS_ASSIGN_OR_RETURN(const Failure failure,
                      failure_of(options, prepared, report, judging, others));
  // A file that cannot be written must not hide the verdict: it is refused after that.
  Result<void> left =
      leave_result(options, prepared, report, folder ? &*folder : nullptr, others, failure, out);
  if (left && !options.facts_path.empty())
    left = facts.write(*prepared.recording, options.facts_path, worker_of(judging).value());
  const std::string reproduction =
      stop_requested() ? "" : reproduction_text(prepared.expected, failure);
  fmt::print("\n{}{}{}{}", verdict_text(summary, others), totals_text(prepared, missed),
             finding_text(failure), reproduction);
  const auto again = leave_case(options, prepared, report, judging, out);
  const bool is_as_expected = !prepared.expected || is_reproduced(*prepared.expected, failure);
  out.add(item_of(options, summary, others, missed, is_as_expected ? "" : reproduction,
                  again.value_or(again_of(out))));
  LS_RETURN_IF_ERROR(left);
  LS_RETURN_IF_ERROR(again);
  return exit_code(prepared, summary, failure, missed);
}

}  // namespace

void add_replay_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<ReplayOptions>();
  CLI::App* command =
      app.add_subcommand("replay", "Run a trace through the model and a backend, step by step");
  declare_replay_options(*command, *options);
  declare_from(*command, options->from);
  command->get_option("--from")->needs("--model")->group("Cache");
  run_when_chosen(*command, options, exit_code, replay);
}

}  // namespace lockstep
