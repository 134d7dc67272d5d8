// Compares recordings with the model: the reference scheduler receives the engine's inputs and must
// decide exactly as the engine did, in every field of every step.
//
// Compared, in the recording's own terms and order: scheduled (order, tokens, computed, new and
// resumed, blocks per group, drafts), preempted, finished, common_prefix_blocks, zero, running,
// waiting, free_blocks, tables, stopped, stored, evicted, cleared, the result of
// reset_prefix_cache, output_of_step, the derived block sizes, and the unfinished requests. With a
// KV connector also its queries with their local tokens, skipped, loading and held. What the model
// returned is an input; more tokens than the decision can bring are a mismatch.
//
// Not compared: memory, and when an engine processes an output (an input as well).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "sim/recording/recorded_terms.h"
#include "sim/recording/recording_workload.h"
#include "sim/recording/run_recorder.h"
#include "sim/session/session.h"
#include "traces/formats/recording.h"

namespace lockstep {

// The first difference of a recording, both sides as JSON text.
struct ConformMismatch {
  std::string file;
  std::int64_t step = -1;  // -1: the header or the end line
  std::string what;        // "scheduled[2].blocks[0]", "free_blocks", ...
  std::string recorded;    // JSON text
  std::string model;
};

// Runs the model on the inputs of a recording, complete or growing, and compares every step with
// the recorded one.
//
// Invariants
// (1) The first difference ends the run; nothing is compared after it.
// (2) The model receives only inputs of the recording, never a recorded decision.

class ConformObserver final : public StepObserver {
 public:
  // `connector` is null in a recording without one.
  ConformObserver(const RecordingWorkload& workload, const RecordingHeader& header,
                  ConnectorLog* connector)
      : workload_(workload),
        connector_(connector),
        num_spec_tokens_(header.options.config.num_spec_tokens),
        transcript_(header) {}

  // Compares the decision, then the recorded output with what the decision allows. The sampled
  // tokens belong to the recorded decision, so a different decision ends the run before its output
  // arrives.
  bool decided(const StepView& view) override;
  bool finished(const StepView& view) override;
  // Reads the inputs by which a growing recording has grown: samples and reports. False: no model
  // can have returned them for the decision, and a run that continues with them ends in an Error.
  bool inputs_known();

  const std::optional<ConformMismatch>& mismatch() const { return mismatch_; }
  // True if a request so far had an adapter, images or embeddings.
  bool has_keys() const { return has_keys_; }
  // Unfinished requests after the last step, sorted.
  const std::vector<std::string>& unfinished() const { return unfinished_.sorted(); }

 private:
  bool agrees();
  // Records the mismatch. Returns false, for the caller to return.
  bool parts(std::string what, std::string recorded, std::string model);
  void note_rows(const StepView& view);
  // True if a model can have returned the recorded output for the decision, row by row.
  bool output_fits();
  bool list_fits(std::string_view key, const std::vector<RecordedTokens>& lists,
                 std::string_view name, std::int64_t num_tokens_max);

  const RecordingWorkload& workload_;
  ConnectorLog* connector_;
  std::int64_t num_spec_tokens_;
  StepTranscript transcript_;
  struct Row {
    std::string name;
    std::int64_t num_sampled_max = 0;
  };
  std::vector<Row> rows_;  // of the decision
  UnfinishedNames unfinished_;
  std::optional<ConformMismatch> mismatch_;
  bool has_keys_ = false;
};

// The session and its comparing observer.
class ConformRun {
 public:
  // Opens a session under the profile that `header` names. Errors: an unknown profile, or a
  // configuration that the model refuses.
  static Result<std::unique_ptr<ConformRun>> open(const RecordingHeader& header,
                                                  std::unique_ptr<RecordingWorkload> recorded);
  ConformRun(const ConformRun&) = delete;

  Session& session() { return *session_; }
  const RecordingWorkload& workload() const { return workload_; }
  ConformObserver& observer() { return observer_; }
  // Compares the block sizes that the model derives with those of the header.
  std::optional<ConformMismatch> compare_header(const RecordingHeader& header) const;

 private:
  ConformRun(const RecordingHeader& header, RecordingWorkload& recorded);

