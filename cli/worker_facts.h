// What a worker did in a run, step by step, until it is written into a recording (--save-facts).
//
// Invariants
// (1) A step has the facts of its last execution; a step that the worker did not run has none.
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
  // For one backend; it must not outlive this.
  FactsSink sink() {
    return [this](std::int64_t step, WorkerStepFacts facts) { steps_[step] = std::move(facts); };
  }
  // Into a recording of the same run.
  void add_to(Recording& recording, WorkedBy worker) const {
    recording.header.worker_facts = std::move(worker);
    for (RecordedStep& step : recording.steps)
      if (const auto found = steps_.find(step.step); found != steps_.end())
        step.facts = found->second;
  }
  // The recording that was run, with what is known of its steps, as another file.
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
