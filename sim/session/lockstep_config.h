// The configuration of a run: its engines' loops, what stands beside them, and planted defects.
#pragma once

#include "base/result.h"
#include "reference/types/scheduler_defect.h"
#include "sim/connectors/connector_config.h"
#include "sim/engine/run_config.h"
#include "sim/hidden_states/watched_files.h"
#include "sim/ranks/dp_step.h"
#include "sim/step/backend_config.h"

namespace lockstep {

struct LockstepConfig : RunConfig {
  SchedulerDefect scheduler_defect = SchedulerDefect::none;
  ConnectorConfig connector;          // what a workload that has none of its own is given
  DataParallelOptions data_parallel;  // several engines
  HiddenStateDefect hidden_state_defect = HiddenStateDefect::none;
  bool draw = false;  // collect a timeline
};

// Refused: degrees that the plan cannot be cut into, and numbers of engines that nobody runs.
Result<void> check_ranks(const LockstepConfig& config);

}  // namespace lockstep
