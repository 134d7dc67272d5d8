// Code that `shrink`, `explain`, `bisect`, `fuzz --save` and `replay --shrink` share: loads a case
// from a file, starts the engine and worker that it needs, judges it, shrinks it, and states
// whether it is reproduced.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "cli/options/decisions_option.h"
#include "cli/options/worker_option.h"
#include "cli/output/reports.h"
#include "properties/judge/failure.h"
#include "properties/judge/judge.h"
#include "properties/judge/recording_check.h"
#include "properties/shrink/shrinker.h"
#include "traces/formats/saved_case.h"

namespace CLI {
class App;
class Validator;
}  // namespace CLI

namespace lockstep {

struct FailingCaseOptions {
  std::string backend = "auto";    // "auto": the backend that the case names
  std::string file = {};           // of the case, for messages; empty: the case's name is given
  std::string decide{};            // for a recording: "recording" or "model"; empty: "recording"
  std::int64_t time_limit_s = 30;  // seconds per judged case; a longer one hangs
  std::int64_t evaluations_max = 20'000;  // candidates that one shrink may try
  double shrink_seconds = 0;              // time limit for shrinking one case; 0: none
  DecisionsOptions decisions;
  WorkerOptions worker;
  std::shared_ptr<ForeignEngines> engines{};  // null: the model decides
  std::shared_ptr<ForeignEngines> workers;    // null: the backend is not an engine's worker
};

// Declares --backend, --time-limit, --kernels and the worker's options.
void declare_backend(CLI::App& command, FailingCaseOptions& options);
// Declares those and --decide, --decisions, --conform and --audit-policy.
void declare_judging(CLI::App& command, FailingCaseOptions& options);

// Starts the engine that --decisions names, if any. Called once, before cases are judged.
Result<void> start_engines(FailingCaseOptions& options);
// Starts the worker that the case needs, with the runner, state layers and planted defect with
// which the case failed, unless the command line gives others. No effect if the backend is not an
// engine's worker. Called once, before the case is judged.
Result<void> start_workers(const SavedCase& saved, FailingCaseOptions& options);
// Returns the decisions of the started engine; absent: the model decides.
DecisionsFactory decisions_of(const FailingCaseOptions& options);
// Returns the rules by which the case is audited. If another check failed it than a rule about
// policy, these rules are off where they could hide the failure.
AuditedRules rules_for(const SavedCase& saved, const FailingCaseOptions& options);
// Returns how the case is judged. If the case names the check that failed it, that check is on, and
// rules that could hide it are off.
JudgeOptions judge_options(const SavedCase& saved, const FailingCaseOptions& options);
// Returns the deciding engine; absent: the model decides.
std::optional<RecordedEngine> decider_of(const FailingCaseOptions& options);
// Returns the real worker that holds the cache; absent: a backend of this program does.
std::optional<WorkedBy> worker_of(const FailingCaseOptions& options);
// Returns a line for the scheduler and one for the worker, if the case failed with a real one and a
// different one runs now. Empty: both are the same as then.
std::string halves_text(const SavedCase& saved, const FailingCaseOptions& options);
// Judges the case again and writes what the engine decided and the worker did as a recording, which
// repeats the run without them. False: no step was decided, and nothing is written.
Result<bool> write_recording(const std::string& path, const SavedCase& saved,
                             const FailingCaseOptions& options);

// Loads a saved case, or makes one of a recording. Its backend is replaced by the given one, unless
// that is "auto". Errors: another format, --decide with a saved case, limits that the model does
// not run. Sets options.file.
Result<SavedCase> load_case(const std::string& path, FailingCaseOptions& options);
// Compares a recording with the model's decisions and audits it
// (properties/judge/recording_check.h). Absent: the file is not a recording, its own decisions are
// followed, or another engine decides. `saved`: load_case() of the file.
Result<std::optional<RecordingCheck>> check_if_recorded(const std::string& path,
                                                        const SavedCase& saved,
                                                        const FailingCaseOptions& options);
// Accepts one of `names`, a plugin (is_user_kernels()), and an engine's own worker
// (is_engine_worker()).
CLI::Validator backend_among(std::vector<std::string> names);
// Returns the factory of a backend by name; absent for "none". `worker`: options of an engine's own
// worker.
BackendFactory backend_factory(const std::string& backend, const WorkerOptions& worker = {});
BackendFactory backend_factory(const std::string& backend, const FailingCaseOptions& options);

// Judges the case once: in a child process, or in this process if an engine decides or works, since
// the engine is a process of its own. Errors: what the engine, the reader or the backend refuses.
Result<Failure> failure_of(const SavedCase& saved, const FailingCaseOptions& options);

// A case before and after shrinking.
struct ShrunkCase {
  SavedCase first;
  ShrinkResult result;
  Failure failure;  // of the smallest case
};
// Shrinks a case. The smallest case fails by the same check and keeps its class (the same finding,
// or a new failure); its `expected` verdict records that. Errors: the case fails once and not
// again. REQUIRES: `saved` fails as `failure`.
Result<ShrunkCase> shrink_case(const SavedCase& saved, const Failure& failure,
                               const FailingCaseOptions& options);

// Judges a case that failed, and shrinks it. Errors: also a case that does not fail again.
Result<ShrunkCase> shrink_again(const SavedCase& saved, const FailingCaseOptions& options);

std::string to_text(const ShrunkCase& shrunk);
// Returns a line with the finding of docs/findings.md that the failure shows; empty: it is not a
// known one.
std::string finding_text(const Failure& failure);
std::string to_json(const ShrunkCase& shrunk);

// "cases/x.case.jsonl" -> "cases/x.min.case.jsonl".
std::string path_of_smallest(const std::string& path);
// "cases/x.min.case.jsonl" -> "cases/x.min.recording.jsonl".
std::string path_of_recording(const std::string& path);
// Returns the exit status of an outcome. `recorded`: what the recording itself shows; its findings
// are failures too, if the run does not fail.
int exit_code_of(const Failure& failure, const std::optional<RecordingCheck>& recorded = {});
// The same for a saved case: kExitNotReproduced if its failure is_gone().
int exit_code_of(const SavedCase& saved, const Failure& failure,
                 const std::optional<RecordingCheck>& recorded = {});
// True if a saved failure is not reproduced, and nothing unknown fails instead: nothing does, or a
// known finding.
bool is_gone(const std::optional<ExpectedVerdict>& expected, const Failure& failure);
// True if the case fails as it was saved: by the same check, in the same step if both name one, an
// engine's own failure by the same cause. Requests and messages may differ.
bool is_reproduced(const ExpectedVerdict& expected, const Failure& failure);
// Returns "The case is reproduced.", or how the saved failure differs; empty: the case has no
// expected verdict.
std::string reproduction_text(const std::optional<ExpectedVerdict>& expected,
                              const Failure& failure);
// Returns the outcome of a case as a report's item. `again`: the command that repeats it.
// `expected`: of a saved case, whose failure may be gone.
ReportedItem item_of(const std::string& file, const Failure& failure,
                     const std::optional<RecordingCheck>& recorded, std::string again,
                     const std::optional<ExpectedVerdict>& expected = {});
// Writes into a failed item that the saved case is not reproduced. `text`: reproduction_text().
void fail_to_reproduce(ReportedItem& item, std::string_view text);

// Saves the failing cases of a fuzz run in a folder: each as found (NAME.case.jsonl), and the
// smallest of each bucket shrunk (NAME.min.case.jsonl). If another engine decides or works,
// NAME.recording.jsonl has what it did. Buckets: bucket_of() in properties/judge/failure.h.
//
// Invariants
// (1) A case is on the disk as soon as the run reports it: a run that is killed keeps its cases.
// (2) Shrinking happens only in finish(), in the order in which the cases were kept.
class FuzzCases {
 public:
  // `judging`: the options of the run, with its engines started.
  FuzzCases(std::string folder, FailingCaseOptions judging)
      : folder_(std::move(folder)), judging_(std::move(judging)) {}

