// What looks on at the memory of a run, beside the comparison that every rank does of itself: all
// ranks together, hidden states that are read out, and what comes next.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "reference/memory/memory_model.h"
#include "reference/types/scheduler_types.h"
#include "sim/protocol/backend.h"
#include "sim/step/worker.h"
#include "sim/verdict/checked.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {

// One rank of memory. All of it outlives the run's checks.
struct RankMemory {
  const BackendConfig& config;  // with the rank's own plan
  const MemoryModel& model;
  Worker& worker;
  Backend& backend;
  const StepProgram& program;  // of the step at hand; step -1: none yet
};

class MemoryCheck {
 public:
  virtual ~MemoryCheck() = default;

  // Once, before the first step. `config`: of the whole model.
  virtual void begin(const BackendConfig& config, std::span<const RankMemory> ranks,
                     RunSummary& summary) = 0;
  // A step has run on all ranks, and each has compared equal.
  virtual Checked step_compared() { return {}; }
  // The step's output is processed: it ended these, and their blocks are nobody else's yet.
  virtual Checked output_taken(std::span<const StoppedRequest> /*stopped*/,
                               std::int64_t /*now_ns*/) {
    return {};
  }
  // After the last step, whatever the verdict: the counts. `agreed`: nothing was found so far.
  virtual Checked finish(bool agreed) = 0;
  // What was left out, one sentence each, where the ranks say theirs.
  virtual std::vector<std::string> not_checked() const { return {}; }
};

}  // namespace lockstep
