// What a worker did in a run, step by step, until it is written into a recording (--save-facts).
//
// Invariants
// (1) A step has the facts of its last execution; a step that the worker did not run has none.
// (2) A recording is never changed in place: write() makes another file.
#pragma once

#include <cstdint>
#include <map>
#include <string>

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
  void add_to(Recording& recording, WorkedBy worker) const;
  // The recording that was run, with what is known of its steps, as another file.
  Result<void> write(const std::string& recording, const std::string& path, WorkedBy worker) const;

 private:
  std::map<std::int64_t, WorkerStepFacts> steps_;
};

}  // namespace lockstep
