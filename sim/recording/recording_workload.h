// A recording as a workload: step by step the events before it, the samples, and the KV connector's
// answers and reports. Without a connector the current step does not report that the output of a
// step without tokens arrived.
#pragma once

#include <memory>
#include <string>

#include "sim/engine/workload.h"
#include "traces/formats/recording.h"

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
std::unique_ptr<GrowingRecording> make_growing_recording(
    const std::optional<RecordedConnectorConfig>& connector);

// Inputs that the model's scheduler does not support, one line that names the first; empty: all are
// supported.
std::string unfollowed_input(const RecordingHeader& header);
std::string unfollowed_input(const RecordedStep& step);

}  // namespace lockstep
