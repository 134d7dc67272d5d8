// The model on the inputs of a recording, read or being made: compares every step with the recorded
// one.
//
// Invariants
// (1) The first difference ends the run; nothing is compared after it.
// (2) The model receives only inputs of the recording, never a recorded decision.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "sim/conform/conform.h"
#include "sim/recording/recorded_terms.h"
#include "sim/recording/recording_workload.h"
#include "sim/session/session.h"

namespace lockstep {

class ConformObserver final : public StepObserver {
 public:
  // `connector` is null in a recording without one.
  ConformObserver(const RecordingWorkload& workload, const RecordingHeader& header,
                  ConnectorLog* connector)
      : workload_(workload),
        connector_(connector),
        num_spec_tokens_(header.options.config.num_spec_tokens),
        transcript_(header) {}

  // The model's sampled tokens belong to the recorded decision: a different decision ends the run
  // before its output arrives.
  bool decided(const StepView& view) override;
  bool finished(const StepView& view) override;
  // The recording has grown by what was sampled and reported. False: no model can have returned it
  // for the decision, and a run that continues with it ends in an Error.
  bool inputs_known();

  const std::optional<ConformMismatch>& mismatch() const { return mismatch_; }
  // A request so far had an adapter, images or embeddings.
  bool has_keys() const { return has_keys_; }
  // Unfinished requests after the last step, sorted.
  const std::vector<std::string>& unfinished() const { return unfinished_; }

 private:
  bool agrees();
  bool parts(std::string what, std::string recorded, std::string model);
  void note_rows(const StepView& view);
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
  std::vector<std::string> unfinished_;
  std::optional<ConformMismatch> mismatch_;
  bool has_keys_ = false;
};

// The session and its comparing observer.
class ConformRun {
 public:
  // By the profile that `header` names. Errors: none of that name, or what the model refuses.
  static Result<std::unique_ptr<ConformRun>> open(const RecordingHeader& header,
                                                  std::unique_ptr<RecordingWorkload> recorded);
  ConformRun(const ConformRun&) = delete;

  Session& session() { return *session_; }
  const RecordingWorkload& workload() const { return workload_; }
  ConformObserver& observer() { return observer_; }
  // The block sizes that the model derives, against those of the header.
  std::optional<ConformMismatch> compare_header(const RecordingHeader& header) const;

 private:
  ConformRun(const RecordingHeader& header, RecordingWorkload& recorded);

  std::optional<ConnectorLog> log_;
  const RecordingWorkload& workload_;
  ConformObserver observer_;
  std::unique_ptr<Session> session_;
};

}  // namespace lockstep
