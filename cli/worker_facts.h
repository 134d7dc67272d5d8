// Collects what a worker does in each step of a run, until it is written into a recording
// (--save-facts). `lockstep audit` then checks it against the recorded decisions.
//
// Invariants
// (1) A step has the facts of its last execution. A step that the worker did not run has none.
// (2) A recording is never changed in place: write() makes another file.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "base/result.h"
#include "sim/worker/worker_backend.h"
#include "traces/formats/recording.h"

namespace lockstep {

class FactsOfRun {
 public:
  // Returns the receiver of a backend's facts. The backend must not outlive this object.
  FactsSink sink() {
    return [this](std::int64_t step, WorkerStepFacts facts) { steps_[step] = std::move(facts); };
  }
  // Adds the facts to a recording of the same run, by step number.
  void add_to(Recording& recording, WorkedBy worker) const {
    recording.header.worker_facts = std::move(worker);
    for (RecordedStep& step : recording.steps)
      if (const auto found = steps_.find(step.step); found != steps_.end())
        step.facts = found->second;
  }
  // Writes the recording that was run, with the facts of its steps in place of any that it had, as
  // another file.
  Result<void> write(Recording whole, const std::string& path, WorkedBy worker) const {
    for (RecordedStep& step : whole.steps) step.facts.reset();
    add_to(whole, std::move(worker));
    LS_ASSIGN_OR_RETURN(auto file, RecordingWriter::create(path, whole.header));
    for (const RecordedStep& step : whole.steps) LS_RETURN_IF_ERROR(file.write(step));
    return file.close(whole.end);
  }

 private:
  std::map<std::int64_t, WorkerStepFacts> steps_;
};

}  // namespace lockstep