  // Writes a failing case at once.
  Result<void> keep(const SavedCase& saved, const Outcome& outcome);
  // Writes the first case of a known finding, as finding-N.
  Result<void> keep_finding(const SavedCase& saved, const Outcome& outcome);
  // Shrinks the smallest case of each bucket and the cases of findings, each for at most
  // `shrink_seconds` (0: does not shrink), and writes the recordings. Errors: a case that does not
  // fail a second time. REQUIRES: no thread of the run is left, since every candidate is judged in
  // a forked child.
  Result<void> finish(double shrink_seconds);
  // Returns a line per file with the size of its case; empty: no case was kept.
  std::string text() const { return lines_; }

 private:
  // A case on the disk.
  struct Kept {
    std::string path;
    SavedCase saved;
    std::string check;
    std::string bucket;
    std::int64_t tokens = 0;  // of all requests: the smallest case of a bucket has the fewest
    int finding = 0;          // number in docs/findings.md; 0: a new failure
  };

  bool is_shrunk(const Kept& kept) const;
  Result<void> keep_as(const std::string& name, const SavedCase& saved, const Outcome& outcome);
  Result<void> add_recording(const std::string& path, const SavedCase& saved);

  std::string folder_;
  FailingCaseOptions judging_;
  std::vector<Kept> kept_;
  std::string lines_;
};

}  // namespace lockstep
