// A run of another engine, compared with the model as it runs: the model receives that engine's
// inputs and must decide the same, in every field, in the same step.
//
// Invariants
// (1) A decision is compared before its output; the output's effects when the engine has processed
//     it.
// (2) After the first difference, or an error of the model, nothing is compared. Nor is a step
//     where both decide equally and the output exceeds what a model can return: the audit judges
//     that decision.
//
// Compared as in conform.h. Not here: an end line; its content is in the steps.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "base/result.h"
#include "sim/conform/conform.h"
#include "sim/recording/run_recorder.h"
#include "traces/formats/recording.h"

namespace lockstep {

class ConformRun;
struct LockstepConfig;
class GrowingRecording;
class LockstepRun;

class LiveConform {
 public:
  // By the profile that `header` names. Errors: what the model does not run.
  static Result<std::unique_ptr<LiveConform>> open(const RecordingHeader& header);
  ~LiveConform();
  LiveConform(const LiveConform&) = delete;

  // A decided step, and the same step when it has completed. False: they differ, or the model
  // cannot continue.
  bool decided(const RecordedStep& step);
  bool finished(const RecordedStep& step);

  // The first; absent: none so far.
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

// For a run that has no recorder: stands between the loop and its workload, looks on, and ends the
// run at the first difference.
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
