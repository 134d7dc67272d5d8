// What `shrink`, `explain`, `bisect` and `replay --shrink` have in common: a case from a file, the
// backend that it asks for, its failure, and the smaller case.
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
  std::string backend = "auto";  // as the case says
  std::string decide;            // of a recording: "recording", "model"; empty: the former
  std::int64_t time_limit_s = 30;
  std::int64_t evaluations_max = 20'000;
  double shrink_seconds = 0;  // of one case; 0: no limit
  DecisionsOptions decisions;
  WorkerOptions worker;
  std::shared_ptr<ForeignEngines> engines;  // null: the model decides
  std::shared_ptr<ForeignEngines> workers;  // of a backend that is an engine's own; null otherwise
};

// --backend, --time-limit and the worker's options.
void declare_backend(CLI::App& command, FailingCaseOptions& options);
// The same, --decide, --decisions and --conform.
void declare_judging(CLI::App& command, FailingCaseOptions& options);

// Starts the engine that --decisions names. To be called once, before cases are judged.
Result<void> start_engines(FailingCaseOptions& options);
// Starts the worker that the case asks for, as it was when the case failed. None, where its backend
// is not an engine's own worker. To be called once, before the case is judged.
Result<void> start_workers(const SavedCase& saved, FailingCaseOptions& options);
DecisionsFactory decisions_of(const FailingCaseOptions& options);
// How the case is judged: by the check that failed it, if the case names one.
JudgeOptions judge_options(const SavedCase& saved, const FailingCaseOptions& options);
// The deciding engine; absent: the model.
std::optional<RecordedEngine> decider_of(const FailingCaseOptions& options);
// Which real worker holds the cache; absent: a backend.
std::optional<WorkedBy> worker_of(const FailingCaseOptions& options);
// Messages about halves of the case that were real when it failed and are not now.
std::string halves_text(const SavedCase& saved, const FailingCaseOptions& options);
// What an engine decided in a case, as a recording that repeats without it. False: nothing.
Result<bool> write_recording(const std::string& path, const SavedCase& saved,
                             const FailingCaseOptions& options);

// A saved case or a recording; with the given backend, unless that is "auto".
Result<SavedCase> load_case(const std::string& path, const FailingCaseOptions& options);
// What a recording shows on whose inputs the model decides; absent: it is followed, or none.
// `saved`: load_case() of the file.
Result<std::optional<RecordingCheck>> check_if_recorded(const std::string& path,
                                                        const SavedCase& saved);
// Takes `names`, whatever is_user_kernels(), and an engine's own worker.
CLI::Validator backend_among(std::vector<std::string> names);
// The backend of whatever configuration comes; absent for "none". `worker`: of an engine's own.
BackendFactory backend_factory(const std::string& backend, const WorkerOptions& worker = {});
BackendFactory backend_factory(const std::string& backend, const FailingCaseOptions& options);

// Judged in a child process, or here where another engine decides. Errors: what the engine, the
// reader or the backend refuses.
Result<Failure> failure_of(const SavedCase& saved, const FailingCaseOptions& options);

struct ShrunkCase {
  SavedCase first;
  ShrinkResult result;
  Failure failure;  // of the smallest
};
// The smallest case fails by the same check, and keeps the class (same finding, or new); `expected`
// records it. REQUIRES: `saved` fails as `failure`.
Result<ShrunkCase> shrink_case(const SavedCase& saved, const Failure& failure,
                               const FailingCaseOptions& options);

std::string to_text(const ShrunkCase& shrunk);
// Which finding of docs/findings.md it is, as a line; empty: none that is known.
std::string finding_text(const Failure& failure);
std::string to_json(const ShrunkCase& shrunk);

// "cases/x.case.jsonl" -> "cases/x.min.case.jsonl".
std::string path_of_smallest(const std::string& path);
// "cases/x.min.case.jsonl" -> "cases/x.min.recording.jsonl".
std::string path_of_recording(const std::string& path);
// `recorded`: what the file itself shows; its findings are failures too.
int exit_code_of(const Failure& failure, const std::optional<RecordingCheck>& recorded = {});
// Of a saved case that was to fail and does not: kExitNotReproduced.
int exit_code_of(const SavedCase& saved, const Failure& failure,
                 const std::optional<RecordingCheck>& recorded = {});
// Whether a case fails as it was saved: the same check in the same step.
bool is_reproduced(const ExpectedVerdict& expected, const Failure& failure);
// "The case is reproduced."; or what it was saved as. Empty: the case says nothing.
std::string reproduction_text(const std::optional<ExpectedVerdict>& expected,
                              const Failure& failure);
// The outcome of a case, for reports; `again` repeats it.
ReportedItem item_of(const std::string& file, const Failure& failure,
                     const std::optional<RecordingCheck>& recorded, std::string again);

// The failing cases of a fuzz run, in a folder: each as found, NAME.case.jsonl, and shrunk,
// NAME.min.case.jsonl.
//
// Of each bucket (bucket_of() in properties/judge/failure.h) the smallest case is shrunk. With
// another engine, NAME.recording.jsonl has its decisions.
class FuzzCases {
 public:
  // `judging`: as the run judges, with the engines that decide and work.
  FuzzCases(std::string folder, FailingCaseOptions judging)
      : folder_(std::move(folder)), judging_(std::move(judging)) {}

  // Writes the case at once: what follows may take long, or end early.
  Result<void> keep(const SavedCase& saved, const Outcome& outcome);
  // The first case of a finding of docs/findings.md, as finding-N.
  Result<void> keep_finding(const SavedCase& saved, const Outcome& outcome);
  // The smallest of each bucket and those of findings small, for at most so long each; 0: none.
  // And what another engine decided in them. REQUIRES: no thread of the run is left, since every
  // try is a child process.
  Result<void> finish(double shrink_seconds);
  // A line for each file with its size; empty: nothing was kept.
  std::string text() const { return lines_; }

 private:
  struct Kept {
    std::string path;
    SavedCase saved;
    std::string check;
    std::string bucket;
    std::int64_t tokens = 0;
    int finding = 0;
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
