// Plans what a KV connector moves in a step, once the step is decided.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/ids.h"
#include "reference/types/kv_connector.h"
#include "reference/types/scheduler_types.h"
#include "sim/engine/decision_source.h"
#include "sim/step/step_transfers.h"

namespace lockstep {

// The step just decided, and what comes in with its output.
struct DecidedStep {
  const SchedulerOutput& decision;
  const DecisionSource& decisions;
  const KVConnectorOutput& report;             // of the planner's own workers
  std::span<const std::int64_t> block_tokens;  // per group, that an entry of a table stands for
};

class TransferPlanner {
 public:
  virtual ~TransferPlanner() = default;
  // Appends to `transfers`, all but `held` and `lost`, which are there.
  virtual void plan(const DecidedStep& step, StepTransfers& transfers) = 0;
};

// The blocks in which positions [first, last) of a request lie, in every group; null ones left out.
// Host blocks are for the caller to choose.
std::vector<BlockTransfer> blocks_of(const DecidedStep& step, RequestId request, std::int64_t first,
                                     std::int64_t last);

}  // namespace lockstep
