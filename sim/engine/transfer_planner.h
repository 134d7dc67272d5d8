// Plans what a KV connector moves in a step, once the step is decided.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/ids.h"
#include "reference/schedule/scheduler.h"
#include "reference/types/kv_connector.h"
#include "reference/types/scheduler_types.h"
#include "sim/step/transfer_step.h"

namespace lockstep {

// The step just decided, and what comes in with its output.
struct DecidedStep {
  const SchedulerOutput& decision;
  const Scheduler& scheduler;
  const KVConnectorOutput& report;             // of the planner's own workers
  std::span<const std::int64_t> block_tokens;  // per group, that an entry of a table stands for
};

class TransferPlanner {
 public:
  virtual ~TransferPlanner() = default;
  // Appends to `transfers`, all but `held` and `lost`, which are there.
  virtual void plan(const DecidedStep& step, StepTransfers& transfers) = 0;
};

}  // namespace lockstep