  std::optional<ConnectorLog> log_;
  const RecordingWorkload& workload_;
  ConformObserver observer_;
  std::unique_ptr<Session> session_;
};

struct ConformFile {
  std::string file;
  std::string engine;     // as the recording names it
  std::string judged_as;  // profile: of that engine, of the nearest release, or the given one
  std::int64_t steps = 0;
  std::string cut_off{};                    // as cut_off_text()
  std::optional<ConformMismatch> mismatch;  // the first one; absent: agreed
  bool is_stuck = false;     // true if it ends with requests that wait for each other
  std::string wait_cycle{};  // the requests of the cycle and what each waits for
};

struct ConformSummary {
  std::vector<ConformFile> files;    // sorted by name
  std::vector<RefusedFile> refused;  // likewise; none of them is in `files`
  std::int64_t agreed = 0;
  std::int64_t steps = 0;
  std::int64_t stuck = 0;  // recordings that end in a cycle of waiting requests
};

// Compares one recording. `engine`: the profile to compare with; empty: that of the recording's
// engine. Errors: the file cannot be read, its engine has no profile, or it holds inputs that no
// engine can receive. A mismatch is a result, not an Error.
Result<ConformFile> conform_recording(const std::string& path, const std::string& engine = {});
// The same for a recording in memory; `path` is only for messages. Safe to call from several
// threads.
Result<ConformFile> conform_recording(const std::string& path,
                                      std::shared_ptr<const Recording> recording,
                                      const std::string& engine);

struct ConformOptions {
  std::string engine;  // as above
  int jobs = 1;        // files at a time; results do not depend on it
  // Called after each file, from one thread at a time, in any order.
  std::function<void(const std::string& file)> done{};
};
// Compares files in parallel. A refused file is listed with its reason, and the others are still
// compared. After a stop signal no further file is started.
ConformSummary conform_recordings(std::vector<std::string> paths, const ConformOptions& options);

// Compares a run of another engine with the model while it runs: the model receives that engine's
// inputs and must decide the same, in every field, in the same step.
//
// Invariants
// (1) A decision is compared before its output; the output's effects when the engine has processed
//     it.
// (2) After the first difference, or an error of the model, nothing is compared. Nor is a step
//     where both decide equally and the output exceeds what a model can return: the audit judges
//     that decision.
//
// The fields are those above. Not here: an end line; its content is in the steps.

struct LockstepConfig;
class GrowingRecording;
class LockstepRun;

class LiveConform {
 public:
  // Opens the comparison under the profile that `header` names. Errors: what the model does not
  // run.
  static Result<std::unique_ptr<LiveConform>> open(const RecordingHeader& header);
  ~LiveConform();
  LiveConform(const LiveConform&) = delete;

  // Compare a decided step, and the same step when it has completed. False: the two differ, or the
  // model cannot continue. REQUIRES: alternating calls, decided() first.
  bool decided(const RecordedStep& step);
  bool finished(const RecordedStep& step);

  // The first difference; absent: none so far.
  const std::optional<CheckFailure>& mismatch() const { return mismatch_; }
  const std::optional<Error>& error() const { return error_; }

 private:
  LiveConform(std::string judged_as, std::unique_ptr<ConformRun> model,
              GrowingRecording& recording);
  bool goes_on() const { return !mismatch_ && !error_; }
  bool settle(const Result<bool>& went_on);
  void take(const ConformMismatch& found);

  const std::string judged_as_;
  std::unique_ptr<ConformRun> model_;
  GrowingRecording& recording_;  // the model's workload
  std::unique_ptr<LockstepRun> run_;
  std::optional<CheckFailure> mismatch_;
  std::optional<Error> error_;
  bool is_over_ = false;  // (2), without a difference
};

// For a run without a recorder: records between the loop and its workload, compares every step, and
// ends the run at the first difference.
class ConformingRun final : public StepObserver {
 public:
  explicit ConformingRun(Workload& workload)
      : recorder_(workload, [this](const RecordedStep& step) { agreed_ = live_->finished(step); }) {
  }
  // Before the first step. `config`: of the run. Errors: as LiveConform::open().
  Result<void> open(const LockstepConfig& config, const DecisionSource& decisions);
  Workload& workload() { return recorder_; }
  bool decided(const StepView& view) override {
    recorder_.decided(view);
    return live_->decided(recorder_.step());
  }
  bool finished(const StepView& view) override {
    recorder_.finished(view);
    return agreed_;
  }
  const LiveConform& live() const { return *live_; }

 private:
  RunRecorder recorder_;
  std::unique_ptr<LiveConform> live_;
  bool agreed_ = true;
};

}  // namespace lockstep
