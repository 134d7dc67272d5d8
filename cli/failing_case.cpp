#include "cli/failing_case.h"
#include "base/output_file.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "base/stop_signal.h"
#include "base/stopwatch.h"
#include "cli/options/kernels_option.h"
#include "cli/output/terminal.h"
#include "cli/worker_facts.h"
#include "cuda_backend/backends.h"
#include "properties/judge/known_findings.h"
#include "properties/shrink/case_parts.h"
#include "reference/plan/limits.h"
#include "sim/setup/replay_setup.h"
#include "sim/step/backend_config.h"
#include "traces/importers/open_trace.h"

namespace lockstep {
namespace {

// Returns how cases like `first` are judged: in a child process with a time limit, so that a crash
// or a hang is an outcome. With a real engine, a worker or the user's kernels they are judged in
// this process: an engine is a process of its own, and a GPU does not survive a fork.
JudgeCase judging_with(const SavedCase& first, const FailingCaseOptions& options) {
  const JudgeOptions judged_by = judge_options(first, options);
  const Judging judging = [judged_by](const SavedCase& saved) {
    Outcome outcome = judge(saved, judged_by);
    if (const KnownFinding* finding = known_finding(saved, outcome, judged_by))
      outcome.finding = finding->number;
    return outcome;
  };
  if (options.engines != nullptr || is_engine_worker(first.backend) ||
      is_user_kernels(first.backend))
    return [judging](const SavedCase& saved) { return judge_here(saved, judging); };
  const std::chrono::milliseconds limit = std::chrono::seconds(options.time_limit_s);
  return [judging, limit](const SavedCase& saved) { return judge_in_child(saved, judging, limit); };
}

// Makes a case of a recording. Its recorded decisions are followed, unless the model or another
// engine is to decide. Without the model, the memory plan is that of the recorded engine's profile,
// or of the default one if the engine has none.
Result<SavedCase> read_recorded_case(const std::string& path, const FailingCaseOptions& options) {
  LS_ASSIGN_OR_RETURN(auto recording, read_recorded_steps(path));
  const bool follows = options.decide != "model" && options.engines == nullptr;
  if (const std::string why_not = why_not_audited(recording.header); follows && !why_not.empty())
    return fail("{}: {}; give --decide model", path, why_not);
  // With --conform the engine's decisions are compared with a model, which has to be that engine's.
  if (follows || (options.engines != nullptr && !options.decisions.conforms))
    recording.header.options.config.engine = profile_for_memory(recording.header);
  return case_of(std::filesystem::path(path).stem().string(), std::move(recording),
                 follows ? Decides::recording : Decides::model);
}

// Describes the content of a recording by which of scheduler and worker were real.
std::string_view halves_done(const FailingCaseOptions& options) {
  if (options.workers == nullptr) return "the engine decided";
  return options.engines == nullptr ? "the worker did" : "the engine decided and its worker did";
}

// A line of the table: what, before, after.
std::string change_row(std::string_view what, std::int64_t before, std::int64_t after) {
  return fmt::format("  {:<10}{:>12}{:>12}\n", what, with_commas(before), with_commas(after));
}

}  // namespace

void declare_backend(CLI::App& command, FailingCaseOptions& options) {
  command
      .add_option("--backend", options.backend,
                  "auto (the case's own), cuda, simt, none (decisions, audit and invariants), "
                  "FILE.so, vllm[:DIR] or worker:COMMAND (an engine's own worker)")
      ->check(backend_among({"auto", "cuda", "simt", "none"}))
      ->capture_default_str();
  command
      .add_option("--time-limit", options.time_limit_s,
                  "timeout of a case in seconds; a case that takes longer hangs")
      ->check(CLI::Range(1, 86'400).description(""))
      ->type_name("S")
      ->capture_default_str();
  declare_worker(command, options.worker);
  declare_kernels(command, [&options](const std::string& backend) { options.backend = backend; });
}

void declare_judging(CLI::App& command, FailingCaseOptions& options) {
  declare_backend(command, options);
  command
      .add_option(
          "--decide", options.decide,
          "source of decisions on a recording's inputs: recording (its own; default) or model")
      ->check(CLI::IsMember({"recording", "model"}));
  declare_decisions(command, options.decisions);
  declare_checks(command, options.decisions);
}

Result<void> start_engines(FailingCaseOptions& options) {
  LS_ASSIGN_OR_RETURN(options.engines, open_decisions(options.decisions));
  return {};
}

// Removing requests of a followed recording breaks rules about policy first. Another engine may
// break them on purpose: its case was found without them.
AuditedRules rules_for(const SavedCase& saved, const FailingCaseOptions& options) {
  if (options.decisions.rules() == AuditedRules::memory || !saved.expected ||
      !saved.expected->fails())
    return options.decisions.rules();
  // "audit.attention_read": the check of a failed audit is its rule. Without a check, "audit" is
  // any rule.
  constexpr std::string_view kAudit = "audit.";
  const std::string& check = saved.expected->check;
  const auto rule = check.starts_with(kAudit) ? from_name<AuditRule>(check.substr(kAudit.size()))
                                              : std::optional<AuditRule>();
  if (rule && group_of(*rule) == RuleGroup::policy) return AuditedRules::all;
  const bool is_again = saved.decided_by && options.engines != nullptr;
  const bool may_hide = rule ? is_again || saved.decide == Decides::recording
                             : is_again && saved.expected->kind != name_of(Verdict::audit);
  return may_hide ? AuditedRules::memory : AuditedRules::all;
}

JudgeOptions judge_options(const SavedCase& saved, const FailingCaseOptions& options) {
  JudgeOptions judged_by{.backend = backend_factory(saved.backend, options),
                         .decisions = decisions_of(options)};
  // A case that failed by a comparison with the model is compared again, without --conform.
  judged_by.conforms =
      options.decisions.conforms || (options.engines != nullptr && saved.expected &&
                                     saved.expected->check.starts_with("conform."));
  judged_by.rules = rules_for(saved, options);
  return judged_by;
}

Result<void> start_workers(const SavedCase& saved, FailingCaseOptions& options) {
  LS_RETURN_IF_ERROR(check_worker_options(saved.backend, options.worker));
  if (!is_engine_worker(saved.backend)) return {};
  options.worker = with_case(options.worker, saved.worked_by);
  LS_ASSIGN_OR_RETURN(options.workers, open_workers(saved.backend, options.worker));
  return {};
}

DecisionsFactory decisions_of(const FailingCaseOptions& options) {
  return options.engines == nullptr ? DecisionsFactory() : decisions_of(options.engines);
}

std::optional<RecordedEngine> decider_of(const FailingCaseOptions& options) {
  if (options.engines == nullptr) return std::nullopt;
  return options.engines->hello().engine;
}

std::optional<WorkedBy> worker_of(const FailingCaseOptions& options) {
  if (options.workers == nullptr) return std::nullopt;
  return worker_of(*options.workers, options.worker);
}

std::string halves_text(const SavedCase& saved, const FailingCaseOptions& options) {
  return decider_text(saved.decided_by, saved.engine.engine, options.engines.get()) +
         worker_text(saved.worked_by, saved.backend, worker_of(options));
}

// Returns the end line of a recording whose engine failed within its last step, so that the
// recorder wrote none: the steps, and the requests that arrived and did not stop.
RecordingEnd end_within_step(const Recording& recording) {
  RecordingEnd end;
  end.steps = std::ssize(recording.steps);
  std::set<std::string> live;
  for (const RecordedStep& step : recording.steps) {
    for (const auto* events : {&step.before, &step.during})
      for (const RecordedEvent& event : *events) {
        if (event.kind == RecordedEvent::Kind::add) live.insert(event.request.name);
        if (event.kind == RecordedEvent::Kind::abort) live.erase(event.name);
      }
    for (const RecordedStopped& stopped : step.stopped) live.erase(stopped.id);
  }
  end.unfinished = {live.begin(), live.end()};
  return end;
}

Result<bool> write_recording(const std::string& path, const SavedCase& saved,
                             const FailingCaseOptions& options) {
  // Judged a second time, with a recorder: a run that shrinks does not record its candidates.
  Recording recording;
  FactsOfRun facts;
  JudgeOptions judging;
  if (options.workers != nullptr) judging.backend = worker_factory(options.workers, facts.sink());
  judging.decisions = decisions_of(options);
  judging.rules = rules_for(saved, options);
  judging.recording = &recording;
  const Outcome outcome = judge(saved, judging);
  if (recording.steps.empty()) return false;
  // An end line that counts fewer steps was written before the failing step.
  if (recording.end.steps != std::ssize(recording.steps))
    recording.end = end_within_step(recording);
  // An engine's own failure belongs to the recording: repeating it without the engine must report
  // it too.
  if (outcome.kind == OutcomeKind::stuck || outcome.check.starts_with("engine.")) {
    recording.end.failed_check = outcome.check;
    recording.end.failed_what = outcome.what;
  }
  if (options.engines != nullptr) recording.header.engine = options.engines->hello().engine;
  if (const auto worker = worker_of(options)) facts.add_to(recording, *worker);
  recording.header.family = "fuzz";
  LS_ASSIGN_OR_RETURN(auto file, RecordingWriter::create(path, recording.header));
  for (const RecordedStep& step : recording.steps) LS_RETURN_IF_ERROR(file.write(step));
  LS_RETURN_IF_ERROR(file.close(recording.end));
  return true;
}

Result<SavedCase> load_case(const std::string& path, FailingCaseOptions& options) {
  options.file = path;
  LS_ASSIGN_OR_RETURN(auto format, detect_format(path));
  if (format != FileFormat::saved_case && format != FileFormat::recording)
    return fail(
        "{}: found a {}; expected a saved case or a recording. `lockstep replay {} --save DIR` "
        "saves a failure as a case",
        path, name_of(format), shell_word(path));
  if (format == FileFormat::saved_case && !options.decide.empty())
    return fail("{}: a saved case has its own source of decisions; omit --decide", path);
  Result<SavedCase> saved =
      format == FileFormat::saved_case ? read_saved_case(path) : read_recorded_case(path, options);
  if (!saved) return saved;
  LS_RETURN_IF_ERROR(check_profile(path, saved->engine.engine));
  if (auto sound = check_limits(saved->engine, saved->cache.groups, saved->cache.num_blocks);
      !sound)
    return fail("{}:1: {}", path, sound.error().message);
  if (options.backend != "auto") saved->backend = options.backend;
  // A plugin's and a worker's accesses cannot be watched, so the check modes do not apply.
  if (is_user_kernels(saved->backend)) saved->check = CheckMode::fast;
  if (is_engine_worker(saved->backend))
    saved->attention_backend = worker_attention_backend(saved->cache);
  return saved;
}

Result<std::optional<RecordingCheck>> check_if_recorded(const std::string& path,
                                                        const SavedCase& saved,
                                                        const FailingCaseOptions& options) {
  LS_ASSIGN_OR_RETURN(const auto format, detect_format(path));
  if (format != FileFormat::recording || saved.decide == Decides::recording || options.engines)
    return std::nullopt;
  return std::optional(check_recording(path, std::make_shared<const Recording>(*saved.recording),
                                       options.decisions.rules()));
}

// The type name of the validator is the label in the help; the message lists all accepted forms.
CLI::Validator backend_among(std::vector<std::string> names) {
  std::string all =
      fmt::format("{}, FILE.so, vllm[:DIR] or worker:COMMAND", fmt::join(names, ", "));
  return CLI::Validator(
      [names = std::move(names), all](std::string& name) {
        const bool is_one = is_engine_worker(name) || is_user_kernels(name) ||
                            std::ranges::find(names, name) != names.end();
        return is_one ? std::string() : fmt::format("{}: expected {}", name, all);
      },
      "NAME");
}

BackendFactory backend_factory(const std::string& backend, const WorkerOptions& worker) {
  if (is_engine_worker(backend)) return worker_factory(backend, worker);
  if (is_user_kernels(backend)) return kernels_factory(backend);
  if (backend == "none") return {};
  if (backend == "cuda")
    return [](const BackendConfig& config) { return make_gpu_backend(config); };
  return [](const BackendConfig& config) { return make_simt_backend(config); };
}

BackendFactory backend_factory(const std::string& backend, const FailingCaseOptions& options) {
  return options.workers == nullptr ? backend_factory(backend, options.worker)
                                    : worker_factory(options.workers);
}

// The case in messages. A file may have another name than its case.
static const std::string& place_of(const SavedCase& saved, const FailingCaseOptions& options) {
  return options.file.empty() ? saved.name : options.file;
}

Result<Failure> failure_of(const SavedCase& saved, const FailingCaseOptions& options) {
  Result<Failure> failure = judging_with(saved, options)(saved);
  // A refused case has no verdict: the input is wrong, and nothing has failed.
  if (failure && failure->kind == "refused")
    return fail("{}: {}", place_of(saved, options), failure->what);
  return failure;
}

Result<ShrunkCase> shrink_case(const SavedCase& saved, const Failure& failure,
                               const FailingCaseOptions& options) {
  Progress progress("shrinking", 0);
  ShrinkOptions shrinking{.evaluations_max = options.evaluations_max, .progress = {}};
  shrinking.progress = [&](std::int64_t evaluations, const SavedCase& best) {
    const CaseSize size = size_of(best);
    progress.at(evaluations, fmt::format("tried; {}, {}", counted(size.requests, "request"),
                                         counted(size.tokens, "token")));
  };
  Stopwatch clock;
  double elapsed = 0;
  // The expected verdict decides the rules of the audit (rules_for()), so it is that of this
  // failure.
  SavedCase first = saved;
  first.expected = expected_of(failure);
  const StillFails still_fails = fails_like(failure, judging_with(first, options));
  const auto out_of_time = [&] {
    return options.shrink_seconds > 0 && elapsed > options.shrink_seconds;
  };
  // After the time limit every candidate counts as not failing, so the shrinker ends with the best
  // case so far.
  const StillFails in_time = [&](const SavedCase& smaller,
                                 std::int64_t steps_max) -> std::optional<std::int64_t> {
    elapsed += clock.lap();
    return out_of_time() ? std::nullopt : still_fails(smaller, steps_max);
  };
  const auto not_again = [&] {
    return fail(
        "{}: failed once ({}) but not again; it depends on something that the case does not store",
        place_of(saved, options), failure.check);
  };
  auto result = shrink(saved, in_time, shrinking);
  if (!result) return not_again();
  // The shrinker saw no failing candidate because of the clock, so minimality is not proved.
  result->is_minimal &= !out_of_time();
  result->smallest.expected = first.expected;
  // The smallest case may fail in another step or request than the first one.
  LS_ASSIGN_OR_RETURN(Failure smallest, failure_of(result->smallest, options));
  if (!smallest.failed()) return not_again();
  result->smallest.decided_by = decider_of(options);
  result->smallest.worked_by = worker_of(options);
  result->smallest.expected = expected_of(smallest);
  return ShrunkCase{.first = saved, .result = std::move(*result), .failure = std::move(smallest)};
}

Result<ShrunkCase> shrink_again(const SavedCase& saved, const FailingCaseOptions& options) {
  LS_ASSIGN_OR_RETURN(const auto failure, failure_of(saved, options));
  if (!failure.failed()) return fail("{}: does not fail a second time", place_of(saved, options));
  return shrink_case(saved, failure, options);
}

std::string to_text(const ShrunkCase& shrunk) {
  const CaseSize before = size_of(shrunk.first);
  const CaseSize after = size_of(shrunk.result.smallest);
  std::string text =
      fmt::format("{} tried, {} smaller; {}\n\n", counted(shrunk.result.evaluations, "case"),
                  with_commas(shrunk.result.accepted),
                  shrunk.result.is_minimal ? "the case is minimal"
                                           : "out of budget, the case may not be minimal");
  text += fmt::format("  {:<10}{:>12}{:>12}\n", "", "before", "after");
  text += change_row("requests", before.requests, after.requests);
  text += change_row("tokens", before.tokens, after.tokens);
  text += change_row("groups", before.groups, after.groups);
  text += change_row("layers", before.layers, after.layers);
  text += change_row("blocks", before.blocks, after.blocks);
  text += change_row("options", before.options, after.options);
  text += change_row("steps", shrunk.result.first_steps, shrunk.result.steps);
  return text + fmt::format("\nIt still fails: {} ({})\n  {}\n{}", shrunk.failure.check,
                            shrunk.failure.kind, shrunk.failure.what, finding_text(shrunk.failure));
}

std::string to_json(const ShrunkCase& shrunk) {
  using Json = nlohmann::ordered_json;
  const auto size_json = [](const SavedCase& saved, std::int64_t steps) {
    const CaseSize size = size_of(saved);
    return Json{{"requests", size.requests},
                {"tokens", size.tokens},
                {"groups", size.groups},
                {"layers", size.layers},
                {"blocks", size.blocks},
                {"options", size.options},
                {"steps", steps}};
  };
  Json json = {{"case", shrunk.first.name},
               {"before", size_json(shrunk.first, shrunk.result.first_steps)},
               {"after", size_json(shrunk.result.smallest, shrunk.result.steps)},
               {"evaluations", shrunk.result.evaluations},
               {"minimal", shrunk.result.is_minimal},
               {"kind", shrunk.failure.kind},
               {"check", shrunk.failure.check},
               {"finding", shrunk.failure.finding},
               {"step", shrunk.failure.step},
               {"request", shrunk.failure.request},
               {"what", shrunk.failure.what}};
  if (const std::string cut_off = cut_off_text(shrunk.first); !cut_off.empty())
    json["cut_off"] = cut_off;
  return json_text(json);
}

std::string finding_text(const Failure& failure) {
  const KnownFinding* known = finding_of_number(failure.finding);
  if (known == nullptr) return {};
  return fmt::format("This is finding {} of docs/findings.md: {}.\n", known->number, known->title);
}

// The path of a case without the ending of cases, or as much of that as it has.
static std::string stem_of(const std::string& path) {
  for (const std::string_view ending : {".case.jsonl", ".jsonl"})
    if (path.ends_with(ending)) return path.substr(0, path.size() - ending.size());
  return path;
}

std::string path_of_smallest(const std::string& path) { return stem_of(path) + ".min.case.jsonl"; }

std::string path_of_recording(const std::string& path) {
  return stem_of(path) + ".recording.jsonl";
}

int exit_code_of(const Failure& failure, const std::optional<RecordingCheck>& recorded) {
  if (!failure.failed())
    return recorded && !recorded->findings.empty() ? kExitDisagreed : kExitAgreed;
  // Lockstep's own code failed in the engine's process: no verdict on the engine.
  if (failure.kind == "harness") return kExitRefused;
  return failure.kind == "stuck" || failure.kind == "hang" ? kExitStuck : kExitDisagreed;
}

int exit_code_of(const SavedCase& saved, const Failure& failure,
                 const std::optional<RecordingCheck>& recorded) {
  return is_gone(saved.expected, failure) ? kExitNotReproduced : exit_code_of(failure, recorded);
}

bool is_gone(const std::optional<ExpectedVerdict>& expected, const Failure& failure) {
  return expected && expected->fails() &&
         (!failure.failed() || (failure.finding != 0 && !is_reproduced(*expected, failure)));
}

// A case without a named check was saved by a run, and is compared by its verdict's kind or check.
bool is_reproduced(const ExpectedVerdict& expected, const Failure& failure) {
  if (!failure.failed()) return !expected.fails();
  const ExpectedVerdict found = expected_of(failure);
  const bool is_same = expected.check.empty()
                           ? expected.kind == found.kind || expected.kind == found.check
                           : expected.check == found.check;
  if (!expected.cause.empty() && expected.cause != found.cause) return false;
  return is_same && (!expected.step || !found.step || *expected.step == *found.step);
}

std::string reproduction_text(const std::optional<ExpectedVerdict>& expected,
                              const Failure& failure) {
  if (!expected) return {};
  if (is_reproduced(*expected, failure)) return "The case is reproduced.\n";
  std::string saved_as = expected->check.empty() ? expected->kind : expected->check;
  if (expected->step) saved_as += fmt::format(" in step {}", *expected->step);
  if (!expected->request.empty())
    saved_as += fmt::format(", request {}", on_one_line(expected->request));
  return fmt::format("The case is NOT reproduced: it {}, and was saved as {}.\n",
                     failure.failed() ? "fails differently" : "does not fail", saved_as);
}

void fail_to_reproduce(ReportedItem& item, std::string_view text) {
  item.check = "reproduction";
  item.line = text.substr(0, text.find('\n'));
}

ReportedItem item_of(const std::string& file, const Failure& failure,
                     const std::optional<RecordingCheck>& recorded, std::string again,
                     const std::optional<ExpectedVerdict>& expected) {
  ReportedItem item{.name = file, .file = file};
  const bool is_lost = !failure.failed() && is_gone(expected, failure);
  if (!is_lost && exit_code_of(failure, recorded) == kExitAgreed) return item;
  item.kind = ItemKind::failed;
  item.again = std::move(again);
  if (is_lost) {
    fail_to_reproduce(item, reproduction_text(expected, failure));
  } else if (failure.failed()) {
    item.check = failure.check;
    item.line = stable_line(failure.check, failure.step, failure.request, failure.what);
  } else {
    const AuditFinding& first = recorded->findings.front();
    item.check = fmt::format("audit.{}", name_of(first.rule));
    item.line = line_of(first);
  }
  return item;
}

namespace {

std::string line_of(const std::string& path, const SavedCase& saved, std::string_view more) {
  const CaseSize size = size_of(saved);
  return fmt::format("  {}  {}, {}, {}{}\n", path, counted(size.requests, "request"),
                     counted(size.tokens, "token"), counted(size.blocks, "block"), more);
}

}  // namespace

Result<void> FuzzCases::keep(const SavedCase& found, const Outcome& outcome) {
  return keep_as(found.name, found, outcome);
}

Result<void> FuzzCases::keep_finding(const SavedCase& found, const Outcome& outcome) {
  return keep_as(fmt::format("finding-{}", outcome.finding), found, outcome);
}

Result<void> FuzzCases::keep_as(const std::string& name, const SavedCase& found,
                                const Outcome& outcome) {
  LS_RETURN_IF_ERROR(make_output_folder(folder_));
  SavedCase saved = found;
  saved.decided_by = decider_of(judging_);
  saved.worked_by = worker_of(judging_);
  saved.expected = expected_of(failure_of(outcome));
  const std::string path = (std::filesystem::path(folder_) / (name + ".case.jsonl")).string();
  LS_RETURN_IF_ERROR(write_saved_case(path, saved));
  lines_ += line_of(path, saved, {});
  const CaseSize size = size_of(saved);
  kept_.push_back({.path = path,
                   .saved = std::move(saved),
                   .check = outcome.check,
                   .bucket = bucket_of(outcome.check, outcome.request, outcome.what),
                   .tokens = size.tokens,
                   .finding = outcome.finding});
  return {};
}

Result<void> FuzzCases::add_recording(const std::string& path, const SavedCase& saved) {
  if (judging_.engines == nullptr && judging_.workers == nullptr) return {};
  const std::string recording = path_of_recording(path);
  LS_ASSIGN_OR_RETURN(const bool written, write_recording(recording, saved, judging_));
  if (written) lines_ += fmt::format("  {}  what {}\n", recording, halves_done(judging_));
  return {};
}

// True for the smallest case of each bucket, the first among equals, and for every case of a known
// finding, which has one case only.
bool FuzzCases::is_shrunk(const Kept& kept) const {
  if (kept.finding != 0) return true;
  const auto smaller = [&](const Kept& other) {
    return other.finding == 0 && other.bucket == kept.bucket &&
           (other.tokens < kept.tokens || (other.tokens == kept.tokens && &other < &kept));
  };
  return std::ranges::none_of(kept_, smaller);
}

Result<void> FuzzCases::finish(double shrink_seconds) {
  lines_.clear();
  judging_.shrink_seconds = shrink_seconds;
  for (const Kept& kept : kept_) {
    lines_ += line_of(kept.path, kept.saved, {});
    LS_RETURN_IF_ERROR(add_recording(kept.path, kept.saved));
    // After a stop signal the recordings are still written: they need one run each.
    if (shrink_seconds == 0 || stop_requested()) continue;
    if (!is_shrunk(kept)) continue;
    judging_.file = kept.path;
    const auto shrunk = shrink_again(kept.saved, judging_);
    if (!shrunk) {
      lines_ += fmt::format("    not shrunk: {}\n", shrunk.error().message);
      continue;
    }
    const std::string path = path_of_smallest(kept.path);
    const SavedCase& smallest = shrunk->result.smallest;
    LS_RETURN_IF_ERROR(write_saved_case(path, smallest));
    lines_ += line_of(path, smallest,
                      shrunk->result.is_minimal ? "" : "; out of time, may not be minimal");
    LS_RETURN_IF_ERROR(add_recording(path, smallest));
  }
  return {};
}

}  // namespace lockstep
