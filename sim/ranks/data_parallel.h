// Data parallel ranks: engines with a scheduler, a pool and backends of their own, among which the
// requests are dealt out, and which meet in collectives in every step.
//
// (1) All ranks run every step of a wave, with or without work: an idle one runs a batch that
//     belongs to nobody, whose padded tokens write nothing. The backend executes it, and everything
//     is compared as in any other step.
// (2) A request goes to the rank with the least load (4 * waiting + running), of equal ones the
//     lowest; it stays there. Aborts find theirs, resets of the prefix cache reach all.
// (3) There is one clock: a step takes as long as the rank with the most tokens takes.
// (4) What each rank would call in a step (dp_step.h) is put side by side (collectives.h) before it
//     runs. The first call that does not meet ends the run: a mismatch is a divergence, a rank that
//     the others wait for is a matter of liveness. Both name the rank.
// (5) Same configuration, workload and seed: same run; its state hash is made of all ranks'.
//
// Not modelled: who balances load from stale counts, and expert parallelism beyond its collectives.
// Rules: vllm/v1/engine/core_client.py (DPLBAsyncMPClient), v1/engine/core.py (DPEngineCoreProc).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "reference/result.h"
#include "sim/backend.h"
#include "sim/decision_source.h"
#include "sim/lockstep.h"
#include "sim/workload.h"

namespace lockstep {

// What one data parallel rank runs on.
struct EngineParts {
  DecisionSource* decisions = nullptr;
  std::vector<Backend*> ranks;  // as in run_lockstep(); none: the decisions alone
};

// REQUIRES: config.data_parallel.dp_size engines; a workload without a script or a connector.
Result<RunReport> run_data_parallel(const LockstepConfig& config,
                                    std::span<const EngineParts> engines, Workload& workload);

}  // namespace lockstep
