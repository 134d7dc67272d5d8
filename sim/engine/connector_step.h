// The KV connector of a run, step by step: its workers' reports and its transfers.
//
// Invariants
// (1) A report is attached to the output of the step that was decided before it.
#pragma once

#include <cstdint>
#include <vector>

#include "base/result.h"
#include "reference/types/kv_connector.h"
#include "sim/engine/step_observer.h"
#include "sim/engine/workload.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {

// What the workers of a workload's KV connector report with a step, once it is known that the
// scheduler can follow it. Nothing without a connector. Refused: a load that no request waits for,
// a transfer of blocks that no request keeps, blocks beyond the pool, invalid blocks of an engine
// with several groups (which vLLM cannot follow either).
Result<KVConnectorOutput> connector_report(Workload& workload, const DecisionSource& decisions,
                                           const KVCacheConfig& plan);

class ConnectorStep {
 public:
  // All of it outlives this.
  ConnectorStep(const RunConfig& config, const DecisionSource& decisions, Workload& workload);

  bool is_there() const { return workload_.connector() != nullptr; }
  // With the step just decided. `has_memory`: some reports are not modelled on a backend.
  Result<void> take_report(std::int64_t step, bool has_memory);
  // What the step loads and stores, and the counts of it.
  void plan(const SchedulerOutput& decision, RunSummary& summary);
  const StepTransfers& transfers() const { return transfers_; }
  // The report that arrives with the step's output.
  KVConnectorOutput& report() { return report_; }
  const KVConnectorOutput& report() const { return report_; }

 private:
  const RunConfig& config_;
  const DecisionSource& decisions_;
  Workload& workload_;
  std::vector<std::int64_t> block_tokens_;  // per group, that an entry of a table stands for
  KVConnectorOutput report_;
  StepTransfers transfers_;
};

}  // namespace lockstep
