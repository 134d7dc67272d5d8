// Writes the hashes of each step of a run (traces/formats/step_hashes.h): the decision and the
// tables as the scheduler has them, the pages as the backend has them after the comparison. Two
// runs can then be compared step by step without their recordings.
//
// Invariants
// (1) The run is the same with and without it.
// (2) Only complete steps are written. A step that diverges is not; the end line has its phase.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "sim/engine/run_memory.h"
#include "sim/engine/step_observer.h"
#include "sim/verdict/run_summary.h"
#include "traces/formats/step_hashes.h"

namespace lockstep {

// Observes one engine's run and checks its memory.
class StepHasher final : public StepObserver, public MemoryCheck {
 public:
  explicit StepHasher(StepHashesWriter writer) : writer_(std::move(writer)) {}

  bool decided(const StepView& view) override;
  bool finished(const StepView& view) override;

  void begin(const BackendConfig& config, std::span<const RankMemory> ranks,
             RunSummary& summary) override;
  Checked step_compared() override;
  Checked finish(bool /*agreed*/) override { return {}; }

  // Writes the end line. REQUIRES: after the run. Errors: the file could not be written, now or in
  // an earlier step.
  Result<void> close(const RunSummary& summary, bool is_interrupted);

 private:
  StepHashesWriter writer_;
  Result<void> written_;  // first failure
  std::vector<RankMemory> ranks_;
  StepHashes step_;
  std::int64_t num_steps_ = 0;
};

}  // namespace lockstep
