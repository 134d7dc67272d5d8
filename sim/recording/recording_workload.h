// A recording as a workload: step by step the events before it, the samples, and the KV connector's
// answers and reports. Without a connector the current step does not report that the output of a
// step without tokens arrived.
#pragma once

#include <memory>
#include <string>

#include "reference/schedule/decision_source.h"
#include "sim/engine/workload.h"
#include "traces/formats/recording.h"
#include "traces/formats/run_spec.h"

namespace lockstep {

WorkloadEvent workload_event_of(const RecordedEvent& recorded);

// `current` shows the step that the loop is in (for conform).
class RecordingWorkload : public Workload {
 public:
  bool is_scripted() const override { return true; }
  virtual const RecordedStep& current() const = 0;
  virtual const RecordingEnd& end() const = 0;  // REQUIRES: next_turn() returned Turn::end or cut
};
std::unique_ptr<RecordingWorkload> make_recording_workload(RecordingReader reader);
// `path`: of the file that it was read from, for messages.
std::unique_ptr<RecordingWorkload> make_recording_workload(
    std::shared_ptr<const Recording> recording, std::string path = {});

// A recording that is being made: it is shown step by step what is known of it so far.
class GrowingRecording : public RecordingWorkload {
 public:
  // Before the step's turn; and again with what it came to, before the step is executed.
  virtual void show(const RecordedStep& step) = 0;
};
std::unique_ptr<GrowingRecording> make_growing_recording(const RecordingHeader& header);

// Inputs that the model's scheduler does not support, one line that names the first; empty: all are
// supported.
std::string unfollowed_input(const RecordingHeader& header);
// ... and those that a run does not support, also with recorded decisions.
std::string unfollowed_input(const RecordedStep& step, Decides decide);

// The decisions of a recording, followed unchanged on its own inputs (recording_workload.h).
//
// Invariants
// (1) Step n of the run is step n of the recording: tables, tokens, outputs, ends.
// (2) A request has its prompt and what the outputs gave it: nothing of a step in flight when a
//     reset preempted the request, and of a stale output what the recording says.
//
// Not here: whether the decisions make sense (the audit), and whether the model makes the same
// (conform).

// A decision that names an unknown request, or a step that is not there, is an EngineFailure of
// kind "recording".
struct FollowedRecording {
  std::unique_ptr<RecordingWorkload> clients;  // holds what the KV connector answered and reported
  DecisionsFactory decisions;
};
FollowedRecording follow_recording(std::shared_ptr<const Recording> recording,
                                   std::string path = {});

// The inputs of a recording, for an engine that may decide differently from the recorded one: what
// clients did before each step, what was sampled, what the KV connector answered and reported.
//
// Invariants
// (1) An engine that decides as the recorded one receives the recorded inputs, answer by answer.
// (2) Any other engine receives fitting inputs: a token where the recording has none for a row, the
//     connector's tokens after a different local hit, the report of a load no sooner than its
//     start.
// (3) The run continues after the last recorded step until all requests have ended or deadlock.

std::unique_ptr<Workload> make_given_inputs(std::shared_ptr<const Recording> recording);

}  // namespace lockstep
